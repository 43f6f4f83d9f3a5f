"""Random numbers that are a function of (seed, step, place), by torch's operations on any device.

`wideflat.kernels.noise` makes such numbers on the processor; its generator has 128 bits and cannot be written in
torch's operations. This one is SplitMix64 at a counter: whole numbers of 64 bits and one look into a table, which
traces, captures and shards, and gives the same numbers compiled or not, on every device.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

__all__ = ["key_of", "normal", "table_on", "words"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

#: Parts of the normal distribution in each octave of the probability beyond them, 2^OCTAVE_BITS, and octaves.
OCTAVE_BITS, OCTAVES = 13, 46


def _signed(number: int) -> int:
    """As torch has it: 64 bits of which the first is the sign."""
    return number - (1 << 64) if number >> 63 else number


def _mix_number(number: int) -> int:
    number = (number ^ (number >> 30)) * _FIRST & _MASK
    number = (number ^ (number >> 27)) * _SECOND & _MASK
    return number ^ (number >> 31)


def _mix(number: Tensor) -> Tensor:
    """The output function of SplitMix64. Shifts of torch keep the sign, which is masked away."""
    number = (number ^ ((number >> 30) & ((1 << 34) - 1))) * _signed(_FIRST)
    number = (number ^ ((number >> 27) & ((1 << 37) - 1))) * _signed(_SECOND)
    return number ^ ((number >> 31) & ((1 << 33) - 1))


def key_of(seed: int, step: int | Tensor, stream: int = 0) -> int | Tensor:
    """Where the counter of a step begins: a number for a number, a tensor for a tensor.

    Args:
        seed: Any whole number.
        step: The number of the step, or a tensor that holds it.
        stream: Other numbers for another purpose.
    """
    base = _mix_number((abs(seed) * 2 + (seed < 0) + stream * _GOLDEN) & _MASK)
    if isinstance(step, Tensor):
        return _mix(step.to(torch.int64) * _signed(_GOLDEN) + _signed(base))
    return _signed(_mix_number((base + step * _GOLDEN) & _MASK))


def words(places: Tensor, key: int | Tensor) -> Tensor:
    """64 random bits for each place.

    >>> key = key_of(seed=1, step=0)
    >>> torch.equal(words(torch.arange(5), key)[3:], words(torch.arange(3, 5), key))
    True
    """
    return _mix((places + 1) * _signed(_GOLDEN) + key)


@cache
def table_on(device: torch.device) -> Tensor:
    """The means of the parts of the upper half, by the bits of the float32 number that is the probability beyond."""
    parts = 1 << OCTAVE_BITS
    octave = torch.arange(OCTAVES, dtype=torch.float64)
    edges = (2.0 ** (octave - OCTAVES - 1))[:, None] * (1 + torch.arange(parts, dtype=torch.float64) / parts)
    edges = torch.cat([edges.flatten(), torch.tensor([0.5], dtype=torch.float64)])
    edges[0] = 0  # all that lies beyond the last octave
    density = torch.exp(-torch.special.ndtri(edges).square() / 2) / math.sqrt(2 * math.pi)
    density[0] = 0
    width = edges.diff()
    means = density.diff() / width
    means /= (2 * (width * means.square()).sum()).sqrt()
    return torch.cat([means, means.new_zeros(1)]).to(device, torch.float32)  # the last is exactly one half


def normal(places: Tensor, key: int | Tensor, table: Tensor | None = None) -> Tensor:
    """Normal numbers, one for each place: mean 0, variance 1, right in the tails down to probabilities of 2^-46.

    Args:
        places: Whole numbers of 64 bits, on any device.
        key: See `key_of`.
        table: That of `table_on`; it must be given where this is traced, which would make it part of the graph.

    Example:
        >>> z = normal(torch.arange(100_000), key_of(seed=1, step=7))
        >>> round(abs(z.mean().item()), 1), round(z.var().item(), 1)
        (0.0, 1.0)
        >>> torch.equal(normal(torch.arange(96, 101), key_of(1, 7)), z[96:101])
        True
    """
    bits = words(places, key)
    # 31 bits are the probability beyond; where they are few, 16 more. A float32 number is its own table of octaves.
    beyond = ((bits >> 33) & 0x7FFFFFFF).to(torch.int32)
    finer = ((beyond & 0x7FFF) << 16) | ((bits >> 17) & 0xFFFF).to(torch.int32)
    share = torch.where(beyond < 1 << 15, finer.to(torch.float32) * 2.0**-16, beyond.to(torch.float32))
    first = (127 + 31 - OCTAVES) << OCTAVE_BITS
    index = ((share.view(torch.int32) >> (23 - OCTAVE_BITS)) - first).clamp(min=0)
    sign = (1 - 2 * (bits & 1)).to(torch.float32)
    return (table_on(places.device) if table is None else table)[index] * sign
