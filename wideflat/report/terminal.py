"""Tables in the terminal: drawn with rich on a screen, plain aligned text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

__all__ = ["aligned", "print_table"]


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    title: str = "",
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table to standard output.

    Args:
        columns: Headings.
        rows: One sequence a row, as many entries as headings.
        title: Above it.
        styles: Colours that entries have on a screen, by what the entry says.

    Example:
        >>> print_table(["setting", "error"], [["sgd-fast", "8.8 ± 0.3"], ["esgd", "6.7"]], title="Test errors")
        Test errors
        setting   error
        sgd-fast  8.8 ± 0.3
        esgd      6.7
    """
    cells = [[str(entry) for entry in row] for row in rows]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            table = Table(title=title or None, title_justify="left")
            for column in columns:
                table.add_column(column)
            for row in cells:
                table.add_row(*(Text(entry, (styles or {}).get(entry, "")) for entry in row))
            Console().print(table)
            return
    if title:
        print(title)
    for line in aligned([list(columns), *cells]):
        print(line)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text as lines with aligned columns.

    Example:
        >>> aligned([["a", "bc"], ["def", "g"]])
        ['a    bc', 'def  g']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip() for row in rows]
