"""Results that are kept as JSON: one that was saved is read again, and nothing else is taken for one."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

from wideflat.checks.records import parts_of, reading
from wideflat.files import read_json, write_json
from wideflat.notebook import Result

__all__ = ["Saved"]

S = TypeVar("S", bound="Saved")


@dataclass(repr=False)
class Saved(Result):
    """A result in a file: a dataclass says what it is, and which of its fields are arrays.

    Example:
        >>> import numpy as np
        >>> @dataclass(repr=False)
        ... class Line(Saved):
        ...     _WHAT, _ARRAYS = "line", ("y",)
        ...     y: np.ndarray
        >>> Line(np.array([0.5, np.nan])).to_dict()
        {'format': 1, 'y': [0.5, 'nan']}
        >>> Line.from_dict({"format": 1, "y": [0.5, "nan"]}).y
        array([0.5, nan])
    """

    _WHAT: ClassVar[str]
    _ARRAYS: ClassVar[tuple[str, ...]] = ()
    #: Whether a number beside the arrays may be nan or infinite in the file.
    _NAN: ClassVar[bool] = False

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers; what is not finite in an array is a word."""
        return {"format": 1, **asdict(self), **{name: _plain(getattr(self, name).tolist()) for name in self._ARRAYS}}

    @classmethod
    def from_dict(cls: type[S], content: dict[str, Any]) -> S:
        """The inverse of :meth:`to_dict`."""
        with reading(cls._WHAT):
            return cls(**parts_of(cls._WHAT, content, cls._ARRAYS))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, whole or not at all."""
        write_json(path, self.to_dict(), allow_nan=self._NAN)

    @classmethod
    def load(cls: type[S], path: str | os.PathLike[str]) -> S:
        """Read what :meth:`save` wrote."""
        return read_json(path, cls._WHAT, cls.from_dict)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if math.isfinite(value) else repr(value)
