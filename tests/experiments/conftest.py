"""The correlation figure on a few tiny networks, trained once for each file that asks for it."""

from typing import Any

import pytest

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
