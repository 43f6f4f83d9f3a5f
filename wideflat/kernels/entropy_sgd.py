"""The steps of Entropy-SGD in one pass over memory each, by the kernel in C (`wideflat.kernels.library`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wideflat.kernels.flat_blocks import Memory, alike
from wideflat.kernels.library import REAL, Source, compile_kernel, threads_for
from wideflat.kernels.noise import GaussianNoise

__all__ = ["KernelLists", "Rule", "pointers"]


class Rule(ctypes.Structure):
    """What a step does; the fields of the same name in C."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("lr", "momentum", "nesterov", "weight_decay")),
        *((name, ctypes.c_double) for name in ("gamma", "alpha", "noise")),
        ("starting", ctypes.c_int64),
    ]


class KernelLists:
    """The tensors of a param group as the kernel takes them, to be used in many steps.

    Args:
        w_prime: The parameters, which `fits` has accepted with the others.
        w: The centers.
        mu: The running means; None where they are w' itself, because alpha = 0.
        velocity: Of the momentum; None without.
        offsets: The place in the noise of the first element of each parameter.

    Raises:
        KernelError: There is no kernel.
    """

    def __init__(
        self,
        w_prime: list[Tensor],
        w: list[Tensor],
        mu: list[Tensor] | None = None,
        velocity: list[Tensor] | None = None,
        *,
        offsets: list[int],
    ) -> None:
        self._step = compile_kernel(w_prime[0].dtype).step
        self._offsets = offsets
        lists = [w_prime, w, mu, velocity]
        # Detached ones keep the memory: as long as they are there, nobody else can have its address.
        self._kept = [t.detach() for tensors in lists if tensors is not None for t in tensors]
        self._memory = Memory(lists)
        self._pointers = [None if tensors is None else pointers(tensors) for tensors in lists]
        numbers = ctypes.c_int64 * len(w_prime)
        self._sizes, self._starts = numbers(*(p.numel() for p in w_prime)), numbers(*offsets)
        self._elements = sum(self._sizes)

    @staticmethod
    def fits(*lists: list[Tensor] | None) -> bool:
        """Can the kernel work on these: plain tensors on the CPU, of one type, lying alike?"""
        there = [tensors for tensors in lists if tensors is not None]
        return (
            bool(there[0])
            and there[0][0].dtype in REAL
            and all(
                alike(*tensors)
                and tensors[0].device.type == "cpu"
                and tensors[0].dtype == there[0][0].dtype
                and all(type(t) in (Tensor, nn.Parameter) for t in tensors)
                for tensors in zip(*there, strict=True)
            )
        )

    def matches(self, *lists: list[Tensor] | None, offsets: Sequence[object]) -> bool:
        """Are these the same lists, at the same memory and lying as they did?"""
        return self._offsets == offsets and self._memory.holds(lists[: len(self._pointers)])

    def inner_step(
        self, gradients: list[Tensor], rule: Rule, noise: GaussianNoise | None, step: int, taken: bool = False
    ) -> None:
        """One inner step: moves w', mu and the velocity; at the start of a cycle w is put on w' first."""
        gradients = self._memory.in_order(gradients)
        self._call(rule, None if noise is None else noise.source(step), pointers(gradients))

    def outer_step(self, rule: Rule) -> None:
        """The outer step: moves w towards mu, and puts w' on it."""
        self._call(rule, None, None)

    def _call(self, rule: Rule, source: Source | None, gradients: ctypes.Array[ctypes.c_void_p] | None) -> None:
        self._step(
            ctypes.c_int64(threads_for(self._elements)),
            ctypes.c_int64(len(self._sizes)),
            self._sizes,
            self._starts,
            ctypes.byref(rule),
            None if source is None else ctypes.byref(source),
            *self._pointers,
            gradients,
        )
        torch.autograd.graph.increment_version(self._kept)  # autograd must know that they are others now


def pointers(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Where the numbers of tensors are, as C takes it."""
    return (ctypes.c_void_p * len(tensors))(*map(Tensor.data_ptr, tensors))
