"""What ``--json`` prints: one object on standard output, numbers as numbers, and nothing else there."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import Tensor

__all__ = ["alone_on_stdout", "answer", "plain"]

#: Where answers go while everything else that is printed goes to standard error.
_places: list[TextIO] = []


@contextlib.contextmanager
def alone_on_stdout(wanted: bool) -> Iterator[None]:
    """Inside, if it is wanted, only :func:`answer` reaches standard output; what else is printed goes beside it."""
    if not wanted:
        yield
        return
    _places.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _places.pop()


def answer(record: Mapping[str, Any]) -> None:
    """Print the one object that a command with ``--json`` has to say."""
    print(json.dumps(plain(record), indent=1, allow_nan=False), file=_places[-1] if _places else sys.stdout)


def plain(value: Any) -> Any:
    """A value for JSON. What is no finite number is null, also where our own files have a word for it.

    Raises:
        TypeError: There is no form for it; a number is never printed as text.

    Example:
        >>> plain({"stderr": np.array([0.5, np.nan]), "gap": "inf", "size": {"number": "nan"}, "page": Path("a.html")})
        {'stderr': [0.5, None], 'gap': None, 'size': None, 'page': 'a.html'}
    """
    if isinstance(value, Mapping):
        return None if set(value) == {"number"} else {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic, Tensor)):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if type(value) is str:  # a text about numbers, as tables have them, is another type: its record is asked for
        return None if value in ("nan", "inf", "-inf") else value
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, int):
        return value
    raise TypeError(f"JSON has no form for {type(value).__name__}")
