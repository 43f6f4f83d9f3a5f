"""Networks of Keras as ours: answers as a NumPy forward has them, layers of unknown meaning refused."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pgdl_folder
import pytest
import torch
from pgdl_folder import VGG

from wideflat.experiments.pgdl import find_models, load_images
from wideflat.experiments.pgdl.keras import keras_sequential, load_keras_weights

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
