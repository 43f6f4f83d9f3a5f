import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from wideflat.experiments.pgdl import find_models, load_images, of_one_architecture, task_folder
from wideflat.experiments.pgdl.keras import keras_sequential, load_keras_weights

_spec = importlib.util.spec_from_file_location("pgdl_folder", Path(__file__).with_name("pgdl_folder.py"))
assert _spec is not None and _spec.loader is not None
pgdl_folder = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pgdl_folder)

VGG: list[dict[str, Any]] = [
    {"layer_name": "Conv2D", "filters": 4.0, "kernel_size": 3, "padding": "same", "activation": "relu"},
    {"layer_name": "Conv2D", "filters": 5, "kernel_size": 3, "padding": "same", "activation": "relu"},
    {"layer_name": "MaxPooling2D", "pool_size": 2},
    {"layer_name": "Flatten"},
    {"layer_name": "Dense", "units": 6, "activation": "relu"},
    {"layer_name": "Dropout", "rate": 0.5},
    {"layer_name": "Dense", "units": 3},
]
STRIDES: list[dict[str, Any]] = [
    {"layer_name": "Conv2D", "filters": 4, "kernel_size": 3, "strides": 2, "padding": "same", "use_bias": True},
    {"layer_name": "BatchNormalization", "epsilon": 0.01},
    {"layer_name": "Activation", "activation": "relu"},
    {"layer_name": "Conv2D", "filters": 6, "kernel_size": 2, "padding": "same", "activation": "tanh"},
    {"layer_name": "MaxPooling2D", "padding": "same"},
    {"layer_name": "Conv2D", "filters": 3, "kernel_size": 2, "kernel_regularizer": {"l2": 0.001}},
    {"layer_name": "GlobalAveragePooling2D"},
]


@pytest.mark.parametrize("layers, side", [(VGG, 8), (VGG, 7), (STRIDES, 8), (STRIDES, 9)])
def test_networks_answer_as_a_numpy_forward_does(tmp_path: Path, layers: list[dict[str, Any]], side: int) -> None:
    rng = np.random.default_rng(side)
    arrays = pgdl_folder.random_arrays(layers, [side, side, 3], rng)
    x = rng.normal(size=(5, side, side, 3)).astype(np.float32)
    task = pgdl_folder.write_task(tmp_path, {1: (layers, arrays)}, [side, side, 3], train=(x, np.arange(5)))
    (model,) = find_models(task)
    loaded = load_images(task, "train")
    assert loaded is not None
    inputs, targets = loaded
    order = torch.argsort(targets)
    with torch.no_grad():
        ours = model.load()(inputs[order]).numpy()
    theirs = pgdl_folder.numpy_forward(layers, arrays, x.astype(np.float64))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert theirs.std() > 0.1


def test_batch_norm_without_scale_has_no_such_parameter(tmp_path: Path) -> None:
    layers = [{"layer_name": "BatchNormalization", "scale": False}]
    model, (weighted,) = keras_sequential(layers, (4, 4, 2))
    assert [name for name, _ in model.named_parameters()] == ["0.bias"]
    assert weighted.shapes == [(2,)] * 3
    weighted.assign([np.array([1, 2], np.float32), np.array([3, 4], np.float32), np.array([1, 4], np.float32)])
    x = torch.randn(2, 2, 4, 4)
    mean, std = torch.tensor([3.0, 4]).view(2, 1, 1), torch.tensor([1.001, 4.001]).sqrt().view(2, 1, 1)
    torch.testing.assert_close(model.eval()(x), (x - mean) / std + torch.tensor([1.0, 2]).view(2, 1, 1))


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


@pytest.mark.parametrize(
    "layer, words",
    [
        ({"layer_name": "LSTM", "units": 3}, "not understood; Conv2D, Dense"),
        ({"layer_name": "Conv2D", "filters": 3, "kernel_size": 3, "wings": 2}, r"\['wings'\] are not understood"),
        ({"layer_name": "Conv2D", "filters": 3, "kernel_size": 3, "padding": "causal"}, "padding must be one of"),
        ({"layer_name": "Conv2D", "filters": 3}, "has no kernel_size"),
        ({"layer_name": "Dense", "units": 3}, "a Flatten is missing"),
        ({"layer_name": "Activation", "activation": "mish"}, "activation must be one of"),
        ({"layer_name": "AveragePooling2D", "pool_size": 3, "padding": "same"}, "padded border"),
    ],
)
def test_layers_of_unknown_meaning_are_refused(layer: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        keras_sequential([layer], (8, 8, 3))


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


def test_long_lists_of_names_are_read_in_their_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = pgdl_folder.random_arrays(VGG, [8, 8, 3], rng)
    pgdl_folder.write_weights(tmp_path / "w.hdf5", VGG, arrays)
    with h5py.File(tmp_path / "w.hdf5", "a") as file:
        names = file.attrs["layer_names"]
        file.attrs["layer_names0"], file.attrs["layer_names1"] = names[:3], names[3:]
        del file.attrs["layer_names"]
    model, weighted = keras_sequential(VGG, (8, 8, 3))
    load_keras_weights(tmp_path / "w.hdf5", weighted)
    np.testing.assert_array_equal(model[0].weight.detach().numpy().transpose(2, 3, 1, 0), arrays[0][0])
