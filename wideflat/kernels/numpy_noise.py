"""The numbers of `wideflat.kernels.noise` where there is no compiler: by NumPy, chunk by chunk.

Numbers are looked up in the table of the body, tails and all. The few that belong to a tail are found on the way and
put right at the end, those of all tensors at once: they are few, and calls are dear.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from wideflat.kernels.library import REAL
from wideflat.kernels.normal_parts import TAIL_BITS, TAIL_PARTS, body_means, tail_means

__all__ = ["CHUNK", "GOLDEN", "MASK", "PERIOD", "SERIAL", "NumpyNoise", "mix"]

#: Numbers whose bits are drawn at a time, and those that are looked up at a time: few enough for the cache, and the
#: second for torch not to start threads.
CHUNK, SERIAL = 65536, 32768

#: Words that the generator has, and 64 ones.
PERIOD, MASK = 1 << 128, (1 << 64) - 1

#: The increment of SplitMix64; its output function: shifts and factors, and the last shift.
GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS, _LAST_SHIFT = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31

_WIDE_ROUNDS = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in _ROUNDS)
_WIDE_LAST_SHIFT, _WIDE_GOLDEN = np.uint64(_LAST_SHIFT), np.uint64(GOLDEN)

_FINER = (1 << TAIL_BITS) - 1
_SHIFT, _ENDS, _TWICE = np.uint16(TAIL_PARTS), np.uint16(2 * TAIL_PARTS), np.uint16(2 * TAIL_BITS)
_NOWHERE, _NO_PART = np.empty(0, dtype=np.intp), np.empty(0, dtype=np.uint16)


def mix(number: int) -> int:
    """The output function of SplitMix64.

    >>> hex(mix(GOLDEN))  # the first number of the generator whose seed is 0
    '0xe220a8397b1dcdaf'
    """
    for shift, factor in _ROUNDS:
        number = (number ^ (number >> shift)) * factor & MASK
    return number ^ (number >> _LAST_SHIFT)


def _mix_(numbers: np.ndarray) -> None:
    """The same of 64-bit numbers, which it overwrites."""
    for shift, factor in _WIDE_ROUNDS:
        numbers ^= numbers >> shift
        numbers *= factor
    numbers ^= numbers >> _WIDE_LAST_SHIFT


@cache
def _body_table() -> Tensor:
    """The numbers of the body, zero for those of the tails. Parts are counted from the innermost of the upper tail: so
    both tails come first, the upper one from the inside, the lower one from the outside.
    """
    table = body_means(torch.float32).clone()
    table[:TAIL_PARTS] = table[-TAIL_PARTS:] = 0
    return table.roll(TAIL_PARTS)


@cache
def _first_levels() -> np.ndarray:
    """The numbers of both tails by their part (counted as above) and by the bits that cut it twice.

    NaN where it is to be cut again.
    """
    bits = np.arange(1 << 2 * TAIL_BITS)
    once = np.arange(TAIL_PARTS)[:, None] << TAIL_BITS | bits & _FINER
    twice = once << TAIL_BITS | bits >> TAIL_BITS
    first, second = tail_means(torch.float32)[:2].numpy()
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
    return tail_means(torch.float32).tolist()


def _tails_of(places: np.ndarray, parts: np.ndarray, key: int) -> np.ndarray:
    """The numbers of parts of a tail at places, which it overwrites; ``tail`` in ``noise.h``."""
    more = places.view(np.uint64)
    more *= _WIDE_GOLDEN
    more += np.uint64(key + GOLDEN & MASK)
    _mix_(more)
    index = parts << _TWICE
    index |= more.astype(np.uint8)
    numbers = _first_levels().take(index)
    (finer,) = np.isnan(numbers).nonzero()
    if len(finer):
        numbers[finer] = list(map(_finer, parts[finer].tolist(), more[finer].tolist()))
    return numbers


class _Scratch(threading.local):
    """Memory for what is looked up at a time, one of it a thread: to ask the system for it would take longer than to
    fill it.
    """

    def __init__(self) -> None:
        self.index, self.values = torch.empty(SERIAL, dtype=torch.int32), torch.empty(SERIAL)
        self.index_array = self.index.numpy()
        self.are_outermost = np.empty(CHUNK, dtype=bool)


_scratch = _Scratch()


def _looked_up(parts: np.ndarray, out: Tensor | None = None) -> Tensor:
    """The numbers of the body of at most `SERIAL` parts: in ``out``, or in memory that the next call uses again."""
    count, index, array = len(parts), _scratch.index, _scratch.index_array
    values = _scratch.values if out is None else out
    if count < SERIAL:
        index, array, values = index[:count], array[:count], values[:count]
    array[:] = parts
    return torch.index_select(_body_table(), 0, index, out=values)


class _Met:
    """The numbers of a tail that were met in a row of chunks: where, and in which part."""

    def __init__(self) -> None:
        self._at: list[np.ndarray] = []
        self._parts: list[np.ndarray] = []

    def note(self, start: int, parts: np.ndarray) -> None:
        """Those of a chunk that begins at ``start``."""
        (at,) = np.less(parts, _ENDS, out=_scratch.are_outermost[: len(parts)]).nonzero()
        self._parts.append(parts.take(at))
        if start:
            at += start
        self._at.append(at)

    def found(self) -> tuple[np.ndarray, np.ndarray]:
        """All of them."""
        if len(self._at) == 1:
            return self._at[0], self._parts[0]
        return np.concatenate([_NOWHERE, *self._at]), np.concatenate([_NO_PART, *self._parts])


def _add_at_(flat: Tensor, at: np.ndarray, numbers: Tensor, alpha: float) -> None:
    """Add ``alpha`` times numbers to some elements, as ``add_`` does to all: rounded once."""
    if flat.dtype in REAL:
        array = flat.detach().numpy()
        array[at] = torch.from_numpy(array[at]).add_(numbers, alpha=alpha).numpy()
    else:
        index = torch.from_numpy(at)
        flat[index] = flat[index].add_(numbers, alpha=alpha)


class NumpyNoise:
    """The numbers of a generator, by NumPy.

    Args:
        bits: The generator, which nobody else uses, at its first word.
    """

    def __init__(self, bits: np.random.PCG64DXSM) -> None:
        self._bits, self._position = bits, 0

    def add_(self, flats: Sequence[Tensor], first: int, places: Sequence[int], key: int, alpha: float) -> None:
        """Add ``alpha`` times the noise of a step to flat tensors that begin at these places.

        Args:
            flats: Contiguous, on the CPU.
            first: The word of the generator that place 0 of the step uses.
            places: Of the first elements.
            key: Where SplitMix64 begins for the step.
            alpha: A factor.
        """
        if not flats:
            return
        found = []
        for flat, place in zip(flats, places, strict=True):
            met = _Met()
            for piece, parts in self._parts(first, place, flat, met):
                piece.add_(_looked_up(parts), alpha=alpha)
            found.append(met.found())
        where = [at + place for (at, _), place in zip(found, places, strict=True)]
        tails = _tails_of(np.concatenate(where), np.concatenate([parts for _, parts in found]), key)
        end = 0
        for flat, (at, _) in zip(flats, found, strict=True):
            if len(at):
                _add_at_(flat, at, torch.from_numpy(tails[end : end + len(at)]), alpha)
                end += len(at)

    def fill(self, out: Tensor, weights: Tensor | None, first: int, key: int) -> None:
        """Set ``out`` to the noise of a step, times ``weights`` if given, which may be ``out`` itself."""
        flat, met = out.detach().view(-1), _Met()
        if weights is not None:
            weights = weights.view(-1)
            if weights.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
                weights = weights.clone()
        at = 0
        for piece, parts in self._parts(first, 0, flat, met):
            numbers = _looked_up(parts, piece if piece.dtype is torch.float32 else None)
            if weights is None:
                if numbers.dtype is not piece.dtype:
                    piece.copy_(numbers)
            else:
                torch.mul(numbers.to(piece.dtype), weights[at : at + len(parts)], out=piece)
                at += len(parts)
        where, parts = met.found()
        tails = _tails_of(where.copy(), parts, key)
        if flat.dtype is torch.float32:
            flat.numpy()[where] = tails if weights is None else tails * weights.detach().numpy()[where]
        else:
            index, more = torch.from_numpy(where), torch.from_numpy(tails).to(out.dtype)
            flat[index] = more if weights is None else more * weights[index]

    def _parts(self, first: int, place: int, flat: Tensor, met: _Met) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Pieces of a tensor that begins at a place, and in which parts of the distribution their numbers are.

        Parts are counted from the innermost of the upper tail. A chunk is of whole words, four numbers each.
        """
        word, skip = divmod(place, 4)
        wanted = first + word
        if wanted != self._position:
            self._bits.advance((wanted - self._position) % PERIOD)
            self._position = wanted
        for start in range(-skip, flat.numel(), CHUNK):
            count = min(CHUNK, flat.numel() - start)
            words = (count + 3) // 4
            parts = self._bits.random_raw(words).view(np.uint16)
            self._position += words
            parts += _SHIFT
            before = max(-start, 0)
            parts = parts[before:count]
            start += before
            met.note(start, parts)
            for at in range(0, len(parts), SERIAL):
                some = parts[at : at + SERIAL]
                yield flat[start + at : start + at + len(some)], some
