"""Gaussian noise that is a function of (seed, step, place): random access, no state to save, and cheap.

The Langevin noise of Entropy-SGD must be the same on every data-parallel rank, and the same after a resume in the
middle of a run. So it is not drawn from a generator that runs along with the training, but computed from where it is
used. The perturbations of the local energy take their noise from here too, because it is cheaper than torch's.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from wideflat.kernels.library import Source, compile_kernel, kernel_is_there, pointer, threads_for

__all__ = ["GaussianNoise"]

#: The distance between the streams of two steps: 2^128 / golden ratio, odd, as numpy's ``PCG64DXSM.jumped``.
_STRIDE = 210306068529402873165736369884012333109
_PERIOD = 1 << 128

#: Numbers that are made at a time: few enough for the cache, and for torch not to start threads.
CHUNK = 32768


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
        >>> round(abs(z.mean().item()), 1), round(z.var().item(), 1)
        (0.0, 1.0)
        >>> torch.equal(noise(step=7, start=96, count=5), z[96:101])  # any part alone, in any order
        True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._bits = np.random.PCG64DXSM(abs(seed) * 2 + (seed < 0))
        self._position = 0
        start = self._bits.state["state"]
        self._origin = (start["state"], start["inc"])
        self._index = torch.empty(CHUNK, dtype=torch.int32)
        self._index_array = self._index.numpy()
        self._values = torch.empty(CHUNK)

    def __call__(self, step: int, start: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``count`` numbers of the given step, from place ``start`` on."""
        out = torch.zeros(count, dtype=dtype)
        self.add_([out], step, [start], alpha=1.0)
        return out

    @torch.no_grad()
    def add_(self, pieces: list[Tensor], step: int, places: list[int], alpha: float) -> None:
        """Add ``alpha`` times the noise of a step to the pieces, the first elements of which stand at the given places.

        >>> noise, a, b = GaussianNoise(seed=1), torch.zeros(2, 3), torch.zeros(4)
        >>> noise.add_([a, b], step=0, places=[0, 6], alpha=2.0)
        >>> torch.equal(torch.cat([a.flatten(), b]), 2 * noise(0, 0, 10))
        True
        """
        for piece, place in zip(pieces, places, strict=True):
            if not piece.is_contiguous():
                piece.add_(self(step, place, piece.numel(), piece.dtype).view(piece.shape), alpha=alpha)
                continue
            for at, part in enumerate(piece.view(-1).split(CHUNK)):
                part.add_(self._draw(step, place + at * CHUNK, len(part)), alpha=alpha)

    @torch.no_grad()
    def fill(self, out: Tensor, weights: Tensor | None = None, step: int = 0) -> Tensor:
        """Set ``out`` to the noise of a step, times ``weights`` if given; both are contiguous and on the CPU.

        >>> noise = GaussianNoise(seed=1)
        >>> z = noise.fill(torch.empty(5))
        >>> torch.equal(noise.fill(torch.empty(5), torch.full((5,), 2.0)), 2 * z)
        True
        """
        if kernel_is_there(out):
            compile_kernel(out.dtype).multiply(
                ctypes.c_int64(threads_for(out.numel())),
                ctypes.c_int64(out.numel()),
                ctypes.byref(self.source(step)),
                pointer(out),
                None if weights is None else pointer(weights),
            )
            torch.autograd.graph.increment_version(out)
            return out
        factors = None if weights is None else weights.view(-1).split(CHUNK)
        for at, part in enumerate(out.view(-1).split(CHUNK)):
            part.copy_(self._draw(step, at * CHUNK, len(part)))
            if factors is not None:
                part.mul_(factors[at])
        return out

    def source(self, step: int) -> Source:
        """What a kernel needs to draw the numbers of a step itself."""
        numbers = (*self._origin, step * _STRIDE % _PERIOD)
        halves = [half for number in numbers for half in (number >> 64, number & 0xFFFFFFFFFFFFFFFF)]
        # The number of the bits b is minus that of the bits 65535 - b: the upper half of the table is enough.
        return Source(*halves, _quantiles(torch.float32)[32768:].data_ptr())

    def _draw(self, step: int, start: int, count: int) -> Tensor:
        """At most a chunk of numbers, in memory that the next call uses again. Four numbers share 64 random bits."""
        word, skip = divmod(start, 4)
        wanted = step * _STRIDE + word
        if wanted != self._position:
            self._bits.advance((wanted - self._position) % _PERIOD)
        words = (skip + count + 3) // 4
        self._index_array[:count] = self._bits.random_raw(words).view(np.uint16)[skip : skip + count]
        self._position = wanted + words
        return torch.index_select(_quantiles(torch.float32), 0, self._index[:count], out=self._values[:count])
