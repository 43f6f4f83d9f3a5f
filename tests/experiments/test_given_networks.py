import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wideflat.experiments.fig7 import ITEM as FIG7
from wideflat.experiments.given_networks import hyper_parameter

_spec = importlib.util.spec_from_file_location("pgdl_folder", Path(__file__).parent / "pgdl" / "pgdl_folder.py")
assert _spec is not None and _spec.loader is not None
pgdl_folder = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pgdl_folder)


def test_runs_can_be_given(item: Any, tmp_path: Path) -> None:
    other = FIG7.open(tmp_path, models=item.work.trainings.folder, realisations=3)
    assert other.cells == []
    other.compute()
    ours, theirs = item.table("networks"), other.table("networks")
    assert ours is not None and theirs is not None
    assert sorted(theirs["delta_e"]) == pytest.approx(sorted(ours["delta_e"]))
    assert sorted(theirs["test_error"]) == pytest.approx(sorted(ours["test_error"]))
    with pytest.raises(FileNotFoundError, match="holds neither networks of PGDL"):
        FIG7.open(tmp_path, models=tmp_path / "profiles").compute()
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        FIG7.open(tmp_path, models=tmp_path / "nowhere").compute()


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
    item = FIG7.open(tmp_path / "out", models=tmp_path / "public", realisations=4)
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
    other = FIG7.open(tmp_path / "other", models=task, realisations=4)
    other.compute()
    again = other.table("networks")
    assert again is not None and again["test_error"][0] == pytest.approx(0.5)
    assert again["delta_e"].tolist() == table["delta_e"].tolist()
    for shard in task.glob("dataset_1/*/*"):
        shard.unlink()
    with pytest.raises(FileNotFoundError, match="has no training images"):
        FIG7.open(tmp_path / "third", models=task).compute()


def test_hyper_parameters_by_their_words() -> None:
    assert hyper_parameter({"l2_regularization": 0.1, "dropout": "none"}, "decay", "l2") == 0.1
    assert hyper_parameter({"dropout": "none"}, "dropout") is None
