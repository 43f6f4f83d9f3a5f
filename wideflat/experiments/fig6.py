"""Figure 6: dropout instead of entropic algorithms; the three measures agree there too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wideflat.committee import SETTINGS
from wideflat.experiments.committee_figure import Case, CommitteeFigure

__all__ = ["Fig6"]


class Fig6(CommitteeFigure):
    """SGD fast with several dropout probabilities.

    Args:
        folder: Where everything goes.
        restarts: Restarts of each probability, divided over the training subsets (default 50; quick: 4).
        dropouts: The probabilities; the paper does not print its own.
        **more: See :class:`wideflat.experiments.committee_figure.CommitteeFigure`.
    """

    name = "fig6"
    title = "Figure 6: a committee machine trained with dropout"
    claim = (
        "The paper trains the committee machine with SGD fast and different dropout probabilities: minima found with "
        "more dropout have a larger local entropy, a lower local energy, and generalise better."
    )
    references = ("dropout-0",)
    quick_means = "a few restarts of three dropout probabilities on one training subset"

    def __init__(
        self,
        folder: Path,
        quick: bool = False,
        restarts: int | None = None,
        dropouts: Sequence[float] | None = None,
        **more: Any,
    ) -> None:
        if quick:
            more = {"subsets": 1, "methods": ("bp",), **more}
        super().__init__(folder, quick, **more)
        restarts = restarts or (4 if quick else 50)
        dropouts = dropouts or ((0.0, 0.2, 0.4) if quick else (0.0, 0.1, 0.2, 0.3, 0.4))
        self.cases = [
            Case(f"dropout-{dropout:g}", SETTINGS["sgd-fast"].replace(dropout=dropout), -(-restarts // self.subsets))
            for dropout in dropouts
        ]
