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

    #: Numbers made at a time, so that they, their indices and the table stay in the cache.
    chunk = 131072

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._bits = np.random.PCG64DXSM(abs(seed) * 2 + (seed < 0))
        self._position = 0
        self._index = torch.empty(self.chunk, dtype=torch.int32)
        self._values: dict[torch.dtype, Tensor] = {}

    def __call__(self, step: int, start: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``count`` numbers of the given step, from place ``start`` on."""
        out = torch.empty(count, dtype=dtype)
        for at in range(0, count, self.chunk):
            part = out[at : at + self.chunk]
            part.copy_(self._draw(step, start + at, len(part), dtype))
        return out

    def add_(self, pieces: list[Tensor], step: int, places: list[int], alpha: float) -> None:
        """Add ``alpha`` times the noise of a step to the pieces, the first elements of which stand at the given places.

        Nothing as large as the pieces is allocated, unless their memory is not contiguous.

        >>> noise, a, b = GaussianNoise(seed=1), torch.zeros(2, 3), torch.zeros(4)
        >>> noise.add_([a, b], step=0, places=[0, 6], alpha=2.0)
        >>> torch.equal(torch.cat([a.flatten(), b]), 2 * noise(0, 0, 10))
        True
        """
        first = 0
        while first < len(pieces):
            start, end, last = places[first], places[first], first
            while (  # small pieces that follow each other without a gap are drawn together
                last < len(pieces) and places[last] == end and end + pieces[last].numel() - start <= self.chunk
            ):
                end += pieces[last].numel()
                last += 1
            if last > first:
                run = pieces[first:last]
                values = self._draw(step, start, end - start, run[0].dtype)
                torch._foreach_add_(run, torch._utils._unflatten_dense_tensors(values, run), alpha=alpha)
                first = last
                continue
            piece = pieces[first]
            if piece.is_contiguous():
                for at, part in enumerate(piece.view(-1).split(self.chunk)):
                    part.add_(self._draw(step, start + at * self.chunk, len(part), piece.dtype), alpha=alpha)
            else:
                piece.add_(self(step, start, piece.numel(), piece.dtype).view(piece.shape), alpha=alpha)
            first += 1

    def _draw(self, step: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """At most ``chunk`` numbers, in memory that the next call uses again. Four numbers share 64 random bits."""
        word, skip = divmod(start, 4)
        wanted = step * _STRIDE + word
        if wanted != self._position:
            self._bits.advance((wanted - self._position) % _PERIOD)
        words = (skip + count + 3) // 4
        bits = self._bits.random_raw(words).view(np.uint16)
        self._position = wanted + words
        index = self._index[:count].copy_(torch.from_numpy(bits)[skip : skip + count])
        if dtype not in self._values:
            self._values[dtype] = torch.empty(self.chunk, dtype=dtype)
        return torch.index_select(_quantiles(dtype), 0, index, out=self._values[dtype][:count])
