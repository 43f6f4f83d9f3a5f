"""Writes a task of PGDL as it was published: Keras weights in HDF5, images in TFRecords, metadata in JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np

VGG: list[dict[str, Any]] = [
    {"layer_name": "Conv2D", "filters": 4.0, "kernel_size": 3, "padding": "same", "activation": "relu"},
    {"layer_name": "Conv2D", "filters": 5, "kernel_size": 3, "padding": "same", "activation": "relu"},
    {"layer_name": "MaxPooling2D", "pool_size": 2},
    {"layer_name": "Flatten"},
    {"layer_name": "Dense", "units": 6, "activation": "relu"},
    {"layer_name": "Dropout", "rate": 0.5},
    {"layer_name": "Dense", "units": 3},
]


def _load(name: str) -> ModuleType:
    """Another module of this folder (pytest imports each test on its own here)."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tfrecord = _load("test_tfrecord")

NAMES = {
    "Conv2D": ("conv2d", ["kernel", "bias"]),
    "Dense": ("dense", ["kernel", "bias"]),
    "BatchNormalization": ("batch_normalization", ["gamma", "beta", "moving_mean", "moving_variance"]),
}


def random_arrays(layers: list[dict[str, Any]], input_shape: list[int], rng: np.random.Generator) -> list[list]:
    """Arrays for every layer with weights, in Keras's shapes."""
    arrays, shape = [], list(input_shape)
    for layer in layers:
        kind = layer["layer_name"]
        if kind == "Conv2D":
            size, stride = layer["kernel_size"], layer.get("strides", 1)
            n = int(layer["filters"])
            fan = size * size * shape[2]
            arrays.append([rng.normal(size=(size, size, shape[2], n)) / np.sqrt(fan / 2), rng.normal(size=n) / 5])
            side = -(-shape[0] // stride) if layer.get("padding") == "same" else (shape[0] - size) // stride + 1
            shape = [side, side, n]
        elif kind == "Dense":
            n = int(layer["units"])
            fan = shape[0]
            arrays.append([rng.normal(size=(fan, n)) / np.sqrt(fan / 2), rng.normal(size=n) / 5])
            shape = [n]
        elif kind == "BatchNormalization":
            c = shape[-1]
            arrays.append([1 + rng.random(c), rng.normal(size=c), rng.normal(size=c), 0.5 + rng.random(c)])
        elif kind == "MaxPooling2D":
            shape = [-(-shape[0] // 2) if layer.get("padding") == "same" else shape[0] // 2] * 2 + [shape[2]]
        elif kind == "GlobalAveragePooling2D":
            shape = [shape[2]]
        elif kind == "Flatten":
            shape = [int(np.prod(shape))]
    return [[array.astype(np.float32) for array in part] for part in arrays]


def write_weights(path: Path, layers: list[dict[str, Any]], arrays: list[list[np.ndarray]]) -> None:
    """As ``model.save_weights`` of Keras 2 writes them: every layer has a group, also those without weights."""
    with h5py.File(path, "w") as file:
        names, left = [], list(arrays)
        for number, layer in enumerate(layers):
            kind = layer["layer_name"]
            name = f"{NAMES.get(kind, (kind.lower(),))[0]}_{number}"
            names.append(name.encode())
            group = file.create_group(name)
            weights = []
            if kind in NAMES:
                for weight, array in zip(NAMES[kind][1], left.pop(0), strict=True):
                    full = f"{name}/{weight}:0"
                    weights.append(full.encode())
                    group.create_dataset(full, data=array)
            group.attrs["weight_names"] = weights
        file.attrs["layer_names"] = names
        file.attrs["backend"] = b"tensorflow"
        file.attrs["keras_version"] = b"2.2.4-tf"


def write_task(
    folder: Path,
    networks: dict[int, tuple[list[dict[str, Any]], list[list[np.ndarray]]]],
    input_shape: list[int],
    metadata: dict[str, Any] | None = None,
    **splits: tuple[np.ndarray, np.ndarray],
) -> Path:
    """``folder/input_data/task1_v4`` with the networks by number, and the metadata where the reference data are."""
    task = folder / "input_data" / "task1_v4"
    for number, (layers, arrays) in networks.items():
        path = task / f"model_{number}"
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps({"model_config": layers, "input_shape": input_shape}))
        write_weights(path / "weights.hdf5", layers, arrays)
    for split, (inputs, targets) in splits.items():
        for shard in range(2):
            records = [
                tfrecord.example(inputs=tfrecord.tensor_proto(x), output=tfrecord.tensor_proto(np.int32(y)))
                for x, y in zip(inputs[shard::2], targets[shard::2], strict=True)
            ]
            tfrecord.write_records(task / "dataset_1" / split / f"shard_{shard + 1}.tfrecord", records)
    if metadata is not None:
        reference = folder / "reference_data" / "task1_v4"
        reference.mkdir(parents=True)
        (reference / "model_configs.json").write_text(json.dumps(metadata))
    return task


def numpy_forward(layers: list[dict[str, Any]], arrays: list[list[np.ndarray]], x: np.ndarray) -> np.ndarray:
    """Keras's evaluation of the layers on (n, height, width, channels), with loops."""
    left = list(arrays)
    for layer in layers:
        kind = layer["layer_name"]
        if kind == "Conv2D":
            kernel, bias = left.pop(0)
            x = _windows(x, kernel.shape[0], layer.get("strides", 1), layer.get("padding") == "same", 0.0)
            x = np.einsum("nijhwc,hwco->nijo", x, kernel) + bias
        elif kind == "MaxPooling2D":
            x = _windows(x, 2, 2, layer.get("padding") == "same", -np.inf).max((3, 4))
        elif kind == "BatchNormalization":
            gamma, beta, mean, variance = left.pop(0)
            x = gamma * (x - mean) / np.sqrt(variance + layer.get("epsilon", 1e-3)) + beta
        elif kind == "GlobalAveragePooling2D":
            x = x.mean((1, 2))
        elif kind == "Flatten":
            x = x.reshape(len(x), -1)
        elif kind == "Dense":
            kernel, bias = left.pop(0)
            x = x @ kernel + bias
        elif kind == "Activation":
            x = _activate(x, layer["activation"])
            continue
        x = _activate(x, layer.get("activation"))
    return x


def _windows(x: np.ndarray, size: int, stride: int, same: bool, value: float) -> np.ndarray:
    n, height, _, channels = x.shape
    if same:
        out = -(-height // stride)
        total = max((out - 1) * stride + size - height, 0)
        before = (total // 2, total - total // 2)
        x = np.pad(x, ((0, 0), before, before, (0, 0)), constant_values=value)
    else:
        out = (height - size) // stride + 1
    result = np.empty((n, out, out, size, size, channels), x.dtype)
    for i in range(out):
        for j in range(out):
            result[:, i, j] = x[:, i * stride : i * stride + size, j * stride : j * stride + size]
    return result


def _activate(x: np.ndarray, activation: str | None) -> np.ndarray:
    return {"relu": lambda: np.maximum(x, 0), "tanh": lambda: np.tanh(x)}.get(activation or "", lambda: x)()
