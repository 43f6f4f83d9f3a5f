r"""A table of a run: one JSON object a line, appended to, read past whatever is damaged.

A table is a log. What a training depends on is in its states; a line that a disk has spoilt costs that line alone. It
is kept in a file beside (``metrics.damaged`` of ``metrics.jsonl``), and blanks take its place, so that the lengths that
states know stay true.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from wideflat.checks.records import in_json
from wideflat.files import atomic_write, read_whole

__all__ = ["append_row", "mend_table", "read_table"]


#: The most bytes of a table.
MOST_TABLE = 2**30


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add one line, on the disk when this returns. A last line that was cut short is ended first."""
    line = in_json("a row of a table", row)
    with open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_table(path: Path) -> tuple[list[dict[str, Any]], int]:
    r"""The rows of a table, and how many lines are damaged; a line without its end is still being written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> _ = path.write_bytes(b'{"epoch": 1}\n{"epo\xff": 2}\n{"epoch": 3}\n{"epo')
        >>> read_table(path)
        ([{'epoch': 1}, {'epoch': 3}], 1)
    """
    try:
        lines = read_whole(path, MOST_TABLE).split(b"\n")[:-1]
    except FileNotFoundError:
        return [], 0
    rows = [_row(line) for line in lines if line.strip()]
    return [row for row in rows if row is not None], sum(row is None for row in rows)


def mend_table(path: Path, length: int | None = None) -> str | None:
    r"""Set damaged lines aside and put blanks in their place, byte for byte; cut or fill the table to ``length``.

    Args:
        path: The table.
        length: How many bytes it had when the state was saved that is gone on from; None for all that are there.

    Returns:
        What was wrong, to be said; None if nothing was.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> _ = path.write_bytes(b'{"epoch": 1}\n{"epo\xff": 2}\n')
        >>> mend_table(path)
        'metrics.jsonl is damaged in 1 line, kept in metrics.damaged; states are good without it'
        >>> path.read_bytes(), path.with_suffix(".damaged").read_bytes()
        (b'{"epoch": 1}\n            \n', b'{"epo\xff": 2}\n')
    """
    try:
        before = read_whole(path, MOST_TABLE)
    except FileNotFoundError:
        before = b""
    content = before if length is None else before[:length].ljust(length)
    lost = len(content) - len(before) if length is not None else 0
    if content and not content.endswith(b"\n"):
        content = content[: -1 if length is not None else None] + b"\n"
    lines = content.split(b"\n")[:-1]
    bad = [k for k, line in enumerate(lines) if line.strip() and _row(line) is None]
    if bad:
        with open(path.with_suffix(".damaged"), "ab") as aside:
            aside.writelines(lines[k] + b"\n" for k in bad)
        for k in bad:
            lines[k] = b" " * len(lines[k])
        content = b"".join(line + b"\n" for line in lines)
    if not bad and before.startswith(content):
        if len(before) > len(content):
            os.truncate(path, len(content))
        return None
    with atomic_write(path, "wb") as file:
        file.write(content)
    return _words(path, len(bad), max(lost, 0))


def _words(path: Path, bad: int, lost: int) -> str | None:
    kept = f"in {bad} line{'s' * (bad > 1)}, kept in {path.with_suffix('.damaged').name}" if bad else ""
    gone = f"and has lost {lost} bytes" if bad and lost else f"by the loss of {lost} bytes" if lost else ""
    told = ", ".join(part for part in (kept, gone) if part)
    return f"{path.name} is damaged {told}; states are good without it" if told else None


def _row(line: bytes) -> dict[str, Any] | None:
    """The object that a line is; None if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
