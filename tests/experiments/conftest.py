"""The correlation figure on a few tiny networks and that of the committees on few patterns, once a file."""

import functools
from typing import Any

import pytest

from wideflat.committee import SETTINGS
from wideflat.experiments.committee_figure import Case, CommitteeFigure, CommitteeOptions
from wideflat.experiments.experiment import Item
from wideflat.experiments.fig7 import ITEM as FIG7

SMALL: dict[str, Any] = {
    "dropouts": (0.0, 0.5),
    "batch_sizes": (10,),
    "weight_decays": (0.0,),
    "widths": (4, 4, 4),
    "epochs": 2,
    "limit_data": 40,
    "realisations": 3,
}


@pytest.fixture(scope="module")
def small_fig7() -> dict[str, Any]:
    return SMALL


@pytest.fixture(scope="module")
def item(tmp_path_factory: pytest.TempPathFactory) -> Any:
    item = FIG7.open(tmp_path_factory.mktemp("fig7"), quick=True, **SMALL)
    item.compute()
    return item


def small_cases(options, quick, subsets):
    """SGD fast twice."""
    fast = SETTINGS["sgd-fast"].replace(polish_epochs=100)
    return [Case("plain", fast, 3), Case("dropout", fast.replace(dropout=0.3), 2)]


#: On 40 patterns: seconds.
FIGURE = Item(
    "fig1", "Small", "None.", "a test", CommitteeOptions, functools.partial(CommitteeFigure, cases=small_cases)
)


@pytest.fixture(scope="session")
def small():
    """``small(folder, **options)``: that figure."""

    def small(folder, **options):
        return FIGURE.open(folder, True, subsets=2, size=40, deltas=(0.05, 0.3, 1.0), sigmas=(0.0, 0.5), **options)

    return small


@pytest.fixture(scope="module")
def computed(small, tmp_path_factory):
    figure = small(tmp_path_factory.mktemp("small"), methods=("bp",))
    figure.compute()
    return figure
