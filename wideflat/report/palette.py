"""Who is drawn in which colour: an algorithm has the same one in every figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALGORITHMS", "COLORS", "Look", "algorithm_of", "looks"]

#: For series that are no algorithm. Colour-blind readers can tell them apart (Okabe and Ito), on white and on black.
COLORS = ("#1f83c9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c8c00", "#888888")

#: The colour of each algorithm, wherever it is drawn.
ALGORITHMS = {
    "sgd": "#1f83c9",
    "rsgd": "#009e73",
    "esgd": "#d55e00",
    "rsgdxy": "#8c8c00",
    "lookahead": "#cc79a7",
    "easgd": "#56b4e9",
    "parle": "#e69f00",
    "sam": "#9467bd",
    "ema": "#888888",
}

#: Other ways to write their names.
_SPELLINGS = {"entropysgd": "esgd", "entropy-sgd": "esgd", "replicated-sgd": "rsgd", "rsgd x y": "rsgdxy"}

#: Lines of one colour, in this order.
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "triangle-up", "diamond")


@dataclass(frozen=True)
class Look:
    """How a series is drawn.

    Args:
        color: Of line, points and band.
        dash: "solid", "dash", "dot" or "dashdot".
        symbol: Of its points.
    """

    color: str
    dash: str = "solid"
    symbol: str = "circle"


def algorithm_of(label: str) -> str | None:
    """The algorithm that a label names, if it names one.

    Example:
        >>> algorithm_of("eSGD"), algorithm_of("sgd-fast"), algorithm_of("runs/net-rsgd, 3 seeds"), algorithm_of("mine")
        ('esgd', 'sgd', 'rsgd', None)
        >>> algorithm_of("rSGD x y"), algorithm_of("Entropy-SGD")
        ('rsgdxy', 'esgd')
    """
    text = label.lower()
    for spelling, name in _SPELLINGS.items():
        if spelling in text:
            return name
    return next((word for word in re.split(r"[^a-z0-9]+", text) if word in ALGORITHMS), None)


def looks(labels: Sequence[str]) -> list[Look]:
    """A look for each label: the colour of its algorithm, and among several of one algorithm another line for each.

    Labels that name no algorithm get the colours that are left, in their order.

    Example:
        >>> [(look.color, look.dash) for look in looks(["SGD", "sgd slow", "eSGD"])]
        [('#1f83c9', 'solid'), ('#1f83c9', 'dash'), ('#d55e00', 'solid')]
    """
    named = [algorithm_of(label) for label in labels]
    taken = {ALGORITHMS[name] for name in named if name}
    free = [color for color in COLORS if color not in taken] or list(COLORS)
    counts: dict[str, int] = {}
    found: list[Look] = []
    strangers = 0
    for name in named:
        if name is None:
            color, strangers = free[strangers % len(free)], strangers + 1
        else:
            color = ALGORITHMS[name]
        count = counts.get(color, 0)
        counts[color] = count + 1
        found.append(Look(color, _DASHES[count % len(_DASHES)], _SYMBOLS[count % len(_SYMBOLS)]))
    return found
