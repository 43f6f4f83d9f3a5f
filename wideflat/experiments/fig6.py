"""Figure 6: dropout instead of entropic algorithms; the three measures agree there too."""

from __future__ import annotations

import dataclasses
import functools

from wideflat.committee import SETTINGS
from wideflat.experiments.committee_figure import Case, CommitteeFigure, CommitteeOptions
from wideflat.experiments.experiment import Item
from wideflat.experiments.options import MaybeFloats

__all__ = ["ITEM", "Fig6Options"]


@dataclasses.dataclass
class Fig6Options(CommitteeOptions):
    """Committee machine trained by SGD fast with dropout: local entropy, local energy and test error.

    Examples:
      wideflat reproduce fig6 --quick
      wideflat reproduce fig6 --dropouts 0 0.1 0.2 0.3 0.4 --restarts 50
    """

    dropouts: MaybeFloats = None
    """Dropout probabilities, which the paper does not print; 0, 0.1, ..., 0.4 when left out (quick: 0, 0.2 and 0.4)."""


def cases(options: Fig6Options, quick: bool, subsets: int) -> list[Case]:
    """One for each dropout probability."""
    restarts = options.restarts or (6 if quick else 50)
    dropouts = options.dropouts or ((0.0, 0.2, 0.4) if quick else (0.0, 0.1, 0.2, 0.3, 0.4))
    return [
        Case(f"dropout-{dropout:g}", SETTINGS["sgd-fast"].replace(dropout=dropout), -(-restarts // subsets))
        for dropout in dropouts
    ]


ITEM = Item(
    name="fig6",
    title="Figure 6: a committee machine trained with dropout",
    claim=(
        "The paper trains the committee machine with SGD fast and different dropout probabilities: minima found with "
        "more dropout have a larger local entropy, a lower local energy, and generalise better."
    ),
    quick_means="a few restarts of three dropout probabilities on two training subsets",
    options=Fig6Options,
    make=functools.partial(CommitteeFigure, cases=cases, references=("dropout-0",)),
)
