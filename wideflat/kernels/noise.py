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
import threading
from functools import cache

import numpy as np
import torch
from torch import Tensor

from wideflat.kernels.library import REAL, Source, compile_kernel, is_aligned, kernel_is_there, pointer, threads_for

__all__ = ["GOLDEN", "STRIDE", "TAIL_BITS", "TAIL_LEVELS", "TAIL_PARTS", "GaussianNoise", "tables"]

#: The distance between the streams of two steps: 2^128 / golden ratio, odd, as numpy's ``PCG64DXSM.jumped``.
STRIDE = 210306068529402873165736369884012333109
_PERIOD = 1 << 128

#: The increment of SplitMix64, and 64 ones.
GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
#: Its output function: shifts and factors, and the last shift.
_ROUNDS, _LAST_SHIFT = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31

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


def tables(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers of the body, by their 16 bits, and those of the tails, level by level; not to be changed."""
    return _quantiles(dtype), _tails(dtype)


def _mix(number: int) -> int:
    """The output function of SplitMix64."""
    for shift, factor in _ROUNDS:
        number = (number ^ (number >> shift)) * factor & _MASK
    return number ^ (number >> _LAST_SHIFT)


def _mix_(numbers: np.ndarray) -> np.ndarray:
    """The same of 64-bit numbers, which it overwrites."""
    for shift, factor in _ROUNDS:
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers ^= numbers >> np.uint64(_LAST_SHIFT)
    return numbers


@cache
def _body_table() -> Tensor:
    """The numbers of the body by their bits; zero for those of the tails, which are put there afterwards."""
    table = _quantiles(torch.float32).clone()
    table[:TAIL_PARTS] = table[-TAIL_PARTS:] = 0
    return table


@cache
def _first_levels() -> np.ndarray:
    """The numbers of both tails by their part (counted as in ``_body``) and by the bits that cut it twice.

    NaN where it is to be cut again.
    """
    bits = np.arange(1 << 2 * TAIL_BITS)
    once = np.arange(TAIL_PARTS)[:, None] << TAIL_BITS | bits & _FINER
    twice = once << TAIL_BITS | bits >> TAIL_BITS
    first, second = _tails(torch.float32)[:2].numpy()
    upper = np.where(once < TAIL_PARTS, second[twice % len(second)], first[once])
    upper[(once < TAIL_PARTS) & (twice < TAIL_PARTS)] = np.nan
    return np.concatenate([upper[::-1], -upper]).reshape(-1)


def _finer(part: int, more: int) -> float:
    """The number of a part of both tails that is to be cut more than twice, by bits of ``more``; one in 65536."""
    lower = part >= TAIL_PARTS
    part = part - TAIL_PARTS if lower else TAIL_PARTS - 1 - part
    for table in _tail_lists():
        part = part << TAIL_BITS | more & _FINER
        number = table[part]
        if part >= TAIL_PARTS:
            break
        more >>= TAIL_BITS
    return -number if lower else number


@cache
def _tail_lists() -> list[list[float]]:
    """The tables of the tails for one number at a time."""
    return _tails(torch.float32).tolist()


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


class _Scratch(threading.local):
    """Memory for one chunk, one of it a thread: to ask the system for it would take longer than to fill it."""

    def __init__(self) -> None:
        self.index = torch.empty(CHUNK, dtype=torch.int32)
        self.values = torch.empty(CHUNK)
        self.index_array, self.value_array = self.index.numpy(), self.values.numpy()
        self.from_the_ends = np.empty(CHUNK, dtype=np.uint16)
        self.is_outermost = np.empty(CHUNK, dtype=bool)


_scratch = _Scratch()


class _Met:
    """The numbers of a tail that were met in a row of chunks: where, and in which part."""

    def __init__(self) -> None:
        self._at: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []

    def note(self, start: int, values: Tensor, outermost: np.ndarray, ends: np.ndarray) -> Tensor:
        """Keep what ``GaussianNoise._body`` says of a chunk that begins at ``start``; its numbers come back."""
        self._at.append(outermost + start if start else outermost)
        self._ends.append(ends)
        return values

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        """All of them."""
        if len(self._at) == 1:
            return self._at[0], self._ends[0]
        return np.concatenate([_NOWHERE, *self._at]), np.concatenate([_NO_PART, *self._ends])


_NOWHERE, _NO_PART = np.empty(0, dtype=np.intp), np.empty(0, dtype=np.uint16)


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
            if not kernel_is_there(_scratch.values):
                self._add_by_numpy(piece.view(-1), step, place, alpha)
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
        self._fill_by_numpy(out, weights, step)
        return out

    def source(self, step: int) -> Source:
        """What a kernel needs to draw the numbers of a step itself."""
        numbers = (*self._origin, step * STRIDE % _PERIOD)
        halves = [half for number in numbers for half in (number >> 64, number & 0xFFFFFFFFFFFFFFFF)]
        # The number of the bits b is minus that of the bits 65535 - b: the upper half of the table is enough.
        upper, tails = _quantiles(torch.float32)[32768:], _tails(torch.float32)
        return Source(*halves, upper.data_ptr(), self._tail_key(step), tails.data_ptr())

    @property
    def origin(self) -> tuple[tuple[int, int], int]:
        """State and increment of the generator at place 0 of step 0, and where SplitMix64 begins for all steps."""
        state, increment = self._origin
        return (state, increment), _mix((state ^ (state >> 64)) & _MASK)

    def _tail_key(self, step: int) -> int:
        """Where SplitMix64 begins, so that the further bits of a place are those of its ``place``-th number."""
        return _mix(self.origin[1] + step * GOLDEN & _MASK)

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
        values = _scratch.values[:count]
        self._by_kernel(values, None, step, start)
        return values

    def _add_by_numpy(self, flat: Tensor, step: int, place: int, alpha: float) -> None:
        """:meth:`add_` without a compiler. The tails come at the end, all at once: they are few, and calls are dear."""
        met = _Met()
        for start, piece in zip(range(0, flat.numel(), CHUNK), flat.split(CHUNK), strict=False):
            piece.add_(met.note(start, *self._body(step, place + start, piece.numel())), alpha=alpha)
        at, tails = self._tails_at(step, place, met)
        if flat.dtype in REAL:
            array = flat.detach().numpy()
            array[at] = torch.from_numpy(array[at]).add_(torch.from_numpy(tails), alpha=alpha)
        else:
            where = torch.from_numpy(at)
            flat[where] = flat[where].add_(torch.from_numpy(tails), alpha=alpha)

    def _fill_by_numpy(self, out: Tensor, weights: Tensor | None, step: int) -> None:
        """:meth:`fill` without a compiler; the tails at the end too."""
        flat, met = out.view(-1), _Met()
        if weights is not None:
            weights = weights.view(-1)
            if weights.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
                weights = weights.clone()
        for start, piece in zip(range(0, flat.numel(), CHUNK), flat.split(CHUNK), strict=False):
            numbers = met.note(start, *self._body(step, start, piece.numel(), piece))
            if weights is not None:
                torch.mul(numbers.to(piece.dtype), weights[start : start + CHUNK], out=piece)
            elif numbers is not piece:
                piece.copy_(numbers)
        at, tails = self._tails_at(step, 0, met)
        if out.dtype is torch.float32:
            flat.numpy()[at] = tails if weights is None else tails * weights.numpy()[at]
        else:
            where, more = torch.from_numpy(at), torch.from_numpy(tails).to(out.dtype)
            flat[where] = more if weights is None else more * weights[where]

    def _body(
        self, step: int, start: int, count: int, out: Tensor | None = None
    ) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """At most a chunk of numbers from 16 bits each; which of them belong to a tail, and to which part of the tails.

        The numbers are in ``out`` if it is of float32; those of the tails are zero. Four of them share 64 random bits.
        The parts of both tails are counted upwards from the innermost of the upper one.
        """
        word, skip = divmod(start, 4)
        wanted = step * STRIDE + word
        if wanted != self._position:
            self._bits.advance((wanted - self._position) % _PERIOD)
        words = (skip + count + 3) // 4
        parts = self._bits.random_raw(words).view(np.uint16)[skip : skip + count]
        self._position = wanted + words
        values = _scratch.values[:count] if out is None or out.dtype is not torch.float32 else out
        index = _scratch.index if count == CHUNK else _scratch.index[:count]
        _scratch.index_array[:count] = parts
        torch.index_select(_body_table(), 0, index, out=values)
        # counted from the ends, so that one comparison finds both
        ends = np.add(parts, np.uint16(TAIL_PARTS), out=_scratch.from_the_ends[:count])
        (outermost,) = np.less(ends, np.uint16(2 * TAIL_PARTS), out=_scratch.is_outermost[:count]).nonzero()
        return values, outermost, ends[outermost]

    def _tails_at(self, step: int, place: int, met: _Met) -> tuple[np.ndarray, np.ndarray]:
        """Where numbers of a tail were met, counted from a place, and which they are; ``tail`` in ``noise.h``."""
        at, ends = met.joined()
        more = at.astype(np.uint64)
        more *= np.uint64(GOLDEN)
        more += np.uint64(self._tail_key(step) + (place + 1) * GOLDEN & _MASK)
        _mix_(more)
        index = ends << np.uint16(2 * TAIL_BITS)
        index |= more.astype(np.uint8)
        numbers = _first_levels()[index]
        for finer in np.isnan(numbers).nonzero()[0]:
            numbers[finer] = _finer(int(ends[finer]), int(more[finer]))
        return at, numbers
