from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wideflat.experiments import trainings
from wideflat.experiments.fig7 import ITEM as FIG7
from wideflat.experiments.table import Table
from wideflat.training import flatness
from wideflat.training.runs import Run


def test_quick_path_from_nothing_to_report(item: Any) -> None:
    table = item.table("networks")
    assert table is not None
    assert table["dropout"].tolist() == [0, 0.5] and table["batch_size"].tolist() == [10, 10]
    for row in table:
        run = Run.open(item.work.trainings.folder / row["network"])
        result = run.result()
        assert result is not None and row["test_error"] == result["test_error"] and row["epochs"] == 2
        profile = flatness.LocalEnergy.load(item.folder / "profiles" / f"{row['network']}.json")
        assert profile.samples is not None and profile.samples.shape == (3, 1)
        assert row["delta_e"] == pytest.approx(profile.samples.mean())
        assert row["spread"] == pytest.approx(profile.samples.std(ddof=1))
        assert profile.conventions["noise"] == "pass" and not profile.conventions["augmented"]
        assert run.config["data"]["train"] == 40 and run.config["data"]["test"] == 677
    text = item.write_report().read_text()
    assert "[QUICK]" in text and "at most 2 epochs on 40 Dress-vs-Coat images" in text


def test_nothing_is_computed_twice(item: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "train", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(flatness, "local_energy", lambda *a, **k: pytest.fail("measured again"))
    before = (item.folder / "networks.csv").read_text()
    item.compute()
    assert (item.folder / "networks.csv").read_text() == before


def test_networks_of_other_data_in_the_folder_are_refused(small_fig7: dict[str, Any], item: Any) -> None:
    with pytest.raises(ValueError, match=r"holds another experiment: data\.train is 40 there and 30 here"):
        FIG7.open(item.folder, quick=True, **{**small_fig7, "limit_data": 30}).compute()


def test_training_ends_when_the_network_fits(small_fig7: dict[str, Any], tmp_path: Path) -> None:
    item = FIG7.open(tmp_path, quick=True, **{**small_fig7, "dropouts": (0.0,), "epochs": 5}, target_loss=0.5)
    item.compute()
    table = item.table("networks")
    assert table is not None
    assert table["epochs"][0] < 5 and table["train_loss"][0] <= 0.5
    rows = Run.open(item.work.trainings.folder / table["network"][0]).metrics()
    assert rows[-1]["fit_loss"] <= 0.5 and all(row.get("fit_loss", 1) > 0.5 for row in rows[:-1])


def a_table(folder: Path) -> Table:
    rng = np.random.default_rng(0)
    table = Table(["network", "dropout", "train_error", "test_error", "sigma", "delta_e", "spread", "stderr"])
    for k in range(14):
        error = 0.1 + 0.01 * k
        noise = 0.02 * rng.normal()
        table.add(
            network=f"n{k}",
            dropout=0.5 * (k % 2),
            train_error=0.0,
            test_error=error,
            sigma=0.5,
            delta_e=2 * error + noise,
            spread=0.03,
            stderr=0.01,
        )
    table.add(
        network="unfit", dropout=0.0, train_error=0.3, test_error=0.9, sigma=0.5, delta_e=0.0, spread=0.0, stderr=0
    )
    table.save(folder / "networks.csv")
    return table


def test_correlation_is_of_the_networks_that_fit(tmp_path: Path) -> None:
    table = a_table(tmp_path)
    item = FIG7.open(tmp_path)
    x, y = table["test_error"][:14], table["delta_e"][:14]
    rows = {row[0]: row[1:] for row in item.comparison().rows}
    assert rows["Pearson's r"] == ["0.90", f"{np.corrcoef(x, y)[0, 1]:.2f}"]
    assert rows["n"] == [14, 14] and rows["p-value"][0] == "1e-04"
    assert rows["r with all networks"][1].endswith("(n = 15)")
    (chart,) = item.charts()
    assert [series.label for series in chart.series] == [
        "dropout 0",
        "dropout 0.5",
        "training error above 1%, left out",
    ]
    assert [len(series.y) for series in chart.series] == [7, 7, 1]
    np.testing.assert_allclose(chart.series[0].error, 3.0)
    assert chart.kind == "points" and "r(12) = " in chart.caption
    assert item.write_report().exists()


def test_several_learning_rates_are_several_networks(tmp_path: Path) -> None:
    one, two = (FIG7.open(tmp_path, dropouts=(0.0,), batch_sizes=(8,), lr=rates) for rates in ((0.01,), (0.01, 0.1)))
    assert [cell.preset.lr for cell in two.cells] == [0.01, 0.1] * 2
    assert len({cell.name for cell in two.cells}) == 4
    assert [cell.name for cell in one.cells] == [
        "vgg-dropout-0-batch-8-decay-0-sgd-seed-0",  # as it always was
        "vgg-dropout-0-batch-8-decay-0.001-sgd-seed-0",
    ]


def test_correlation_at_equal_training_loss(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    loss, errors, energies = rng.uniform(0.005, 0.01, 20), rng.normal(size=20), rng.normal(size=20)
    table = Table(["network", "dropout", "train_error", "train_loss", "test_error", "sigma", "delta_e", "stderr"])
    for k in range(20):
        test, energy = 0.5 - 40 * loss[k] + 0.01 * errors[k], 0.7 - 40 * loss[k] + 0.01 * energies[k]
        row = {"dropout": 0.0, "train_error": 0.0, "train_loss": loss[k], "sigma": 0.1, "stderr": 0.01}
        table.add(**row, network=f"n{k}", test_error=test, delta_e=energy)
    table.save(tmp_path / "networks.csv")
    rows = {row[0]: row[2] for row in FIG7.open(tmp_path).comparison().rows}
    assert rows["Pearson's r"].numbers["value"] > 0.9
    assert abs(rows["r at equal training loss (partial)"].numbers["value"]) < 0.5
    assert rows["Spearman's rank correlation"].numbers["low"] > 0.5


def test_nothing_computed_yet(tmp_path: Path) -> None:
    item = FIG7.open(tmp_path)
    assert item.charts() == []
    assert ["n", 14, 0] in item.comparison().rows
    assert len(item.work.cells) == 18  # at least as many as the paper's 14
    assert item.cost().startswith("18 trainings") and "each ends when its training loss is below 0.01" in item.cost()
    with pytest.raises(ValueError, match="realisations must be >= 2"):
        FIG7.open(tmp_path, realisations=1)
