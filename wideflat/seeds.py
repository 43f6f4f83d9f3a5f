"""One seed for a run, and from it an independent one for everything random in it."""

from __future__ import annotations

import hashlib
from typing import Any

from wideflat.checks import shown

__all__ = ["as_seed", "derive_seed"]


def derive_seed(seed: int, *what: int | str) -> int:
    """A seed of 63 bits for one purpose, independent of those for all others.

    Args:
        seed: Of the run.
        what: The purpose: names and counters.

    Example:
        >>> derive_seed(0, "noise", 1, 2) == derive_seed(0, "noise", 1, 2) != derive_seed(0, "noise", 2, 1)
        True
    """
    key = as_seed(seed), *(part if isinstance(part, str) else int(part) for part in what)
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def as_seed(seed: Any) -> int:
    """A seed as a plain number.

    >>> as_seed(3)
    3
    >>> as_seed(float("inf"))
    Traceback (most recent call last):
    ...
    TypeError: seed must be a whole number, got inf
    """
    try:
        plain = int(seed)
    except Exception:  # it is none, or has no content, or is of the user's own kind, which fails
        raise TypeError(f"seed must be a whole number, got {shown(seed)}") from None
    if abs(plain) >= 10**40:
        raise ValueError(f"seed must have at most 40 digits, got {shown(plain)}")
    if isinstance(seed, float) and plain != seed:
        raise TypeError(f"seed must be a whole number, got {shown(seed)}")
    return plain
