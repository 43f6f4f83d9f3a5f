from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wideflat.experiments.fig2 import ITEM as FIG2
from wideflat.training.runs import Run


@pytest.fixture(scope="module")
def item(tmp_path_factory: pytest.TempPathFactory) -> Any:
    item = FIG2.open(
        tmp_path_factory.mktemp("fig2"), quick=True, epochs=3, limit_data=50, rows=("cifar10-resnet18",), seeds=2
    )
    item.compute()
    return item


def test_epochs_are_rescaled_as_the_caption_says(item: Any) -> None:
    table = item.table("curves")
    assert table is not None
    epochs = {name: table.where(algorithm=name, seed=0)["epoch"].tolist() for name in table.unique("algorithm")}
    rescaled = {
        name: table.where(algorithm=name, seed=0)["rescaled_epoch"].tolist() for name in table.unique("algorithm")
    }
    assert epochs == {"sgd": [1, 2, 3], "rsgd": [1], "esgd": [1], "rsgdxy": [1, 2, 3]}
    assert rescaled == {"sgd": [1, 2, 3], "rsgd": [3], "esgd": [5], "rsgdxy": [1, 2, 3]}


def test_curves_are_means_over_seeds(item: Any) -> None:
    runs = [Run.open(item.work.trainings.folder / f"quick-cifar10-resnet18-sgd-seed-{seed}") for seed in (0, 1)]
    errors = 100 * np.array([[row["test_error"] for row in run.metrics()] for run in runs])
    (chart,) = item.charts()
    curve = chart.series[0]
    assert curve.legend == "SGD (n = 2)"
    np.testing.assert_allclose(curve.y, errors.mean(0))
    np.testing.assert_allclose(curve.error, errors.std(0, ddof=1))
    rows = item.comparison().rows
    assert rows[0][:3] == ["cifar10-resnet18", "SGD", "13.1 ± 0.3"] and rows[0][-1] == "2 of 2"
    assert rows[0][3] == f"{errors[:, -1].mean():.2f} ± {errors[:, -1].std(ddof=1):.2f}"


def test_unfinished_seeds_are_drawn_but_not_counted_as_ends(item: Any, tmp_path: Path) -> None:
    table = item.table("curves")
    assert table is not None
    index = [table.columns.index(name) for name in ("algorithm", "seed", "epoch", "finished")]
    rows = []
    for row in table.rows:
        algorithm, seed, epoch, _ = (row[i] for i in index)
        if algorithm == "sgd" and (seed == 0 or epoch < 3):
            rows.append([*row[:-1], seed == 0])
    table.rows = rows
    other = FIG2.open(tmp_path)
    table.save(tmp_path / "curves.csv")
    (chart,) = other.charts()
    assert list(chart.series[0].x) == [1, 2, 3] and chart.series[0].error is not None
    assert np.isnan(chart.series[0].error[2]) and chart.series[0].counts[2] == 1  # one seed only: no spread
    assert other.comparison().rows[0][-1] == "1 of 2"
