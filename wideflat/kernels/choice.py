"""By which means a step of Entropy-SGD is taken: the kernel in C, torch's operations on blocks, or on whole tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from wideflat.kernels.blocks import BlockLists
from wideflat.kernels.entropy_sgd import KernelLists
from wideflat.kernels.library import kernel_is_there
from wideflat.kernels.parts import Part
from wideflat.kernels.rounding import ROUNDED, empty_rest
from wideflat.kernels.shards import is_walkable, local, stretches

__all__ = ["chosen", "is_rounded", "rests"]


def chosen(
    part: Part, lists: tuple, fused: bool | None, restarts: bool, apart: bool, chance: int | None
) -> KernelLists | BlockLists | None:
    """The kernel on the tensors of a group, torch's operations on blocks of them, or None: on whole tensors.

    Args:
        part: The group.
        lists: w', w, mu, velocities and what rounding has left, each a list of tensors or None.
        fused: Whether the kernel is asked for (True), refused (False), or taken where it fits (None).
        restarts: Whether the state of the loop begins anew with each cycle, as the kernel has it.
        apart: Whether these parameters of 16 bits are moved in float32 and rounded in a way of their own.
        chance: Seed of stochastic rounding; None for none.
    """
    firsts = stretches(part.places)
    wanted = fused or (fused is None and kernel_is_there(part.w_prime[0]))
    if wanted and restarts and firsts is not None and KernelLists.fits(*lists):
        return KernelLists(*lists[:4], offsets=firsts)
    if fused:
        raise RuntimeError(
            "EntropySGD(fused=True) is for dense parameters on the CPU, all of a group in float32 or float64, cut "
            "by rows if at all, with inner_state='restart'; use fused=None, which falls back on torch's operations"
        )
    walkable = all(is_walkable(place) for place in part.places)
    if walkable and BlockLists.fits(*lists) and (apart or part.w_prime[0].dtype == part.w[0].dtype):
        return BlockLists(*lists, offsets=part.places, restarts=restarts, chance=chance)
    return None


def is_rounded(part: Part) -> bool:
    """Are these parameters of 16 bits with centers in float32, to be moved so and rounded in a way of their own?"""
    return all(p.dtype in ROUNDED and w.dtype == torch.float32 for p, w in zip(part.params, part.w, strict=True))


def rests(part: Part) -> list[Tensor]:
    """What the rounding of w' has lost, which is kept with the state: for parameters of 16 bits, all of a group."""
    for p, state in zip(part.params, part.states, strict=True):
        rest = state.get("rest")
        if rest is None or rest.dtype != ROUNDED[p.dtype] or rest.device != p.device or rest.stride() != p.stride():
            state["rest"] = empty_rest(p)
    return [local(state["rest"]) for state in part.states]
