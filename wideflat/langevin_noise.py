"""Gaussian noise that is a function of (seed, step, place): random access, no state to save, and cheap.

The Langevin noise of Entropy-SGD must be the same on every data-parallel rank, and the same after a resume in the
middle of a run. So it is not drawn from a generator that runs along with the training, but computed from where it is
used.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

__all__ = ["GaussianNoise"]

#: The distance between the streams of two steps: 2^128 / golden ratio, odd, as numpy's ``PCG64DXSM.jumped``.
_STRIDE = 210306068529402873165736369884012333109
_PERIOD = 1 << 128


@cache
def _quantiles(dtype: torch.dtype) -> Tensor:
    """The normal distribution in 65536 equally likely parts: the mean of each part, scaled to unit variance."""
    edges = torch.special.ndtri(torch.arange(1, 65536, dtype=torch.float64) / 65536)
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    zero = density.new_zeros(1)
    means = 65536 * (torch.cat([zero, density]) - torch.cat([density, zero]))
    means = (means - means.flip(0)) / 2
    return (means / means.square().mean().sqrt()).to(dtype)


class GaussianNoise:
    """Independent normal numbers at places 0, 1, 2, ... of steps 0, 1, 2, ...

    Each number uses 16 random bits: they choose one of 65536 equally likely parts of the normal distribution, and the
    number is the mean of that part, scaled so that the variance is exactly 1. The distribution function is right to
    2^-17, the mean is 0, the kurtosis 2.9998, the largest number 4.4. For weights in float32 this is finer than the
    rounding of the sum of weight and noise, and it costs much less than ``torch.randn``, whose Mersenne twister takes
    most of its time. The bits come from PCG64DXSM, which can be advanced to any place at once; the streams of different
    steps are apart by numpy's own jump distance.

    Args:
        seed: Any integer. Different seeds give independent noise.

    Example:
        >>> noise = GaussianNoise(seed=1)
        >>> z = noise(step=7, start=0, count=100_000)
        >>> round(z.mean().item(), 1), round(z.var().item(), 1)
        (0.0, 1.0)
        >>> torch.equal(noise(step=7, start=96, count=5), z[96:101])  # any part alone, in any order
        True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._bits = np.random.PCG64DXSM(abs(seed) * 2 + (seed < 0))
        self._position = 0

    def __call__(self, step: int, start: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``count`` numbers of the given step from place ``start`` on, which must be a multiple of 4."""
        if start % 4:
            raise ValueError(f"start must be a multiple of 4 (four numbers share 64 random bits), got {start}")
        wanted = step * _STRIDE + start // 4
        if wanted != self._position:
            self._bits.advance((wanted - self._position) % _PERIOD)
        words = (count + 3) // 4
        bits = self._bits.random_raw(words)
        self._position = wanted + words
        index = torch.from_numpy(bits.view(np.int16)).to(torch.int64).bitwise_and_(0xFFFF)
        return _quantiles(dtype).index_select(0, index[:count])

    def like(self, pieces: list[Tensor], step: int, places: list[int]) -> list[Tensor]:
        """Noise of the shape of each of the pieces, which stand at the given places (multiples of 4).

        Pieces that follow each other without a gap are drawn together.

        >>> noise = GaussianNoise(seed=1)
        >>> a, b = noise.like([torch.empty(2, 3), torch.empty(4)], step=0, places=[0, 8])
        >>> torch.equal(torch.cat([a.flatten(), b]), noise(0, 0, 12)[[0, 1, 2, 3, 4, 5, 8, 9, 10, 11]])
        True
        """
        drawn: list[Tensor] = []
        first = 0
        while first < len(pieces):
            last, end = first, places[first] + pieces[first].numel()
            while last + 1 < len(pieces) and places[last + 1] == end + -end % 4:
                last += 1
                end = places[last] + pieces[last].numel()
            start = places[first]
            run = self(step, start, end - start, pieces[first].dtype)
            for piece, place in zip(pieces[first : last + 1], places[first : last + 1], strict=True):
                drawn.append(run[place - start : place - start + piece.numel()].view(piece.shape))
            first = last + 1
        return drawn
