"""Loops in C for what a chain of torch's operations does slowly on the CPU, compiled at their first use.

Noise for millions of weights costs more than what is done with it, and every torch operation is another trip to memory.
The loops draw the noise of `wideflat.kernels.noise`, and do the rest in the same pass: ``noise.c``, ``entropy_sgd.c``,
``adamw.c``, ``committee.c``. A wheel carries them compiled for its platform (`wideflat.kernels.shipped`). Otherwise
they need a C compiler, as ``torch.compile`` does on the CPU; where there is none, torch's operations are used.

The compiled library is kept in ``$XDG_CACHE_HOME/wideflat`` (``~/.cache/wideflat``) for the next time. What is loaded
from there runs, so the folder and the file must belong to the user and be writable by nobody else, and the file's
contents must have the digest that its name holds. A library that is not whole is made anew; in a folder that others can
write to none is kept, and it is compiled for this process alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import warnings
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from wideflat.files import sha256
from wideflat.kernels.shipped import shipped_library

__all__ = ["KernelError", "Source", "compile_kernel", "is_aligned", "kernel_is_there", "pointer", "threads_for"]

#: How a type of numbers is called in C.
REAL = {torch.float32: "float", torch.float64: "double"}

#: What is compiled into one library; headers are only included.
SOURCES = ("chunks.h", "stream.h", "lanes.h", "noise.h", "noise.c", "entropy_sgd.c", "adamw.c", "committee.c")

#: The arithmetic stays that of the source but for fused multiplications and additions, and nobody waits for exceptions.
FLAGS = ["-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fno-trapping-math", "-fno-math-errno", "-fPIC"]

#: Elements for which a second thread begins to pay.
ELEMENTS_PER_THREAD = 16384

#: Seconds after which a compiler is ended. It needs two, or ten times that on a busy machine.
TIME_LIMIT = 90.0


class KernelError(RuntimeError):
    """There is no kernel, and why."""


class CompilerHangs(KernelError):
    """The compiler was ended after the time limit."""


class Source(ctypes.Structure):
    """Where the noise comes from; the fields of the same name of ``NoiseStream`` in C."""

    _fields_ = [
        *((f"{name}_{half}", ctypes.c_uint64) for name in ("origin", "increment", "first") for half in ("high", "low")),
        ("quantiles", ctypes.c_void_p),
        ("tail_key", ctypes.c_uint64),
        ("tails", ctypes.c_void_p),
    ]


def threads_for(elements: int) -> int:
    """How many of torch's threads are worth starting."""
    return min(1 + elements // ELEMENTS_PER_THREAD, torch.get_num_threads())


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Where the numbers of a tensor are, as C takes it."""
    return ctypes.c_void_p(tensor.data_ptr())


def is_aligned(tensor: Tensor) -> bool:
    """Do its numbers begin at a multiple of their size, as C takes for granted? In a buffer they can begin anywhere."""
    return tensor.data_ptr() % tensor.element_size() == 0


def compile_kernel(dtype: torch.dtype) -> ctypes.CDLL:
    """The library for one type of numbers, compiled unless it is there already.

    Raises:
        KernelError: There is no compiler, it fails or hangs, or nothing can be written.
    """
    outcome = _outcome(REAL[dtype])
    if isinstance(outcome, KernelError):
        raise outcome
    return outcome


def kernel_is_there(tensor: Tensor) -> bool:
    """Is there a kernel for such tensors? Asked for the first time, it is compiled."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in REAL
        and not isinstance(_outcome(REAL[tensor.dtype]), KernelError)
    )


@cache
def _outcome(real: str) -> ctypes.CDLL | KernelError:
    """What came of it, so that a failure is not tried again at every step."""
    if (library := _shipped(real)) is not None:
        return library
    try:
        return _load(_compiler(), real)
    except KernelError as error:
        return error


def _shipped(real: str) -> ctypes.CDLL | None:
    """The library that came with the package, unless ``CC`` asks for another one."""
    path = None if os.environ.get("CC") else shipped_library(real, _sources())
    try:
        return None if path is None else ctypes.CDLL(str(path))
    except OSError:  # it does not fit the system; one that is made here does
        return None


def _sources() -> dict[str, bytes]:
    return {name: files("wideflat.kernels").joinpath(name).read_bytes() for name in SOURCES}


