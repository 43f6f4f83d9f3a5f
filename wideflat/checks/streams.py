"""Data that come one after the other, and may have no end: how far they are followed."""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from wideflat.checks import a_kind, shown

__all__ = ["MOST_BATCHES", "ending", "length_of"]

#: Of what does not say its length no more is taken; a data set that has more says so.
MOST_BATCHES = 2**14
#: Nor so often one and the same object, unchanged.
MOST_ALIKE = 1000
#: The longest length that is believed.
LONGEST = 10**9
#: Numbers at the beginning of an array, by which it is known.
SAMPLE = 4096
#: A number that is never given twice, for what does not count how often it was written to.
_NEVER = itertools.count(-1, -1)


def length_of(name: str, data: Any) -> int | None:
    """How many there are, where the data say so.

    >>> length_of("data", [1, 2]), length_of("data", iter([1, 2]))
    (2, None)
    """
    try:
        length = len(data)
    except Exception:  # it has none, as a loader of a stream, or one of the user's own that fails
        return None
    if length > LONGEST:
        raise ValueError(f"{name} must have at most {LONGEST} entries, got {a_kind(data)} of more")
    return length


def ending(name: str, data: Iterable[Any], most: int = MOST_BATCHES) -> Iterator[Any]:
    """Go through data to their end, and refuse those that show none.

    Args:
        name: What they are, for the error.
        data: A length that they state is believed, and more than ``most`` are taken then.
        most: So many are taken of data without a length.

    Example:
        >>> list(ending("data", iter("ab")))
        ['a', 'b']
        >>> sum(1 for _ in ending("data", itertools.repeat(0.5)))
        Traceback (most recent call last):
        ...
        ValueError: data gave the same float 1000 times and states no length: it seems to have no end; give a list, ...
    """
    length = length_of(name, data)
    what = "it seems to have no end; give a list, a loader with a length, or itertools.islice(data, n)"
    try:
        entries = iter(data)
    except Exception as error:  # of the user's
        raise TypeError(f"{name} cannot be gone through, got {shown(data)}: {error!s:.200}") from error
    before: tuple[list[Any], list[int]] = ([], [])
    alike = 0
    for k, entry in enumerate(entries):
        if k >= max(most, length or 0):
            raise ValueError(f"{name} gave {k} entries and more: {what}")
        if length is None:
            leaves = [entry] if isinstance(entry, Tensor) else tree_leaves(entry)
            seen = leaves, [_state(leaf) for leaf in leaves]
            alike = alike + 1 if _are_same(seen, before) else 1
            before = seen
            if alike >= MOST_ALIKE:
                kind = type(entry).__name__
                raise ValueError(f"{name} gave the same {kind} {MOST_ALIKE} times and states no length: {what}")
        yield entry


def _are_same(these: tuple[list[Any], list[int]], others: tuple[list[Any], list[int]]) -> bool:
    return these[1] == others[1] and len(these[0]) == len(others[0]) and all(map(operator.is_, these[0], others[0]))


def _state(leaf: Any) -> int:
    """What changes where an object is written to: a loader may give one buffer again and again."""
    if isinstance(leaf, Tensor):
        return next(_NEVER) if leaf.is_inference() else leaf._version
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return zlib.crc32(leaf.flat[:SAMPLE].tobytes())
    return 0
