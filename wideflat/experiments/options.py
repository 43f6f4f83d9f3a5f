"""Options of experiments: what every item takes, and how options whose default is the item's own are shown.

The options of an item are a dataclass: its fields are the flags of ``wideflat reproduce ITEM``, their docstrings the
help. Where the paper's experiment and its reduced form have different defaults, or items that share an option have,
the field is None when left out and its help says what is taken then; the types below keep ``None`` out of the help.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg
from tyro.extras import literal_type_from_choices

from wideflat.entropy.measure import METHODS

__all__ = [
    "Device",
    "Ints",
    "MaybeFloat",
    "MaybeFloats",
    "MaybeInt",
    "MaybeInts",
    "MaybePath",
    "MaybeText",
    "MaybeTexts",
    "Method",
    "Options",
    "Pairs",
    "Parameters",
    "Paths",
    "chosen",
]

if TYPE_CHECKING:
    Method = str
else:
    #: A method of the local entropy.
    Method = literal_type_from_choices(list(METHODS))

# What is empty when left out shows no default either.
Ints = Annotated[tuple[int, ...], arg(metavar="INT ...", help_behavior_hint="")]
Paths = Annotated[tuple[Path, ...], arg(metavar="PATH ...", help_behavior_hint="")]
Pairs = Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...", help_behavior_hint="")]
Device = Annotated[str, arg(metavar="DEVICE")]
Parameters = Annotated[str, arg(metavar="WHICH")]

MaybeInt = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
MaybeFloat = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")]
MaybeText = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
MaybePath = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")]
MaybeInts = Annotated[tuple[int, ...] | None, arg(metavar="INT ...", help_behavior_hint="")]
MaybeFloats = Annotated[tuple[float, ...] | None, arg(metavar="FLOAT ...", help_behavior_hint="")]
MaybeTexts = Annotated[tuple[str, ...] | None, arg(metavar="NAME ...", help_behavior_hint="")]


@dataclasses.dataclass
class Options:
    """What every item takes."""

    seed: int = 0
    """Seed of everything random; the first one where there are several."""


def chosen(options: Options) -> dict[str, Any]:
    """The options that are not the default, for the record; of a folder its name, wherever it was.

    Example:
        >>> chosen(Options(seed=3)), chosen(Options())
        ({'seed': 3}, {})
    """
    values = {field.name: (getattr(options, field.name), field.default) for field in dataclasses.fields(options)}
    return {
        name: Path(value).name if isinstance(value, Path) else value
        for name, (value, default) in values.items()
        if value != default
    }
