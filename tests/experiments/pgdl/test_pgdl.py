import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pgdl_folder
import pytest
from pgdl_folder import VGG

from wideflat.experiments.pgdl import find_models, load_images, of_one_architecture, task_folder
from wideflat.experiments.pgdl.keras import keras_sequential, load_keras_weights


def test_a_task_is_found_and_described(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wide = [dict(layer) for layer in VGG]
    wide[1]["filters"] = 7
    networks = {
        number: (layers, pgdl_folder.random_arrays(layers, [8, 8, 3], rng))
        for number, layers in ((2, VGG), (10, VGG), (3, wide))
    }
    metadata = {
        "2": {
            "hparams": {"dropout": {"current_value": 0.5, "possible_values": [0, 0.5]}},
            "metrics": {"test_acc": 0.8, "train_acc": 1.0},
        }
    }
    images = rng.normal(size=(7, 8, 8, 3)).astype(np.float32), np.arange(7) % 3
    task = pgdl_folder.write_task(tmp_path, networks, [8, 8, 3], metadata, train=images)
    assert task_folder(tmp_path) == task_folder(tmp_path / "input_data") == task_folder(task) == task
    assert task_folder(tmp_path / "reference_data") is None
    models = find_models(task)
    assert [model.name for model in models] == ["model_2", "model_3", "model_10"]
    assert models[0].hparams == {"dropout": 0.5} and models[0].metrics["test_acc"] == 0.8
    assert models[1].hparams == {} and models[1].metrics == {}
    assert models[0].architecture == "Conv2D 4, Conv2D 5, MaxPooling2D, Flatten, Dense 6, Dense 3"
    assert [model.name for model in of_one_architecture(models)] == ["model_2", "model_10"]
    assert load_images(task, "test") is None
    limited = load_images(task, "train", limit=3)
    assert limited is not None and limited[0].shape == (3, 3, 8, 8)
    shutil.copytree(task, task.parent / "task2_v1")
    with pytest.raises(ValueError, match="several tasks"):
        task_folder(tmp_path)


def test_the_paper_s_architecture_is_preferred(tmp_path: Path) -> None:
    from wideflat.experiments.pgdl import PgdlModel

    def vgg(blocks: int, filters: int, dense: int) -> PgdlModel:
        layers: list[dict[str, Any]] = [{"layer_name": "Conv2D", "filters": filters}] * (2 * blocks)
        layers += [{"layer_name": "Dense", "units": 128}] * dense + [{"layer_name": "Dense", "units": 10}]
        return PgdlModel(tmp_path, layers, (32, 32, 3))

    models = [vgg(1, 512, 1), vgg(1, 512, 1), vgg(3, 512, 1), vgg(3, 256, 1), vgg(3, 512, 2)]
    assert of_one_architecture(models) == [models[2]]
    assert of_one_architecture(models[:2] + models[3:]) == models[:2]


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    task = pgdl_folder.write_task(tmp_path, {1: (VGG, pgdl_folder.random_arrays(VGG, [8, 8, 3], rng))}, [8, 8, 3], None)
    _, weighted = keras_sequential(VGG, (10, 10, 3))
    path = task / "model_1" / "weights.hdf5"
    with pytest.raises(ValueError, match=r"layer 5 \(Dense\) expects arrays of shapes \[\(125, 6\)"):
        load_keras_weights(path, weighted)
    with pytest.raises(ValueError, match=r"weights of 4 layers; config\.json describes 3"):
        load_keras_weights(path, weighted[:3])
    with h5py.File(path, "a") as file:
        del file.attrs["layer_names"]
    with pytest.raises(ValueError, match="no attribute layer_names"):
        load_keras_weights(path, weighted)
    path.write_bytes(b"not a file of HDF5")
    with pytest.raises(ValueError, match="not a whole file of Keras weights"):
        load_keras_weights(path, weighted)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"weights.hdf5 is missing"):
        find_models(task)[0].load()
    (task / "model_1" / "config.json").write_text(json.dumps({"model_config": 3}))
    with pytest.raises(ValueError, match="no model_config and input_shape"):
        find_models(task)
    (task / "model_1" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a whole JSON document"):
        find_models(task)
    (task / "model_1" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="holds no networks"):
        find_models(task)
