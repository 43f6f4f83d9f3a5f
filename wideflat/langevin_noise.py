"""Gaussian noise that is a function of (seed, step, place): random access, no state to save, and cheap.

The Langevin noise of Entropy-SGD must be the same on every data-parallel rank, and the same after a resume in the
middle of a run. So it is not drawn from a generator that runs along with the training, but computed from where it is
used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

__all__ = ["GaussianNoise"]

#: The distance between the streams of two steps: 2^128 / golden ratio, odd, as numpy's ``PCG64DXSM.jumped``.
_STRIDE = 210306068529402873165736369884012333109
_PERIOD = 1 << 128

#: The most elements that an operation of torch works on without threads of its own, which would be in the way of ours.
_SERIAL = 32768


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

    #: Numbers made at a time, so that they, their bits and the table stay in the cache.
    chunk = 65536

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._sources: list[_Source] = []

    def __call__(self, step: int, start: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``count`` numbers of the given step, from place ``start`` on."""
        out, source = torch.empty(count, dtype=dtype), self._source(0)
        for at in range(0, count, self.chunk):
            part = out[at : at + self.chunk]
            part.copy_(source.draw(step, start + at, len(part), dtype))
        return out

    def add_(self, pieces: list[Tensor], step: int, places: list[int], alpha: float) -> None:
        """Add ``alpha`` times the noise of a step to the pieces, the first elements of which stand at the given places.

        As many threads as torch has take a chunk each, until none is left. Nothing as large as the pieces is allocated,
        unless their memory is not contiguous.

        >>> noise, a, b = GaussianNoise(seed=1), torch.zeros(2, 3), torch.zeros(4)
        >>> noise.add_([a, b], step=0, places=[0, 6], alpha=2.0)
        >>> torch.equal(torch.cat([a.flatten(), b]), 2 * noise(0, 0, 10))
        True
        """
        runs = self._runs(pieces, places)
        shared = iter(runs)
        helpers = min(torch.get_num_threads(), len(runs)) - 1
        sources = [self._source(index) for index in range(helpers + 1)]
        futures = [_helpers(helpers).submit(_add, source, shared, step, alpha) for source in sources[1:]]
        try:
            _add(sources[0], shared, step, alpha)
        finally:
            for future in futures:  # one that has not started is not waited for: nothing is left for it
                if not future.cancel():
                    future.result()

    def _source(self, index: int) -> _Source:
        """The source of one thread."""
        while len(self._sources) <= index:
            self._sources.append(_Source(self.seed, self.chunk))
        return self._sources[index]

    def _runs(self, pieces: list[Tensor], places: list[int]) -> list[_Run]:
        """Cut and pack the pieces into runs of places without a gap, of at most a chunk each."""
        runs: list[_Run] = []
        packed: list[Tensor] = []
        start = end = 0
        for piece, place in zip(pieces, places, strict=True):
            count = piece.numel()
            if packed and (place != end or end + count - start > self.chunk):
                runs.append((packed, start, end - start))
                packed = []
            if count > self.chunk and piece.is_contiguous():
                parts = piece.view(-1).split(self.chunk)
                runs += [([part], place + at * self.chunk, part.numel()) for at, part in enumerate(parts)]
            elif count > self.chunk:
                runs.append(([piece], place, count))
            else:
                if not packed:
                    start = place
                packed.append(piece)
                end = place + count
        if packed:
            runs.append((packed, start, end - start))
        return runs


#: Tensors whose elements follow each other, the place of the first element, and how many there are.
_Run = tuple[list[Tensor], int, int]


class _Source:
    """Draws noise on one thread."""

    def __init__(self, seed: int, chunk: int) -> None:
        self._bits = np.random.PCG64DXSM(abs(seed) * 2 + (seed < 0))
        self._position = 0
        self._index = np.empty(chunk, dtype=np.int32)
        self._values: dict[torch.dtype, Tensor] = {}

    def draw(self, step: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Numbers in memory that the next call uses again. Four numbers share 64 random bits."""
        word, skip = divmod(start, 4)
        wanted = step * _STRIDE + word
        if wanted != self._position:
            self._bits.advance((wanted - self._position) % _PERIOD)
        words = (skip + count + 3) // 4
        bits = self._bits.random_raw(words).view(np.uint16)
        self._position = wanted + words
        if count > len(self._index):  # a tensor that is not contiguous and cannot be cut
            index, out = np.empty(count, dtype=np.int32), torch.empty(count, dtype=dtype)
        else:
            if dtype not in self._values:
                self._values[dtype] = torch.empty(len(self._index), dtype=dtype)
            index, out = self._index[:count], self._values[dtype][:count]
        index[:] = bits[skip : skip + count]
        return torch.index_select(_quantiles(dtype), 0, torch.from_numpy(index), out=out)


@torch.no_grad()
def _add(source: _Source, runs: Iterator[_Run], step: int, alpha: float) -> None:
    """Add the noise to one run after the other, as long as there are any; several threads may share the iterator."""
    for pieces, start, count in runs:
        values = source.draw(step, start, count, pieces[0].dtype)
        if len(pieces) == 1 and pieces[0].dim() == 1 and torch.get_num_threads() > 1:
            for piece, part in zip(pieces[0].split(_SERIAL), values.split(_SERIAL), strict=True):
                piece.add_(part, alpha=alpha)
        elif len(pieces) == 1:
            pieces[0].add_(values.view(pieces[0].shape), alpha=alpha)
        else:
            torch._foreach_add_(pieces, torch._utils._unflatten_dense_tensors(values, pieces), alpha=alpha)


@cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="langevin-noise")


# A forked process has none of its parent's threads.
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_helpers.cache_clear)
