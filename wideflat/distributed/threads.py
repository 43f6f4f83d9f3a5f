"""The threads of process groups are done with their tensors before the interpreter ends.

A thread of gloo that lets go of a tensor needs the interpreter, and aborts the process if that is ending. The threads
are joined when nobody holds their process group any more. Two things hold it longer than one thinks: cycles that wait
to be collected, and the functions of ``torch.distributed.nn.functional``, whose default arguments are the group of the
moment at which they are imported. Imported here, before there is a group, they hold none; the first optimizer imports
them otherwise. A mesh in a variable of a script holds its groups to the end: their threads are given the time
to come to rest there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import time
from pathlib import Path

import torch.distributed as dist

if dist.is_available():
    import torch.distributed.nn.functional  # noqa: F401

__all__ = ["leave_in_peace"]

#: What the system tells of the threads of this process.
TASKS = Path("/proc/self/task")

#: Seconds between two looks at threads that are still there; what they have to do takes microseconds of them.
MOMENT = 0.1

#: How many looks at most; a thread that is not at rest by then has other work.
LOOKS = 50


@functools.cache
def leave_in_peace() -> None:
    """See to it that this process does not end under the hands of such a thread; more than once is as good as once."""
    atexit.register(_before_the_interpreter_ends)


def _before_the_interpreter_ends() -> None:
    gc.collect()
    states = _threads_of_gloo()
    for _ in range(LOOKS):
        if not states:
            return
        time.sleep(MOMENT)  # without the interpreter's lock, which they may wait for
        states = _threads_of_gloo()
        if all(state == "S" for state in states):  # nobody computes, or waits for a processor of a busy machine
            return


def _threads_of_gloo() -> list[str]:
    """The state of each (S: asleep), where the system tells; else of one, asleep, since there may be some."""
    if not TASKS.is_dir():
        return ["S"]
    states = []
    for task in TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if "gloo" in (task / "comm").read_text():
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states