def _load(compiler: list[str], real: str) -> ctypes.CDLL:
    """Compile and load, with threads if that can be: they are to be torch's own, so the OpenMP library is not linked
    but the one that torch has loaded is found.
    """
    flags = [*FLAGS, f"-DREAL={real}"] + ["-DDOUBLE"] * (real == "double")
    failures = []
    for threads in (["-fopenmp"], []):
        try:
            return _library(compiler, [*flags, *threads])
        except CompilerHangs:
            raise
        except (KernelError, OSError) as error:
            failures.append(str(error))
    raise KernelError(failures[-1])


def _library(compiler: list[str], flags: list[str]) -> ctypes.CDLL:
    """The library that was kept, or a new one, which is kept where there is a safe place for it."""
    sources = _sources()
    command = shlex.join([*compiler, *flags]).encode()
    parts = [*sources.values(), _run([*compiler, "--version"]), command, _processor().encode()]
    name = f"kernels-{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:24]}"
    folder = _cache_folder()
    path = None if folder is None else _find(folder, name)
    if path is None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            built = _build(compiler, flags, sources, Path(place))
            if folder is None:
                return ctypes.CDLL(str(built))  # what is loaded stays, though the file goes
            path = folder / f"{name}-{sha256(built)}.so"
            os.replace(built, path)
    return ctypes.CDLL(str(path))


def _cache_folder() -> Path | None:
    """The folder for compiled libraries; None if it cannot be had, or if others could put a library of theirs there."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wideflat"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_private(folder) and os.access(folder, os.W_OK | os.X_OK) else None
    except (OSError, RuntimeError):  # the second where there is no home
        return None


def _is_private(path: Path) -> bool:
    """Does it belong to this user, and can nobody else write to it?"""
    status = path.stat()
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)


def _find(folder: Path, name: str) -> Path | None:
    """The library of that name whose contents are those that were written; what is left of damaged ones is removed."""
    for path in folder.glob(f"{name}-*.so"):
        with contextlib.suppress(OSError):  # gone in the meantime, or not to be read
            if _is_private(path) and path.stem == f"{name}-{sha256(path)}":
                return path
            path.unlink()
    return None


def _build(compiler: list[str], flags: list[str], sources: dict[str, bytes], place: Path) -> Path:
    """Compile in a folder of its own; the library is on the disk when this ends, and only the user can write to it."""
    for name, source in sources.items():
        (place / name).write_bytes(source)
    names = [Path(name).stem for name in sources if name.endswith(".c")]
    _run([*compiler, *flags, "-c", *(f"{name}.c" for name in names)], place)
    _run([*compiler, "-shared", *(f"{name}.o" for name in names), "-lm", "-o", "kernels.so"], place)
    built = place / "kernels.so"
    built.chmod(0o700)
    with open(built, "rb+") as file:
        os.fsync(file.fileno())
    return built


def _compiler() -> list[str]:
    """The C compiler: ``$CC``, or the first of the usual names."""
    named = os.environ.get("CC", "")
    try:
        chosen = shlex.split(named)
    except ValueError as error:
        raise KernelError(f"CC is not a command: {named!r} ({error}); set it to the name of a C compiler") from error
    for candidate in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if path := shutil.which(candidate[0]):
            return [path, *candidate[1:]]
    names = shlex.join(chosen) or "cc, gcc, clang"
    raise KernelError(f"the kernel needs a C compiler, and there is none ({names}); set CC to name another")


#: Compilers that were ended, and what was said: one that hangs once is not waited for again.
_hanging: dict[str, CompilerHangs] = {}


def _run(command: list[str], place: Path | None = None) -> bytes:
    """What a compiler prints. It is ended after the time limit, with all processes that it has started."""
    if command[0] in _hanging:
        raise _hanging[command[0]]
    try:
        process = subprocess.Popen(
            command,
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise KernelError(f"{shlex.join(command)} cannot be run: {error}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            _end(process)
            message = f"{shlex.join(command)} had not ended after {TIME_LIMIT:g} seconds and was stopped"
            _hanging[command[0]] = CompilerHangs(message)
            warnings.warn(f"{message}; torch's operations are used, which are slower", RuntimeWarning, stacklevel=2)
            raise _hanging[command[0]] from None
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        raise KernelError(f"{shlex.join(command)} failed: {errors.decode(errors='replace')[-2000:]}")
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _processor() -> str:
    """What ``-march=native`` stands for, for a home directory that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
