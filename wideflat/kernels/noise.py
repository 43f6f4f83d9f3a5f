"""Gaussian noise that is a function of (seed, step, place): random access, no state to save, and cheap.

The Langevin noise of Entropy-SGD must be the same on every data-parallel rank, and the same after a resume in the
middle of a run. So it is not drawn from a generator that runs along with the training, but computed from where it is
used. The perturbations of the local energy take their noise from here too, because it is cheaper than torch's.

**The body** of the distribution has 16 random bits a number: they choose one of 65536 equally likely parts, and the
number is the mean of that part. **The tails**, the 128 outermost parts on each side, are cut more finely: 4 further
bits cut each into 16, the 128 outermost of those again, and so on, twelve times. A part is therefore never more than
1/128 of what lies beyond it, down to probabilities of 2^-64.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wideflat.kernels.library import Source, compile_kernel, is_aligned, kernel_is_there, pointer, threads_for

__all__ = ["GaussianNoise"]

#: The distance between the streams of two steps: 2^128 / golden ratio, odd, as numpy's ``PCG64DXSM.jumped``.
_STRIDE = 210306068529402873165736369884012333109
_PERIOD = 1 << 128

#: The increment of SplitMix64, and 64 ones.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

#: Numbers that are made at a time: few enough for the cache, and for torch not to start threads.
CHUNK = 32768

#: Parts on each side that are cut more finely, the bits that cut them, and how often; as in ``noise.h``.
TAIL_PARTS, TAIL_BITS, TAIL_LEVELS = 128, 4, 12
_FINER = (1 << TAIL_BITS) - 1


@cache
def _quantiles(dtype: torch.dtype) -> Tensor:
    """The normal distribution in 65536 equally likely parts: the mean of each part, scaled to unit variance.

    The outermost ones are not used.
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
def _tails(dtype: torch.dtype) -> Tensor:
    """The means of the finer parts, level by level, the largest first: (levels, parts of a level).

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
    body = float(_quantiles(torch.float64)[TAIL_PARTS:-TAIL_PARTS].square().sum()) / 65536
    return (means * math.sqrt((1 - body) / math.fsum(squares))).to(dtype)


def _mix(number: Any) -> Any:
    """The output function of SplitMix64, for a whole number or an array of 64-bit ones."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


def _finest(part: int, more: int) -> tuple[int, int]:
    """Level and number of the part, from that at the first level, which is among the outermost again."""
    level = 0
    while part < TAIL_PARTS and level < TAIL_LEVELS - 1:
        level, more = level + 1, more >> TAIL_BITS
        part = part << TAIL_BITS | more & _FINER
    return level, part


def _check(out: Tensor, weights: Tensor | None) -> None:
    """Refuse what a loop over memory would overrun."""
    if not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(f"noise fills contiguous tensors on the CPU; got strides {out.stride()} on {out.device}")
    if weights is None:
        return
    like = weights.numel() == out.numel() and weights.dtype == out.dtype and weights.device == out.device
    if not (like and weights.is_contiguous()):
        raise ValueError(
            f"weights must be contiguous and like out, {tuple(out.shape)} of {out.dtype}; got {tuple(weights.shape)} "
            f"of {weights.dtype} with strides {weights.stride()} on {weights.device}"
        )


