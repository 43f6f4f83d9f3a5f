"""Where the result of a measurement is written, so that an earlier one cannot be lost to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from wideflat.commands import UsageError

__all__ = ["result_file"]


def result_file(
    asked: Path | None, usual: Path, overwrite: bool, goes_on: Callable[[Path], bool] = lambda path: False
) -> Path:
    """The file for a new result. What is there already is replaced only if the user says so.

    Args:
        asked: What ``--out`` names; it must not be there yet.
        usual: The name when it is left out; one with a number if it is taken.
        overwrite: Replace what is there.
        goes_on: Whether what is there is the beginning of this measurement, which was interrupted.

    Example:
        >>> import tempfile
        >>> usual = Path(tempfile.mkdtemp()) / "local_energy.json"
        >>> result_file(None, usual, overwrite=False).name
        'local_energy.json'
        >>> _ = usual.write_text("an hour of work")
        >>> result_file(None, usual, overwrite=False).name
        'local_energy-2.json'
        >>> result_file(usual, usual, overwrite=False)
        Traceback (most recent call last):
        wideflat.commands.UsageError: ...local_energy.json is there already: give another --out, or --overwrite ...
    """
    if overwrite:
        return asked or usual
    if asked is not None:
        if asked.exists() and not goes_on(asked):
            raise UsageError(f"{asked} is there already: give another --out, or --overwrite to replace it")
        return asked
    numbered = (usual.with_name(f"{usual.stem}-{number}{usual.suffix}") for number in itertools.count(2))
    return next(path for path in itertools.chain([usual], numbered) if goes_on(path) or not path.exists())
