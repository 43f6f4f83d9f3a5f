"""The threads of process groups are done with their tensors before the interpreter ends.

A thread of gloo that lets go of a tensor needs the interpreter, and aborts the process if that is ending. The threads
are joined when nobody holds their process group any more. Two things hold it longer than one thinks: cycles that wait
to be collected, and the functions of ``torch.distributed.nn.functional``, whose default arguments are the group of the
moment at which they are imported. Imported here, before there is a group, they hold none; the first optimizer imports
them otherwise. A mesh in a variable of a script holds its groups to the end: their threads are given a moment there.
"""

from __future__ import annotations

import atexit
import functools
import gc
import time
from pathlib import Path

import torch.distributed as dist

if dist.is_available():
    import torch.distributed.nn.functional  # noqa: F401

__all__ = ["leave_in_peace"]

#: Seconds in which threads that are still there come to rest; what they have to do takes microseconds of them.
MOMENT = 0.1


@functools.cache
def leave_in_peace() -> None:
    """See to it that this process does not end under the hands of such a thread; more than once is as good as once."""
    atexit.register(_before_the_interpreter_ends)


def _before_the_interpreter_ends() -> None:
    gc.collect()
    if _threads_of_gloo():
        time.sleep(MOMENT)


def _threads_of_gloo() -> int:
    """How many there are, where the system tells; else 1, since there may be some."""
    try:
        names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    except OSError:
        return 1
    return sum("gloo" in name for name in names)
