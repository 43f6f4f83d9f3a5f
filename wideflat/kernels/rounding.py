"""What rounding to 16 bits loses: kept beside the weights, or made up for by chance.

A weight in bfloat16 near 1 cannot move by less than 0.004, and most steps are shorter. Either the part that is lost is
kept (`join`, `part`: 16 bits more, and both together are the float32 weight itself), or the weight is rounded up or
down by chance, so that it is right on average (`round_by_chance`: nothing to keep, and noise instead of a standstill).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROUNDED", "empty_rest", "join", "part", "round_by_chance"]

#: The type of what is kept, by that of the weights: for bfloat16 the other half of the bits of a float32 number.
ROUNDED = {torch.bfloat16: torch.int16, torch.float16: torch.float16}

#: What a float16 weight loses is at most its 2048th part; scaled by that it has the size of the weight.
_SCALE = 2048.0


def empty_rest(p: Tensor) -> Tensor:
    """Memory for what is lost of a parameter, of which nothing is lost yet."""
    return torch.zeros_like(p, dtype=ROUNDED[p.dtype], requires_grad=False)


def join(rounded: Tensor, rest: Tensor) -> Tensor:
    """The float32 weights of which ``rounded`` is what the model holds.

    >>> w = torch.tensor([1.001, -3.3, 1e-20])
    >>> rounded, rest = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int16)
    >>> part(w, rounded, rest)
    >>> rounded.tolist()[:2], torch.equal(join(rounded, rest), w)
    ([1.0, -3.296875], True)
    """
    if rounded.dtype == torch.bfloat16:
        return (rounded.view(torch.int16).to(torch.int32) << 16).add_(rest).view(torch.float32)
    return rounded.to(torch.float32).add_(rest.to(torch.float32), alpha=1 / _SCALE)


def part(w: Tensor, rounded: Tensor, rest: Tensor) -> None:
    """The inverse of `join`: round float32 weights to the nearest, and keep what is lost.

    In bfloat16 nothing is: 16 bits are the weight and 16 bits the rest. In float16 22 bits of 24 remain.
    """
    if rounded.dtype == torch.bfloat16:
        bits = w.view(torch.int32)
        high = (bits + 0x8000) >> 16
        rounded.view(torch.int16).copy_(high)
        rest.copy_(bits - (high << 16))
        return
    rounded.copy_(w)
    rest.copy_((w - rounded.to(torch.float32)).mul_(_SCALE))


def round_by_chance(w: Tensor, rounded: Tensor, chance: Tensor) -> None:
    """Round float32 weights up or down, each with the probability that makes it right on average.

    Args:
        w: The weights; changed.
        rounded: Where they go.
        chance: Whole numbers, of which the lowest 16 bits are random.

    Example:
        >>> rounded = torch.empty(4, dtype=torch.bfloat16)
        >>> w = torch.full((4,), 1 + 0.25 / 128)  # a quarter of the way from 1 to the next number
        >>> round_by_chance(w, rounded, torch.tensor([0, 16384, 32768, 49152], dtype=torch.int32))
        >>> [(x - 1) * 128 for x in rounded.tolist()]
        [0.0, 0.0, 0.0, 1.0]
    """
    lost = 16 if rounded.dtype == torch.bfloat16 else 13
    bits = w.view(torch.int32)
    finite = w.isfinite()
    bits.add_((chance & ((1 << lost) - 1)).to(torch.int32) * finite).bitwise_and_(-(1 << lost))
    rounded.copy_(w)
