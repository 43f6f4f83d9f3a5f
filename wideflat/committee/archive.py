"""Arrays with a record in words beside them: one ``.npz`` file of plain arrays and JSON. Nothing in it is unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from wideflat.files import atomic_write, read_npz

__all__ = ["check_shapes", "read", "write"]


def write(
    path: str | os.PathLike[str], record: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, compressed: bool
) -> None:
    """Write a file whole or not at all."""
    save: Any = np.savez_compressed if compressed else np.savez
    with atomic_write(path, "wb") as file:
        save(file, metadata=np.array(json.dumps(record)), **arrays)


def read(path: str | os.PathLike[str], form: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The record and the arrays of a file.

    Args:
        path: The file.
        form: What ``"format"`` in the record must say.

    Raises:
        ValueError: The file is damaged, or something else; the message says what is wrong with it.
        FileNotFoundError: There is none.
    """
    try:
        arrays = read_npz(path)
        record = json.loads(str(arrays.pop("metadata")))
    except KeyError as error:
        raise ValueError(f"there is no {error} in it") from error
    except RecursionError as error:
        raise ValueError("its record is nested too deeply") from error
    if not isinstance(record, dict) or record.pop("format", None) != form:
        raise ValueError(f"it does not say that it is of the format {form!r}")
    return record, arrays


def check_shapes(
    arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], kinds: str = "f"
) -> dict[str, np.ndarray]:
    """The arrays of the given names, if each has its shape and one of the kinds of numbers (``dtype.kind``).

    Example:
        >>> check_shapes({"weights": np.zeros((2, 3))}, {"weights": (2, 4)})
        Traceback (most recent call last):
        ...
        ValueError: 'weights' must have the shape (2, 4), has (2, 3)
    """
    for name, shape in shapes.items():
        if name not in arrays:
            raise ValueError(f"there is no {name!r} in it")
        if arrays[name].dtype.kind not in kinds:
            raise ValueError(f"{name!r} must hold numbers, holds {arrays[name].dtype}")
        if arrays[name].shape != shape:
            raise ValueError(f"{name!r} must have the shape {shape}, has {arrays[name].shape}")
    return {name: arrays[name] for name in shapes}
