"""The commands of the command line, one module each.

A module ``wideflat/commands/some_name.py`` is the command ``wideflat some-name``. It defines a dataclass ``Command``
whose fields are the options, whose docstring is the help text and whose ``run()`` does the work and returns the exit
code. Only the module of the command that was typed is imported.

What is wrong about the command line itself is a :class:`UsageError`, which ends with another exit code than work that
failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["UsageError", "usage"]


class UsageError(ValueError):
    """The command line asks for something that there is not."""


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """What the block refuses with a ``ValueError`` is an error of usage.

    Example:
        >>> with usage():
        ...     int("three")
        Traceback (most recent call last):
        wideflat.commands.UsageError: invalid literal for int() with base 10: 'three'
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error
