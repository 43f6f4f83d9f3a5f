"""Tables in the terminal: drawn with rich on a screen, plain aligned text in a pipe."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

__all__ = ["aligned", "on_screen", "print_table", "stacked"]


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
    if sys.stdout.isatty() and _needed(columns, cells) > shutil.get_terminal_size().columns:
        print(on_screen([*([title] if title else []), *stacked(columns, cells)]))
        return
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


def _needed(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The width of a table whose headings are broken between words, and whose entries are not broken."""
    words = [max(map(len, column.split()), default=0) for column in columns]
    return sum(max(word, *(len(row[k]) for row in rows)) if rows else word for k, word in enumerate(words)) + (
        3 * len(columns) + 1
    )


def stacked(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table that is too wide for the terminal, row by row: the first entry, and the others below it.

    Example:
        >>> stacked(["setting", "error"], [["sgd-fast", "8.8 ± 0.3"], ["esgd", ""]])
        ['sgd-fast', '  error: 8.8 ± 0.3', 'esgd']
    """
    lines = []
    for row in rows:
        lines += [row[0], *(f"  {name}: {entry}" for name, entry in zip(columns[1:], row[1:], strict=True) if entry)]
    return lines


def aligned(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Rows of text as lines with aligned columns, to the left or to the right.

    Example:
        >>> aligned([["a", "bc"], ["def", "g"]]), aligned([["a", "bc"], ["def", "g"]], right=True)
        (['a    bc', 'def  g'], ['  a  bc', 'def   g'])
    """
    side = ">" if right else "<"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{e:{side}{width}}" for e, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def on_screen(lines: Sequence[str]) -> str:
    """Lines as they fit into the terminal, where one that is too long goes on below; in a pipe as they were."""
    if not sys.stdout.isatty():
        return "\n".join(lines)
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in lines for part in _broken(line, width))


def _broken(line: str, width: int) -> list[str]:
    """A line in pieces, the later ones under its last column where there is room.

    Example:
        >>> _broken("  lr   0.1  as in the paper", 20), _broken("short", 20)
        (['  lr   0.1  as in', '      the paper'], ['short'])
    """
    if len(line) <= width:
        return [line]
    margin = max((gap.end() for gap in re.finditer(r"^ +| {2,}", line)), default=0)
    margin = margin if margin < width // 2 else 6
    return textwrap.wrap(line, width, subsequent_indent=" " * margin, break_long_words=False, break_on_hyphens=False)
