"""Help pages as wide as the terminal: words are never broken, the examples can still be pasted."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

__all__ = [
    "as_wide_as_the_screen",
    "fitted",
    "joined",
    "nearest_word",
    "screen_width",
    "unknown_option",
    "with_the_nearest_word",
    "without_colours_if_asked",
]

_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def screen_width() -> int:
    """Columns of the terminal (``$COLUMNS`` wins), at least 40."""
    return max(40, shutil.get_terminal_size().columns)


@contextlib.contextmanager
def as_wide_as_the_screen(wanted: bool) -> Iterator[None]:
    """What the block prints, if it is a help page, is fitted into the terminal; tyro fits its boxes alone."""
    if not wanted:
        yield
        return
    page = _Page(sys.stdout)
    try:
        with contextlib.redirect_stdout(page):
            yield
    finally:
        print(fitted(page.getvalue(), screen_width()), end="")


@contextlib.contextmanager
def with_the_nearest_word(name: str, arguments: Sequence[str], options: Callable[..., Iterable[str]]) -> Iterator[None]:
    """A word that is none of those possible is answered with the one that may be meant.

    Args:
        name: Of the command.
        arguments: What follows it.
        options: The options of the command, and of the items that are named.
    """
    page = _Page(sys.stderr)
    try:
        with contextlib.redirect_stderr(page):
            yield
    finally:
        text = " ".join(re.sub(r"[│─╭╮╰╯|]", " ", _COLOURS.sub("", page.getvalue())).split())
        if unknown := re.search(r"Unrecognized options: (--[\w-]+)", text):
            items = [word for word in arguments if not word.startswith("-")][:1]
            print(unknown_option(name, unknown[1], items, list(options(name, *items))), file=sys.stderr)
        else:
            print(page.getvalue(), end="", file=sys.stderr)
            if word := nearest_word(text):
                print(f"Did you mean {word!r}?", file=sys.stderr)


def unknown_option(name: str, option: str, items: Sequence[str], known: Sequence[str]) -> str:
    """That there is no such option, the nearest one, and where all of them are.

    Example:
        >>> print(unknown_option("demo", "--sedes", [], ["--help", "--seeds"]))
        wideflat: demo has no option --sedes. Did you mean --seeds?
        `wideflat demo --help` lists its options
    """
    whole = " ".join([name, *(items if name == "reproduce" else ())])
    near = difflib.get_close_matches(option, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"wideflat: {whole} has no option {option}.{hint}\n`wideflat {whole} --help` lists its options"


def nearest_word(complaint: str) -> str:
    """The nearest of the words that are possible, of those that tyro lists; nothing if none is near.

    Example:
        >>> nearest_word("invalid choice 'esdg' for argument '--algorithm'. Expected one of ('sgd', 'esgd').")
        'esgd'
    """
    for pattern in (
        r"invalid choice '(?P<word>[^']*)' .*Expected one of \((?P<possible>[^)]*)\)",
        r"Unrecognized options: (?P<word>\S+) .*Available subcommands: (?P<possible>.*?) For full",
    ):
        if found := re.search(pattern, complaint):
            near = difflib.get_close_matches(found["word"], re.findall(r"[\w-]+", found["possible"]), n=1)
            return near[0] if near else ""
    return ""


class _Page(io.StringIO):
    """What looks to tyro like the real output: colours and boxes hang on it."""

    def __init__(self, screen: Any) -> None:
        super().__init__()
        self._screen = screen

    def isatty(self) -> bool:
        return self._screen.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._screen, "encoding", None) or "utf-8"


@contextlib.contextmanager
def without_colours_if_asked() -> Iterator[None]:
    """Inside, tyro has no colours where ``NO_COLOR`` is set: it looks at ``TERM`` alone."""
    before = os.environ.get("TERM")
    if not os.environ.get("NO_COLOR") or before is None:
        yield
        return
    os.environ["TERM"] = "dumb"
    try:
        yield
    finally:
        os.environ["TERM"] = before


def joined(text: str) -> str:
    r"""A docstring with every paragraph on one line; indented lines, the examples, stay.

    Example:
        >>> joined("One\ntwo.\n\nExamples:\n  wideflat demo")
        'One two.\n\nExamples:\n  wideflat demo'
    """
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def fitted(text: str, width: int) -> str:
    r"""Lines of text in at most ``width`` columns.

    Indented lines are examples: one that is too long goes on behind a backslash, and what explains it (two spaces after
    it) stands below it. Lines of boxes are left alone.

    Example:
        >>> print(fitted("One two three four.\n  wideflat train --algorithm esgd  what it does", 28))
        One two three four.
          wideflat train \
              --algorithm esgd
              what it does
    """
    return "\n".join(part for line in text.split("\n") for part in _lines(line, width))


def _lines(line: str, width: int) -> list[str]:
    if len(_COLOURS.sub("", line)) <= width or line.lstrip()[0] in "│╭╰":
        return [line]
    if not line.startswith("  "):
        return textwrap.wrap(line, width, **_WHOLE)
    margin = " " * (len(line) - len(line.lstrip()))
    command, *explanation = re.split(r" {2,}", line.strip(), maxsplit=1)
    lines = textwrap.wrap(command, width - len(margin) - 2, subsequent_indent="    ", **_WHOLE)
    return [
        *(f"{margin}{line} \\" for line in lines[:-1]),
        margin + lines[-1],
        *(f"{margin}    {words}" for words in explanation),
    ]
