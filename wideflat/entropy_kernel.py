"""The steps of Entropy-SGD as one pass over memory each, on the CPU: a kernel in C, compiled at its first use.

As a chain of torch's operations a step reads and writes the parameters several times, and the noise costs more than the
rest. The kernel (``entropy_kernel.c``) does the same arithmetic and draws the same noise, in one loop. It needs a C
compiler, as ``torch.compile`` does on the CPU; where there is none, `EntropySGD` uses torch's operations. The compiled
library is kept in ``$XDG_CACHE_HOME/wideflat`` (``~/.cache/wideflat``) for the next time.
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
from torch import Tensor, nn

from wideflat.cache_blocks import _is_dense
from wideflat.langevin_noise import GaussianNoise

__all__ = ["KernelError", "KernelLists", "Rule", "compile_kernel", "kernel_is_there"]

#: How a type of numbers is called in C.
REAL = {torch.float32: "float", torch.float64: "double"}

#: Elements for which a second thread begins to pay.
ELEMENTS_PER_THREAD = 16384

_WORD = (1 << 64) - 1


class KernelError(RuntimeError):
    """There is no kernel, and why."""


class Rule(ctypes.Structure):
    """What a step does; the fields of the same name in C."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("lr", "momentum", "nesterov", "weight_decay")),
        *((name, ctypes.c_double) for name in ("gamma", "alpha", "noise")),
        ("starting", ctypes.c_int64),
    ]


class Source(ctypes.Structure):
    """Where the noise comes from; the fields of the same name in C."""

    _fields_ = [
        *((f"{name}_{half}", ctypes.c_uint64) for name in ("origin", "increment", "first") for half in ("high", "low")),
        ("quantiles", ctypes.c_void_p),
    ]


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
        return _load(_command(), files("wideflat").joinpath("entropy_kernel.c").read_bytes(), real)
    except KernelError as error:
        return error


def kernel_is_there(params: list[Tensor]) -> bool:
    """Is there a kernel for the first of these? Asked for the first time, it is compiled."""
    return (
        bool(params)
        and params[0].device.type == "cpu"
        and params[0].dtype in REAL
        and not isinstance(_outcome(REAL[params[0].dtype]), KernelError)
    )


def _command() -> list[str]:
    """The C compiler: ``$CC``, or the first of the usual names."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for candidate in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if path := shutil.which(candidate[0]):
            return [path, *candidate[1:]]
    names = shlex.join(chosen) or "cc, gcc, clang"
    raise KernelError(
        f"the kernel of EntropySGD needs a C compiler, and there is none ({names}); set CC to name another"
    )


def _load(compiler: list[str], source: bytes, real: str) -> ctypes.CDLL:
    """Compile and load, with threads if that can be: they are to be torch's own, so the OpenMP library is not linked
    but the one that torch has loaded is found.
    """
    flags = ["-O3", "-march=native", "-std=c11", "-fPIC", f"-DREAL={real}"]
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
        target = subprocess.run([*compiler, *flags, "-Q", "--help=target"], capture_output=True).stdout
        key = hashlib.sha256(b"\0".join([source, version, target, " ".join(flags).encode(), _processor().encode()]))
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wideflat"
        path = folder / f"entropy_kernel-{key.hexdigest()[:24]}.so"
        if path.exists():
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            (Path(place) / "kernel.c").write_bytes(source)
            for command in ([*flags, "-c", "kernel.c", "-o", "kernel.o"], ["-shared", "kernel.o", "-o", "kernel.so"]):
                subprocess.run([*compiler, *command], cwd=place, capture_output=True, check=True)
            os.replace(Path(place) / "kernel.so", path)
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


class KernelLists:
    """The tensors of a param group as the kernel takes them, to be used in many steps.

    Args:
        w_prime: The parameters, which `fits` has accepted with the others.
        w: The centers.
        mu: The running means.
        velocity: Of the momentum; None without.
        offsets: The place in the noise of the first element of each parameter.

    Raises:
        KernelError: There is no kernel.
    """

    def __init__(
        self,
        w_prime: list[Tensor],
        w: list[Tensor],
        mu: list[Tensor],
        velocity: list[Tensor] | None = None,
        *,
        offsets: list[int],
    ) -> None:
        self._step = compile_kernel(w_prime[0].dtype).step
        self._w_prime, self._offsets = w_prime, offsets
        self._kept = [tensors for tensors in (w_prime, w, mu, velocity) if tensors is not None]
        self._addresses = _addresses(self._kept)
        self._pointers = [None if tensors is None else _pointers(tensors) for tensors in (w_prime, w, mu, velocity)]
        numbers = ctypes.c_int64 * len(w_prime)
        self._sizes, self._places = numbers(*(p.numel() for p in w_prime)), numbers(*offsets)
        self._threads = 1 + sum(self._sizes) // ELEMENTS_PER_THREAD
        self._strides = [p.stride() for p in w_prime]

    @staticmethod
    def fits(*lists: list[Tensor]) -> bool:
        """Can the kernel work on these: plain tensors on the CPU, of one type, without gaps, lying alike?"""
        return (
            bool(lists[0])
            and all(
                type(t) in (Tensor, nn.Parameter)
                and t.device.type == "cpu"
                and t.dtype == lists[0][0].dtype
                and t.stride() == tensors[0].stride()
                and _is_dense(t)
                for tensors in zip(*lists, strict=True)
                for t in tensors
            )
            and (lists[0][0].dtype in REAL)
        )

    def still_of(self, *lists: list[Tensor], offsets: list[int]) -> bool:
        """Are these the same lists, at the same memory?"""
        return self._offsets == offsets and self._addresses == _addresses(lists)

    def inner_step(self, gradients: list[Tensor], rule: Rule, noise: GaussianNoise | None, step: int) -> None:
        """One inner step: moves w', mu and the velocity; at the start of a cycle w is put on w' first."""
        alike = [_lying_as(g, strides) for g, strides in zip(gradients, self._strides, strict=True)]
        self._call(rule, None if noise is None else _source(noise, step), _pointers(alike))

    def outer_step(self, rule: Rule) -> None:
        """The outer step: moves w towards mu, and puts w' on it."""
        self._call(rule, None, None)

    def _call(self, rule: Rule, source: Source | None, gradients: ctypes.Array[ctypes.c_void_p] | None) -> None:
        threads = ctypes.c_int64(min(self._threads, torch.get_num_threads()))
        self._step(
            threads,
            ctypes.c_int64(len(self._sizes)),
            self._sizes,
            self._places,
            ctypes.byref(rule),
            None if source is None else ctypes.byref(source),
            *self._pointers,
            gradients,
        )
        for tensors in self._kept:  # autograd must know that they are others now
            torch.autograd.graph.increment_version(tensors)


def _lying_as(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor, or a copy of it, with its elements in the order of these strides."""
    own = tensor.stride()
    if own == strides or all(a == b for a, b, size in zip(own, strides, tensor.shape, strict=True) if size > 1):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def _addresses(lists: tuple[list[Tensor], ...] | list[list[Tensor]]) -> list[list[int]]:
    return [[tensor.data_ptr() for tensor in tensors] for tensors in lists]


def _pointers(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _source(noise: GaussianNoise, step: int) -> Source:
    numbers = (*noise.origin, noise.first_word(step))
    halves = [half for number in numbers for half in (number >> 64, number & _WORD)]
    return Source(*halves, noise.upper_quantiles.data_ptr())
