"""Loops in C for what a chain of torch's operations does slowly on the CPU, compiled at their first use.

Noise for millions of weights costs more than what is done with it, and every torch operation is another trip to memory.
The loops (``kernels.c``) draw the noise of `wideflat.kernels.noise`, and do the rest in the same pass. They need a C
compiler, as ``torch.compile`` does on the CPU; where there is none, torch's operations are used. The compiled library
is kept in ``$XDG_CACHE_HOME/wideflat`` (``~/.cache/wideflat``) for the next time.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from wideflat.files import atomic_write

__all__ = ["KernelError", "Source", "compile_kernel", "kernel_is_there", "pointer", "threads_for"]

#: How a type of numbers is called in C.
REAL = {torch.float32: "float", torch.float64: "double"}

#: The arithmetic stays that of the source but for fused multiplications and additions, and nobody waits for exceptions.
FLAGS = ["-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fno-trapping-math", "-fno-math-errno", "-fPIC"]

#: Elements for which a second thread begins to pay.
ELEMENTS_PER_THREAD = 16384


class KernelError(RuntimeError):
    """There is no kernel, and why."""


class Source(ctypes.Structure):
    """Where the noise comes from; the fields of the same name in C."""

    _fields_ = [
        *((f"{name}_{half}", ctypes.c_uint64) for name in ("origin", "increment", "first") for half in ("high", "low")),
        ("quantiles", ctypes.c_void_p),
    ]


def threads_for(elements: int) -> int:
    """How many of torch's threads are worth starting."""
    return min(1 + elements // ELEMENTS_PER_THREAD, torch.get_num_threads())


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Where the numbers of a tensor are, as C takes it."""
    return ctypes.c_void_p(tensor.data_ptr())


def compile_kernel(dtype: torch.dtype) -> ctypes.CDLL:
    """The library for one type of numbers, compiled unless it is there already.

    Raises:
        KernelError: There is no compiler, it fails, or nothing can be written.
    """
    outcome = _outcome(REAL[dtype])
    if isinstance(outcome, KernelError):
        raise outcome
    return outcome


@cache
def _outcome(real: str) -> ctypes.CDLL | KernelError:
    """What came of it, so that a failure is not tried again at every step."""
    try:
        return _load(_command(), files("wideflat.kernels").joinpath("kernels.c").read_bytes(), real)
    except KernelError as error:
        return error


def kernel_is_there(tensor: Tensor) -> bool:
    """Is there a kernel for such tensors? Asked for the first time, it is compiled."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in REAL
        and not isinstance(_outcome(REAL[tensor.dtype]), KernelError)
    )


def _command() -> list[str]:
    """The C compiler: ``$CC``, or the first of the usual names."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for candidate in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if path := shutil.which(candidate[0]):
            return [path, *candidate[1:]]
    names = shlex.join(chosen) or "cc, gcc, clang"
    raise KernelError(f"the kernel needs a C compiler, and there is none ({names}); set CC to name another")


def _load(compiler: list[str], source: bytes, real: str) -> ctypes.CDLL:
    """Compile and load, with threads if that can be: they are to be torch's own, so the OpenMP library is not linked
    but the one that torch has loaded is found.
    """
    flags = [*FLAGS, f"-DREAL={real}"] + ["-DDOUBLE"] * (real == "double")
    failures = []
    for threads in (["-fopenmp"], []):
        try:
            return ctypes.CDLL(str(_compiled(compiler, [*flags, *threads], source)))
        except (KernelError, OSError) as error:
            failures.append(str(error))
    raise KernelError(failures[-1])


def _compiled(compiler: list[str], flags: list[str], source: bytes) -> Path:
    """The path of the library, named after all that it depends on; written under another name first."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
        key = hashlib.sha256(b"\0".join([source, version, " ".join(flags).encode(), _processor().encode()]))
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wideflat"
        path = folder / f"kernels-{key.hexdigest()[:24]}.so"
        if path.exists():
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            (Path(place) / "kernel.c").write_bytes(source)
            steps = [*flags, "-c", "kernel.c", "-o", "kernel.o"], ["-shared", "kernel.o", "-lm", "-o", "kernel.so"]
            for command in steps:
                subprocess.run([*compiler, *command], cwd=place, capture_output=True, check=True)
            with atomic_write(path, "wb") as file:
                file.write((Path(place) / "kernel.so").read_bytes())
        return path
    except subprocess.CalledProcessError as error:
        raise KernelError(f"{shlex.join(error.cmd)} failed: {error.stderr.decode(errors='replace')[-2000:]}") from error
    except (OSError, RuntimeError) as error:
        raise KernelError(str(error)) from error


def _processor() -> str:
    """What ``-march=native`` stands for, for a home directory that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