class GaussianNoise:
    """Independent normal numbers at places 0, 1, 2, ... of steps 0, 1, 2, ...

    A number is the mean of one of the small parts that the normal distribution is cut into (see the head of this file).
    The distribution function is right to 2^-17, and the probability of lying beyond a point to 0.6 %, as far out as the
    largest number, 9.2. The mean is 0, the variance 1 to 1e-9 (the rounding of the tables to float32), the kurtosis
    2.99998. For weights in float32 this is finer than the rounding of the sum of weight and noise, and it costs much
    less than ``torch.randn``, whose Mersenne twister takes most of its time.

    The first 16 bits come from PCG64DXSM, which can be advanced to any place at once; the streams of different steps
    are apart by numpy's own jump distance. The further bits, which one number in 256 needs, come from SplitMix64 at a
    counter made of seed, step and place.

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
        """Set ``out`` to the noise of a step, times ``weights`` if given, which may be ``out`` itself.

        Args:
            out: What is written: contiguous, on the CPU.
            weights: As many numbers of the same type, contiguous too.
            step: Whose noise.

        Example:
            >>> noise = GaussianNoise(seed=1)
            >>> z = noise.fill(torch.empty(5))
            >>> torch.equal(noise.fill(torch.empty(5), torch.full((5,), 2.0)), 2 * z)
            True
        """
        _check(out, weights)
        if kernel_is_there(out) and is_aligned(out) and (weights is None or is_aligned(weights)):
            self._by_kernel(out, weights, step, 0)
            torch.autograd.graph.increment_version(out)
            return out
        factors = None if weights is None else weights.view(-1).split(CHUNK)
        for at, part in enumerate(out.view(-1).split(CHUNK)):
            numbers = self._draw(step, at * CHUNK, len(part))
            if factors is None:
                part.copy_(numbers)
            else:
                torch.mul(numbers.to(part.dtype), factors[at], out=part)
        return out

    def source(self, step: int) -> Source:
        """What a kernel needs to draw the numbers of a step itself."""
        numbers = (*self._origin, step * _STRIDE % _PERIOD)
        halves = [half for number in numbers for half in (number >> 64, number & 0xFFFFFFFFFFFFFFFF)]
        # The number of the bits b is minus that of the bits 65535 - b: the upper half of the table is enough.
        upper, tails = _quantiles(torch.float32)[32768:], _tails(torch.float32)
        return Source(*halves, upper.data_ptr(), self._tail_key(step), tails.data_ptr())

    def _tail_key(self, step: int) -> int:
        """Where SplitMix64 begins, so that the further bits of a place are those of its ``place``-th number."""
        state, _ = self._origin
        return _mix(_mix((state ^ (state >> 64)) & _MASK) + step * _GOLDEN & _MASK)

    def _by_kernel(self, out: Tensor, weights: Tensor | None, step: int, start: int) -> None:
        compile_kernel(out.dtype).multiply(
            ctypes.c_int64(threads_for(out.numel())),
            ctypes.c_int64(out.numel()),
            ctypes.c_int64(start),
            ctypes.byref(self.source(step)),
            pointer(out),
            None if weights is None else pointer(weights),
        )

    def _draw(self, step: int, start: int, count: int) -> Tensor:
        """At most a chunk of numbers, in memory that the next call uses again."""
        if not kernel_is_there(self._values):
            return self._draw_by_numpy(step, start, count)
        values = self._values[:count]
        self._by_kernel(values, None, step, start)
        return values

    def _draw_by_numpy(self, step: int, start: int, count: int) -> Tensor:
        """The same without a compiler. Four numbers share 64 random bits."""
        word, skip = divmod(start, 4)
        wanted = step * _STRIDE + word
        if wanted != self._position:
            self._bits.advance((wanted - self._position) % _PERIOD)
        words = (skip + count + 3) // 4
        parts = self._bits.random_raw(words).view(np.uint16)[skip : skip + count]
        self._index_array[:count] = parts
        self._position = wanted + words
        values = torch.index_select(_quantiles(torch.float32), 0, self._index[:count], out=self._values[:count])
        # counted from the ends, so that one comparison finds both
        outermost = np.flatnonzero(parts + np.uint16(TAIL_PARTS) < np.uint16(2 * TAIL_PARTS))
        if len(outermost):
            values.numpy()[outermost] = self._tail(step, start, outermost, parts[outermost])
        return values

    def _tail(self, step: int, start: int, places: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """The numbers of outermost parts at places counted from ``start``; see ``tail`` in ``noise.h``."""
        table = _tails(torch.float32).numpy()
        counter = self._tail_key(step) + (start + 1) * _GOLDEN & _MASK
        more = _mix(places.astype(np.uint64) * _GOLDEN + counter)
        lower = parts.view(np.int16) >= 0
        part = np.where(lower, parts, ~parts).astype(np.uint64) << TAIL_BITS | more & _FINER
        numbers = table[0, part]
        for row in np.flatnonzero(part < TAIL_PARTS):  # one in 16
            numbers[row] = table[_finest(int(part[row]), int(more[row]))]
        return np.negative(numbers, out=numbers, where=lower)
