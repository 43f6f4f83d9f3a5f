from pathlib import Path

import numpy as np

from wideflat.experiments.table import Table
from wideflat.experiments.table1 import ITEM as TABLE1
from wideflat.presets import PRESETS
from wideflat.training.runs import Run


def test_quick_path_from_nothing_to_report(tmp_path: Path) -> None:
    item = TABLE1.open(tmp_path, quick=True, epochs=3, limit_data=50, seeds=2, algorithms=("sgd", "rsgd"))
    item.compute()
    table = item.table("cells")
    assert table is not None
    assert [(row["algorithm"], row["seed"]) for row in table] == [("sgd", 0), ("sgd", 1), ("rsgd", 0), ("rsgd", 1)]
    for row in table:
        result = Run.open(tmp_path / "runs" / row["run"]).result()
        assert result is not None
        assert row["test_error"] == result["test_error"]
        assert (row["replica_test_error"] is None) == (row["algorithm"] == "sgd")
        if row["algorithm"] == "rsgd":
            assert row["replica_test_error"] == np.mean(result["replica_test_errors"])
            assert row["ensemble_test_error"] == result["ensemble_test_error"]
    assert table.provenance["item"] == "table1" and table.provenance["label"].startswith("QUICK, not the paper's")
    text = item.write_report().read_text()
    assert "[QUICK]" in text and "3 epochs on 50 Dress-vs-Coat images" in text
    rows = item.comparison().rows
    assert rows[0][:3] == ["cifar10-smallconvnet", "SGD", "16.5 ± 0.2"] and rows[0][-1] == 2
    errors = 100 * table.where(algorithm="sgd")["test_error"]
    assert rows[0][3] == f"{errors.mean():.2f} ± {errors.std(ddof=1):.2f}"
    (chart,) = item.charts()
    assert chart.series[1].label == "rSGD" and len(chart.series[1].y) == 2


def test_redrawing_needs_the_table_only(tmp_path: Path) -> None:
    item = TABLE1.open(tmp_path)
    assert item.charts() == [] and item.comparison().rows == []
    table = Table(
        ["row", "algorithm", "seed", "test_error", "replica_test_error", "ensemble_test_error", "train_error"]
    )
    for seed, error in enumerate((0.130, 0.132)):
        table.add(row="cifar10-resnet18", algorithm="sgd", seed=seed, test_error=error, train_error=0.001)
    table.add(row="cifar10-pyramidnet", algorithm="esgd", seed=0, test_error=0.02, train_error=0.0)
    table.save(tmp_path / "cells.csv")
    assert [row[:4] for row in item.comparison().rows] == [
        ["cifar10-resnet18", "SGD", "13.1 ± 0.3", "13.10 ± 0.14"],
        ["cifar10-pyramidnet", "eSGD", "-", "2.00"],
    ]
    assert [chart.name for chart in item.charts()] == ["table1-cifar10-resnet18", "table1-cifar10-pyramidnet"]
    assert item.write_report().exists()


def test_the_whole_table_has_every_cell() -> None:
    cells = TABLE1.open(Path("nowhere")).work.cells
    assert len(cells) == 8 * 4 * 5
    assert {cell.preset.name for cell in cells} == set(PRESETS)
    assert {cell.seed for cell in cells} == {0, 1, 2, 3, 4}
    short = TABLE1.open(Path("nowhere"), rows=("cifar10-smallconvnet",), epochs=30, seeds=1, seed=7).work.cells
    assert [(c.preset.algorithm, c.preset.epochs, c.seed) for c in short] == [
        ("sgd", 30, 7),
        ("rsgd", 10, 7),
        ("esgd", 6, 7),
        ("rsgdxy", 30, 7),
    ]


def test_another_choice_of_rows_adds_to_the_table(tmp_path: Path) -> None:
    small = {"quick": True, "epochs": 1, "limit_data": 25, "seeds": 1, "algorithms": ("sgd",)}
    TABLE1.open(tmp_path, rows=("cifar10-smallconvnet",), **small).compute()  # type: ignore[arg-type]
    item = TABLE1.open(tmp_path, rows=("cifar10-resnet18",), **small)  # type: ignore[arg-type]
    item.compute()
    assert item.table("cells").unique("row") == ["cifar10-smallconvnet", "cifar10-resnet18"]  # type: ignore[union-attr]
