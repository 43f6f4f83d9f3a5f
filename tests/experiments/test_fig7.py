import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wideflat.experiments import fig7, profiles, trainings
from wideflat.experiments.fig7 import Fig7
from wideflat.experiments.table import Table
from wideflat.training.runs import Run

_spec = importlib.util.spec_from_file_location("pgdl_folder", Path(__file__).with_name("pgdl_folder.py"))
assert _spec is not None and _spec.loader is not None
pgdl_folder = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pgdl_folder)

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
def item(tmp_path_factory: pytest.TempPathFactory) -> Fig7:
    item = Fig7(tmp_path_factory.mktemp("fig7"), quick=True, **SMALL)
    item.compute()
    return item


def test_quick_path_from_nothing_to_report(item: Fig7) -> None:
    table = item.table("networks")
    assert table is not None
    assert table["dropout"].tolist() == [0, 0.5] and table["batch_size"].tolist() == [10, 10]
    for row in table:
        run = Run.open(item.runs / row["network"])
        result = run.result()
        assert result is not None and row["test_error"] == result["test_error"] and row["epochs"] == 2
        profile = profiles.LocalEnergy.load(item.folder / "profiles" / f"{row['network']}.json")
        assert profile.samples is not None and profile.samples.shape == (3, 1)
        assert row["delta_e"] == pytest.approx(profile.samples.mean())
        assert row["spread"] == pytest.approx(profile.samples.std(ddof=1))
        assert profile.conventions["noise"] == "pass" and not profile.conventions["augmented"]
        assert run.config["data"]["train"] == 40 and run.config["data"]["test"] == 677
    text = item.write_report().read_text()
    assert "[QUICK]" in text and "at most 2 epochs on 40 Dress-vs-Coat images" in text


def test_nothing_is_computed_twice(item: Fig7, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "train", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(profiles, "local_energy", lambda *a, **k: pytest.fail("measured again"))
    before = (item.folder / "networks.csv").read_text()
    item.compute()
    assert (item.folder / "networks.csv").read_text() == before


def test_networks_of_other_data_in_the_folder_are_refused(item: Fig7) -> None:
    with pytest.raises(ValueError, match=r"holds another experiment: data\.train is 40 there and 30 here"):
        Fig7(item.folder, quick=True, **{**SMALL, "limit_data": 30}).compute()


def test_runs_can_be_given(item: Fig7, tmp_path: Path) -> None:
    other = Fig7(tmp_path, models=item.runs, realisations=3)
    assert other.cells() == []
    other.compute()
    ours, theirs = item.table("networks"), other.table("networks")
    assert ours is not None and theirs is not None
    assert sorted(theirs["delta_e"]) == pytest.approx(sorted(ours["delta_e"]))
    assert sorted(theirs["test_error"]) == pytest.approx(sorted(ours["test_error"]))
    with pytest.raises(FileNotFoundError, match="holds neither networks of PGDL"):
        Fig7(tmp_path, models=tmp_path / "profiles").compute()
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        Fig7(tmp_path, models=tmp_path / "nowhere").compute()


def test_training_ends_when_the_network_fits(tmp_path: Path) -> None:
    item = Fig7(tmp_path, quick=True, **{**SMALL, "dropouts": (0.0,), "epochs": 5}, target_loss=0.5)
    item.compute()
    table = item.table("networks")
    assert table is not None
    assert table["epochs"][0] < 5 and table["train_loss"][0] <= 0.5
    rows = Run.open(item.runs / table["network"][0]).metrics()
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
    item = Fig7(tmp_path)
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


def test_nothing_computed_yet(tmp_path: Path) -> None:
    item = Fig7(tmp_path)
    assert item.charts() == []
    assert ["n", 14, 0] in item.comparison().rows
    assert len(item.cells()) == 18  # at least as many as the paper's 14
    assert item.cost().startswith("18 trainings") and "each ends when its training loss is below 0.01" in item.cost()
    with pytest.raises(ValueError, match="realisations must be >= 2"):
        Fig7(tmp_path, realisations=1)


def test_networks_of_pgdl(tmp_path: Path) -> None:
    layers: list[dict[str, Any]] = [
        {"layer_name": "Conv2D", "filters": 4, "kernel_size": 3, "padding": "same", "activation": "relu"},
        {"layer_name": "MaxPooling2D"},
        {"layer_name": "Flatten"},
        {"layer_name": "Dense", "units": 3},
    ]
    rng = np.random.default_rng(0)
    networks = {k: (layers, pgdl_folder.random_arrays(layers, [8, 8, 3], rng)) for k in (1, 2, 3)}
    x = rng.normal(size=(30, 8, 8, 3)).astype(np.float32)
    # Every network is right on the first 25 images, wrong on the others, by its own answers.
    y = pgdl_folder.numpy_forward(*networks[1], x.astype(np.float64)).argmax(1)
    y[25:] = (y[25:] + 1) % 3
    metadata = {
        str(k): {
            "hparams": {
                "dropout_probability": {"current_value": 0.25 * k, "possible_values": []},
                "batch_size": {"current_value": 32, "possible_values": []},
                "weight_decay": {"current_value": 0.001, "possible_values": []},
            },
            "metrics": {"test_acc": 0.9 - 0.1 * k, "train_acc": 1.0},
        }
        for k in networks
    }
    task = pgdl_folder.write_task(
        tmp_path / "public", networks, [8, 8, 3], metadata, train=(x, y), test=(x[20:], y[20:])
    )
    item = Fig7(tmp_path / "out", models=tmp_path / "public", realisations=4)
    item.compute()
    table = item.table("networks")
    assert table is not None
    assert table["network"].tolist() == ["model_1", "model_2", "model_3"]
    assert table["test_error"].tolist() == pytest.approx([0.2, 0.3, 0.4])
    assert table["dropout"].tolist() == [0.25, 0.5, 0.75]
    assert table["batch_size"].tolist() == [32] * 3 and table["weight_decay"].tolist() == [0.001] * 3
    assert table["train_error"][0] == pytest.approx(5 / 30)
    assert item.write_report().exists()
    # Without the metadata the errors come from the published test images.
    (tmp_path / "public" / "reference_data" / "task1_v4" / "model_configs.json").unlink()
    other = Fig7(tmp_path / "other", models=task, realisations=4)
    other.compute()
    again = other.table("networks")
    assert again is not None and again["test_error"][0] == pytest.approx(0.5)
    assert again["delta_e"].tolist() == table["delta_e"].tolist()
    for shard in task.glob("dataset_1/*/*"):
        shard.unlink()
    with pytest.raises(FileNotFoundError, match="has no training images"):
        Fig7(tmp_path / "third", models=task).compute()


def test_hyper_parameters_by_their_words() -> None:
    assert fig7._number({"l2_regularization": 0.1, "dropout": "none"}, "decay", "l2") == 0.1
    assert fig7._number({"dropout": "none"}, "dropout") is None
