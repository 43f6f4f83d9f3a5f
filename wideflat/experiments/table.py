"""A table of results on disk: a CSV that any tool reads, and beside it where its numbers come from."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from wideflat.files import atomic_write, read_json, read_whole, write_json

__all__ = ["Table"]


@dataclass
class Table:
    """Named columns of numbers and words; missing entries are None.

    Args:
        columns: The names, in order.
        rows: One list an entry, as long as ``columns``.
        provenance: What made the numbers (command, commit, hardware, sizes); saved as JSON beside the CSV.

    Example:
        >>> table = Table(["setting", "error"], [["sgd-fast", 0.09], ["sgd-fast", 0.07], ["esgd", 0.06]])
        >>> table.where(setting="sgd-fast")["error"]
        array([0.09, 0.07])
        >>> table.unique("setting")
        ['sgd-fast', 'esgd']
    """

    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    def add(self, **entries: Any) -> None:
        """Append a row given by name; columns that are not named are missing."""
        unknown = entries.keys() - set(self.columns)
        if unknown:
            raise ValueError(f"the table has no column {sorted(unknown)}; its columns are {self.columns}")
        self.rows.append([_plain(entries.get(name)) for name in self.columns])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __getitem__(self, column: str) -> np.ndarray:
        """A column as an array of floats (missing: NaN), or of objects if it holds words."""
        index = self.columns.index(column)
        values = [row[index] for row in self.rows]
        if any(isinstance(value, str) for value in values):
            return np.array(values, dtype=object)
        return np.array([np.nan if value is None else value for value in values], dtype=float)

    def where(self, **equal: Any) -> Table:
        """The rows whose entries equal those given."""
        indices = {self.columns.index(name): value for name, value in equal.items()}
        kept = [row for row in self.rows if all(row[i] == value for i, value in indices.items())]
        return Table(self.columns, kept, self.provenance)

    def unique(self, column: str) -> list[Any]:
        """The different entries of a column, in the order of their first appearance."""
        index = self.columns.index(column)
        return list(dict.fromkeys(row[index] for row in self.rows))

    def save(self, path: str | PathLike[str]) -> None:
        """Write ``path`` (CSV) and the provenance beside it (same name, ``.json``), each whole or not at all."""
        path = Path(path)
        write_json(path.with_suffix(".json"), self.provenance)
        with atomic_write(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows([["" if entry is None else _text(entry) for entry in row] for row in self.rows])

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Table:
        """Read what :meth:`save` wrote; numbers come back as numbers."""
        path = Path(path)
        try:
            columns, *rows = csv.reader(io.StringIO(read_whole(path).decode("utf-8"), newline=""))
            ragged = next((number for number, row in enumerate(rows, 2) if len(row) != len(columns)), None)
            if ragged is not None:
                raise ValueError(f"line {ragged} has another number of entries than the heading")
            provenance = read_json(path.with_suffix(".json"), "record of a table", dict)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error.filename} is missing: run the experiment that makes it again") from None
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path} is not a table of results ({error}): delete it and run again") from None
        return cls(columns, [[_parse(entry) for entry in row] for row in rows], provenance)

    @classmethod
    def join(cls, tables: Iterable[Table]) -> Table:
        """The rows of several tables of the same columns, one after the other."""
        tables = list(tables)
        if not tables:
            raise ValueError("there is no table to join")
        columns = tables[0].columns
        if any(table.columns != columns for table in tables):
            raise ValueError(f"tables of different columns cannot be joined: {[table.columns for table in tables]}")
        return cls(columns, [row for table in tables for row in table.rows], _merged(t.provenance for t in tables))


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    return merged


def _plain(value: Any) -> Any:
    """A Python number for a NumPy or torch one."""
    return value.item() if hasattr(value, "item") else value


def _text(entry: Any) -> str:
    return repr(entry) if isinstance(entry, float) else str(entry)


def _parse(entry: str) -> Any:
    if entry == "":
        return None
    for kind in (int, float):
        try:
            return kind(entry)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(entry, entry)
