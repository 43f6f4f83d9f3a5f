"""Tables in the terminal: drawn with rich on a screen, plain aligned text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["print_table"]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a table to standard output.

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
                table.add_row(*map(Text, row))
            Console().print(table)
            return
    if title:
        print(title)
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        print("  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip())
