"""The normal distribution cut into small parts, by whose means `wideflat.kernels.noise` stands for it.

**The body** of the distribution has 16 random bits a number: they choose one of 65536 equally likely parts, and the
number is the mean of that part. **The tails**, the 128 outermost parts on each side, are cut more finely: 4 further
bits cut each into 16, the 128 outermost of those again, and so on, twelve times. A part is therefore never more than
1/128 of what lies beyond it, down to probabilities of 2^-64.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

__all__ = ["TAIL_BITS", "TAIL_LEVELS", "TAIL_PARTS", "body_means", "tail_means"]

#: Parts on each side that are cut more finely, the bits that cut them, and how often; as in ``noise.h``.
TAIL_PARTS, TAIL_BITS, TAIL_LEVELS = 128, 4, 12


@cache
def body_means(dtype: torch.dtype) -> Tensor:
    """The normal distribution in 65536 equally likely parts: the mean of each part, scaled to unit variance.

    The outermost ones are not used. Not to be changed.
    """
    edges = torch.special.ndtri(torch.arange(1, 65536, dtype=torch.float64) / 65536)
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    zero = density.new_zeros(1)
    means = 65536 * (torch.cat([zero, density]) - torch.cat([density, zero]))
    means = (means - means.flip(0)) / 2
    return (means / means.square().mean().sqrt()).to(dtype)


def _upper_means(first: int, last: int, bits: int) -> Tensor:
    """The means of parts of the upper tail that have probability 2^-bits each, counted from the outside."""
    beyond = torch.arange(first, last + 1, dtype=torch.float64) * 2.0**-bits
    density = torch.exp(-torch.special.ndtri(beyond).square() / 2) / math.sqrt(2 * math.pi)
    return (density[1:] - density[:-1]) * 2.0**bits


@cache
def tail_means(dtype: torch.dtype) -> Tensor:
    """The means of the finer parts, level by level, the largest first: (levels, parts of a level). Not to be changed.

    Of a level the first `TAIL_PARTS` numbers are not used, but in the last one. The scale of all is such that body and
    tails together have variance 1: what the parts lack within themselves is 2e-6 of it, and the table of the body,
    which is as it was before there were tails, has got that already. So the tails are 2e-5 shorter than they should be.
    """
    count = TAIL_PARTS << TAIL_BITS
    levels = [16 + TAIL_BITS * (level + 1) for level in range(TAIL_LEVELS)]
    means = torch.stack([_upper_means(0, count, bits) for bits in levels])
    squares = [
        float(row[TAIL_PARTS:].square().sum()) * 2.0 ** (1 - bits) for row, bits in zip(means, levels, strict=True)
    ]
    squares.append(float(means[-1, :TAIL_PARTS].square().sum()) * 2.0 ** (1 - levels[-1]))
    body = float(body_means(torch.float64)[TAIL_PARTS:-TAIL_PARTS].square().sum()) / 65536
    return (means * math.sqrt((1 - body) / math.fsum(squares))).to(dtype)
