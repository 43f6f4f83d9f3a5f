"""Gaussian noise that is a function of (seed, step, place): random access, no state to save, and cheap.

The Langevin noise of Entropy-SGD must be the same on every data-parallel rank, and the same after a resume in the
middle of a run. So it is not drawn from a generator that runs along with the training, but computed from where it is
used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

__all__ = ["GaussianNoise"]

#: The distance between the streams of two steps: 2^128 / golden ratio, odd, as numpy's ``PCG64DXSM.jumped``.
_STRIDE = 210306068529402873165736369884012333109
_PERIOD = 1 << 128

#: Normal numbers that are drawn for a step, in two halves.
FRESH = 131072

#: Places that are served together; a window of this many numbers leaves room for 2^13 positions within a half.
CHUNK = FRESH // 2 - 8192

#: Fresh numbers that are drawn at a time: few enough for the cache, and for torch not to start threads.
_PART = 32768

#: Chunks that are served with the fresh numbers themselves.
_FIRST = FRESH // CHUNK


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
    r"""Normal numbers at places 0, 1, 2, ... of steps 0, 1, 2, ...: white noise, in places and in steps.

    To draw an independent number for each weight costs more than all the rest of an optimizer step. So 131072 fresh
    numbers x are drawn for each step and scaled to the mean square 1, and the places are served in chunks of 57344. The
    first two chunks take the fresh numbers as they are. Each further chunk takes two windows, one out of each half of
    x, at random positions a and b and with random signs:

    .. code-block:: text

        z_i = (+- x_(a+i) +- x_(b+i)) / sqrt(2)                   0 <= a < 2^13, 2^16 <= b < 2^16 + 2^13

    Every number is normal, and numbers at two different places or steps are uncorrelated: E z z^T = 1, exactly. Those
    of different steps are independent, and so are, but for the scaling, those of one chunk and the first 114688 of a
    step. Later chunks of one step share fresh numbers, so they are not independent; their signs are, which makes the
    chunks uncorrelated. For a Langevin equation that is enough: the averages that its steps converge to depend on the
    noise through its first moments alone (the weak Euler scheme).

    A fresh number uses 16 random bits: they choose one of 65536 equally likely parts of the normal distribution, and
    the number is the mean of that part, scaled so that the variance is exactly 1. The distribution function is right to
    2^-17. The bits come from PCG64DXSM, which can be advanced to any place at once; the streams of different steps are
    apart by numpy's own jump distance.

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
        self._step: int | None = None
        self._index = torch.empty(_PART, dtype=torch.int32)
        self._fresh = torch.empty(FRESH)
        self._scale = 1.0  # of the fresh numbers, to their mean square 1
        self._windows: list[int] = []  # 64 random bits for each chunk
        self._sum = torch.empty(CHUNK)

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
            flat = piece.view(-1)
            for z, factor, at in self._values(step, place, flat.numel()):
                flat.narrow(0, at, z.numel()).add_(z, alpha=factor * alpha)

    def _values(self, step: int, start: int, count: int) -> Iterator[tuple[Tensor, float, int]]:
        """The numbers from one chunk after the other, in memory that the next one uses again; a factor that is still to
        be applied to them, and the index of the first of them.
        """
        self._draw(step, (start + count - 1) // CHUNK)
        at = 0
        while at < count:
            chunk, first = divmod(start + at, CHUNK)
            length = min(CHUNK - first, count - at)
            if chunk < _FIRST:
                yield self._fresh.narrow(0, start + at, length), self._scale, at
            else:
                bits = self._windows[chunk]
                one = self._fresh.narrow(0, first + (bits & 8191), length)
                other = self._fresh.narrow(0, first + FRESH // 2 + (bits >> 13 & 8191), length)
                z = self._sum if length == CHUNK else self._sum.narrow(0, 0, length)
                torch.add(one, other, alpha=1 - (bits >> 26 & 2), out=z)
                yield z, self._scale * math.sqrt(0.5) * (1 - (bits >> 27 & 2)), at
            at += length

    def _draw(self, step: int, last_chunk: int) -> None:
        """Draw the fresh numbers of a step, and the windows up to a chunk. Four fresh numbers share 64 random bits."""
        if step != self._step:
            self._advance(step * _STRIDE)
            square = 0.0
            for part in self._fresh.split(_PART):
                self._index.numpy()[:] = self._raw(_PART // 4).view(np.uint16)
                square += torch.index_select(_quantiles(torch.float32), 0, self._index, out=part).norm().item() ** 2
            self._scale = math.sqrt(FRESH / square)
            self._step, self._windows = step, []
        if last_chunk >= max(len(self._windows), _FIRST):
            self._advance(step * _STRIDE + FRESH // 4 + len(self._windows))
            self._windows += self._raw(last_chunk + 1 - len(self._windows)).tolist()

    def _advance(self, position: int) -> None:
        if position != self._position:
            self._bits.advance((position - self._position) % _PERIOD)
            self._position = position

    def _raw(self, count: int) -> np.ndarray:
        self._position += count
        return self._bits.random_raw(count)
