"""The published networks of the PGDL competition (Predicting Generalization in Deep Learning, NeurIPS 2020).

::

    public_data/
      input_data/TASK/
        model_N/config.json         {"model_config": [{"layer_name": "Conv2D", ...}, ...], "input_shape": [32, 32, 3]}
        model_N/weights.hdf5        weights as Keras saves them
        dataset_1/train/shard_*.tfrecord, dataset_1/test/...
      reference_data/TASK/
        model_configs.json          {"N": {"hparams": {name: {"current_value": ...}}, "metrics": {"test_acc": ...}}}

Networks are sequences of Keras layers, images lie in memory as (height, width, channels). Here they become torch
modules on (channels, height, width); a flattened image keeps the order of Keras, so dense weights need no reordering.
They are evaluated on the images that were published with them, which are preprocessed as in their training.

The data (public_data.zip, 8.8 GB) and their licence: google-research/google-research, folder ``pgdl``.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.experiments.tfrecord import read_examples

__all__ = ["PgdlModel", "find_models", "keras_sequential", "load_images", "of_one_architecture", "task_folder"]

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "softplus": nn.Softplus,
    "swish": nn.SiLU,
    "softmax": lambda: nn.Softmax(dim=1),
}

#: Layers that do nothing when a network is evaluated.
_IDLE = ("Dropout", "SpatialDropout2D", "GaussianDropout", "GaussianNoise", "AlphaDropout", "ActivityRegularization")

#: Arguments of layers that matter in training only.
_TRAINING_ONLY = ("name", "trainable", "dtype", "input_shape", "batch_input_shape", "build_config")


# ------------------------------------------------------------------------------------------------ finding the models


@dataclass(frozen=True)
class PgdlModel:
    """One network of a task.

    Attributes:
        path: Its folder.
        layers: Its Keras layers, as ``config.json`` has them.
        input_shape: (height, width, channels), or (features,).
        hparams: The hyper-parameters it was trained with, by name, where ``model_configs.json`` is there.
        metrics: ``train_acc``, ``test_acc`` and so on, from the same file.
    """

    path: Path
    layers: list[dict[str, Any]]
    input_shape: tuple[int, ...]
    hparams: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    def architecture(self) -> str:
        """Its layers in words, without those that differ between networks of one architecture (dropout).

        Example:
            >>> layers = [{"layer_name": "Conv2D", "filters": 512}, {"layer_name": "Dropout"},
            ...           {"layer_name": "Flatten"}, {"layer_name": "Dense", "units": 10}]
            >>> PgdlModel(Path("model_1"), layers, (32, 32, 3)).architecture
            'Conv2D 512, Flatten, Dense 10'
        """
        words = []
        for layer in self.layers:
            if layer["layer_name"] not in _IDLE:
                size = layer.get("filters", layer.get("units"))
                words.append(layer["layer_name"] + ("" if size is None else f" {int(size)}"))
        return ", ".join(words)

    @property
    def is_the_paper_s(self) -> bool:
        """Whether it has "3 convolutional blocks of width 512 and 1 fully connected layer of width 128" (App. B.3)."""
        filters = [int(layer["filters"]) for layer in self.layers if layer["layer_name"] == "Conv2D"]
        units = [int(layer["units"]) for layer in self.layers if layer["layer_name"] == "Dense"]
        return len(filters) == 6 and filters[-1] == 512 and units[:-1] == [128]

    def load(self) -> nn.Sequential:
        """The network with its trained weights, in eval mode."""
        model, weighted = keras_sequential(self.layers, self.input_shape)
        load_keras_weights(self.path / "weights.hdf5", weighted)
        return model.eval()


def task_folder(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the one task in ``folder`` (itself, or one or two levels below); None if there is none.

    Raises:
        ValueError: If there are several tasks.
    """
    folder = Path(folder)
    for pattern in ("model_*/config.json", "*/model_*/config.json", "input_data/*/model_*/config.json"):
        tasks = sorted({path.parent.parent for path in folder.glob(pattern) if _is_pgdl(path)})
        if len(tasks) > 1:
            names = ", ".join(str(task) for task in tasks)
            raise ValueError(f"{folder} holds several tasks of PGDL: give the folder of one of them ({names})")
        if tasks:
            return tasks[0]
    return None


def find_models(task: str | os.PathLike[str]) -> list[PgdlModel]:
    """The networks in the folder of a task, with what is known of their training.

    Args:
        task: The folder with ``model_1``, ``model_2``, ... in it. ``model_configs.json`` is looked for in it and in
            ``../../reference_data/TASK``.
    """
    task = Path(task)
    known: dict[str, Any] = {}
    for path in (
        task / "model_configs.json",
        task.resolve().parent.parent / "reference_data" / task.name / "model_configs.json",
    ):
        if path.exists():
            known = _read(path)
            break
    models = []
    for path in sorted(task.glob("model_*/config.json"), key=lambda path: _number(path.parent.name)):
        config = _read(path)
        if not isinstance(config.get("model_config"), list) or not isinstance(config.get("input_shape"), list):
            raise ValueError(f"{path} does not describe a network of PGDL: it has no model_config and input_shape")
        about = known.get(path.parent.name.removeprefix("model_"), known.get(path.parent.name, {}))
        models.append(
            PgdlModel(
                path.parent,
                [_whole_numbers(layer) for layer in config["model_config"]],
                tuple(int(size) for size in config["input_shape"]),
                {name: value.get("current_value") for name, value in about.get("hparams", {}).items()},
                dict(about.get("metrics", {})),
            )
        )
    if not models:
        raise FileNotFoundError(f"{task} holds no networks of PGDL (model_*/config.json)")
    return models


def of_one_architecture(models: Sequence[PgdlModel]) -> list[PgdlModel]:
    """Those of the paper's architecture, or, where there are none, those of the most frequent one.

    Flatness is comparable between networks of one architecture only (App. B.3).
    """
    chosen = [model for model in models if model.is_the_paper_s]
    if not chosen:
        counts = Counter(model.architecture for model in models)
        most = counts.most_common(1)[0][0]
        chosen = [model for model in models if model.architecture == most]
    first = chosen[0].architecture
    return [model for model in chosen if model.architecture == first]


def load_images(task: str | os.PathLike[str], split: str, limit: int | None = None) -> tuple[Tensor, Tensor] | None:
    """Inputs (n, C, H, W), channels last in memory, and targets of a part of the published data; None without files.

    Args:
        task: The folder of a task.
        split: ``"train"`` or ``"test"``.
        limit: Take only the first so many.
    """
    shards = sorted(Path(task).glob(f"dataset_*/{split}/shard_*.tfrecord"), key=lambda path: _number(path.stem))
    inputs: list[np.ndarray] = []
    targets: list[int] = []
    for shard in shards:
        for record in read_examples(shard):
            if not {"inputs", "output"} <= record.keys():
                raise ValueError(f"{shard} has records of {sorted(record)}; expected inputs and output")
            inputs.append(record["inputs"].astype(np.float32, copy=False))
            output = record["output"]
            targets.append(int(output.argmax()) if output.size > 1 else int(output.reshape(())))
            if limit is not None and len(inputs) == limit:
                break
        if limit is not None and len(inputs) == limit:
            break
    if not inputs:
        return None
    x = torch.from_numpy(np.stack(inputs))
    return (x.permute(0, 3, 1, 2) if x.dim() == 4 else x), torch.tensor(targets)


def _is_pgdl(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model_config" in content


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a whole JSON document: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _number(name: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, name))
    return int(digits or 0), name


def _whole_numbers(layer: dict[str, Any]) -> dict[str, Any]:
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in layer.items()
    }


# ------------------------------------------------------------------------------------------------- from Keras to torch


class KerasFlatten(nn.Module):
    """Images (n, C, H, W) as rows in Keras's order: height, width, channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Rows of all values."""
        return (x.permute(0, 2, 3, 1) if x.dim() == 4 else x).flatten(1)


class SamePadding(nn.Module):
    """Pads as TensorFlow's ``padding="same"`` does: to ceil(size / stride) outputs, the odd pixel at the end."""

    def __init__(self, kernel: tuple[int, int], stride: tuple[int, int], value: float = 0.0) -> None:
        super().__init__()
        self.kernel, self.stride, self.value = kernel, stride, value

    def forward(self, x: Tensor) -> Tensor:
        """The padded images."""
        padding: list[int] = []
        for size, kernel, stride in zip(x.shape[:1:-1], self.kernel[::-1], self.stride[::-1], strict=True):
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            padding += [total // 2, total - total // 2]
        return F.pad(x, padding, value=self.value)


@dataclass
class Weighted:
    """A layer with weights, and how they are set from Keras's arrays in Keras's order."""

    name: str
    shapes: list[tuple[int, ...]]
    assign: Callable[[list[np.ndarray]], None]


def keras_sequential(
    layers: Sequence[dict[str, Any]], input_shape: Sequence[int]
) -> tuple[nn.Sequential, list[Weighted]]:
    """A network of Keras layers as torch modules, and its layers with weights in their order.

    Args:
        layers: Dictionaries with ``layer_name`` and the arguments of the Keras layer.
        input_shape: (height, width, channels), or (features,).

    Raises:
        ValueError: For a layer or an argument whose meaning here is not known.

    Example:
        >>> layers = [{"layer_name": "Conv2D", "filters": 4, "kernel_size": 3, "padding": "same", "activation": "relu"},
        ...           {"layer_name": "Flatten"}, {"layer_name": "Dense", "units": 2}]
        >>> model, weighted = keras_sequential(layers, (8, 8, 3))
        >>> model(torch.zeros(1, 3, 8, 8)).shape, weighted[1].shapes
        (torch.Size([1, 2]), [(256, 2), (2,)])
    """
    modules: list[nn.Module] = []
    weighted: list[Weighted] = []
    x = torch.zeros(1, *((input_shape[2], *input_shape[:2]) if len(input_shape) == 3 else input_shape))
    for number, layer in enumerate(layers):
        arguments = _Arguments(layer, f"layer {number + 1} ({layer.get('layer_name')})")
        new = _convert(arguments, x, weighted)
        arguments.nothing_left()
        with torch.no_grad():
            x = nn.Sequential(*new).eval()(x)
        modules += new
    return nn.Sequential(*modules), weighted


class _Arguments:
    """The arguments of a layer, taken one by one, so that none is overlooked."""

    def __init__(self, layer: dict[str, Any], where: str) -> None:
        self.left = {
            name: value
            for name, value in layer.items()
            if name not in _TRAINING_ONLY and not name.endswith(("_initializer", "_regularizer", "_constraint"))
        }
        self.kind = self.left.pop("layer_name", None)
        self.where = where

    def take(self, name: str, default: Any = None) -> Any:
        return self.left.pop(name, default)

    def pair(self, name: str, default: Any = None) -> tuple[int, int]:
        value = self.take(name, default)
        if value is None:
            raise ValueError(f"{self.where} has no {name}")
        height, width = (value, value) if isinstance(value, (int, float)) else value
        return int(height), int(width)

    def expect(self, name: str, *allowed: Any) -> Any:
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise ValueError(f"{self.where}: {name} must be one of {allowed}, got {value!r}")
        return value

    def activation(self, name: str = "activation") -> list[nn.Module]:
        value = self.take(name) or "linear"
        if value not in _ACTIVATIONS:
            raise ValueError(f"{self.where}: activation must be one of {', '.join(_ACTIVATIONS)}, got {value!r}")
        return [] if value == "linear" else [_ACTIVATIONS[value]()]

    def nothing_left(self) -> None:
        if self.left:
            raise ValueError(f"{self.where}: the arguments {sorted(self.left)} are not understood")


def _convert(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    """The modules of one layer, for inputs like ``x``."""
    kind = arguments.kind
    if kind == "Conv2D":
        return _convolution(arguments, x, weighted)
    if kind == "Dense":
        if x.dim() != 2:
            raise ValueError(f"{arguments.where}: expects rows, gets images; a Flatten is missing before it")
        dense = nn.Linear(x.shape[1], int(arguments.take("units")), bias=bool(arguments.take("use_bias", True)))
        weighted.append(
            _weights(arguments.where, dense, lambda kernel: kernel.T, (dense.in_features, dense.out_features))
        )
        return [dense, *arguments.activation()]
    if kind == "BatchNormalization":
        return [_batch_norm(arguments, x, weighted)]
    if kind in ("MaxPooling2D", "MaxPool2D", "AveragePooling2D", "AvgPool2D"):
        size = arguments.pair("pool_size", 2)
        stride = arguments.pair("strides", None) if arguments.left.get("strides") is not None else size
        arguments.take("strides")
        arguments.expect("data_format", "channels_last", None)
        same = arguments.expect("padding", "valid", "same") == "same"
        if kind.startswith("Max"):
            pool: nn.Module = nn.MaxPool2d(size, stride)
            return [SamePadding(size, stride, -math.inf), pool] if same else [pool]
        if same and any(n % s or k != s for n, k, s in zip(x.shape[2:], size, stride, strict=True)):
            raise ValueError(f"{arguments.where}: average pooling over a padded border is not understood")
        return [nn.AvgPool2d(size, stride)]
    if kind in ("GlobalAveragePooling2D", "GlobalAvgPool2D"):
        arguments.expect("data_format", "channels_last", None)
        return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if kind in ("GlobalMaxPooling2D", "GlobalMaxPool2D"):
        arguments.expect("data_format", "channels_last", None)
        return [nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    if kind == "Flatten":
        arguments.expect("data_format", "channels_last", None)
        return [KerasFlatten()]
    if kind == "Activation":
        return arguments.activation()
    if kind == "ReLU":
        arguments.expect("max_value", None)
        arguments.expect("negative_slope", 0)
        arguments.expect("threshold", 0)
        return [nn.ReLU()]
    if kind == "InputLayer":
        return []
    if kind in _IDLE:
        rate = arguments.take("rate", 0.0)
        arguments.left.clear()
        return [nn.Dropout(float(rate))] if kind == "Dropout" else [nn.Identity()]
    known = "Conv2D, Dense, BatchNormalization, pooling, Flatten, Activation, ReLU and dropout"
    raise ValueError(f"{arguments.where}: this kind of layer is not understood; {known} are")


def _convolution(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    kernel, stride = arguments.pair("kernel_size"), arguments.pair("strides", 1)
    arguments.expect("data_format", "channels_last", None)
    arguments.expect("dilation_rate", 1, [1, 1])
    arguments.expect("groups", 1)
    same = arguments.expect("padding", "valid", "same") == "same"
    odd = same and stride == (1, 1) and all(size % 2 for size in kernel)
    convolution = nn.Conv2d(
        x.shape[1],
        int(arguments.take("filters")),
        kernel,
        stride,
        padding=tuple(size // 2 for size in kernel) if odd else 0,  # type: ignore[arg-type] # two of them
        bias=bool(arguments.take("use_bias", True)),
    )
    shape = (*kernel, convolution.in_channels, convolution.out_channels)
    weighted.append(_weights(arguments.where, convolution, lambda array: array.transpose(3, 2, 0, 1), shape))
    padding = [SamePadding(kernel, stride)] if same and not odd else []
    return [*padding, convolution, *arguments.activation()]


def _weights(
    where: str, layer: nn.Conv2d | nn.Linear, to_torch: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...]
) -> Weighted:
    def assign(arrays: list[np.ndarray]) -> None:
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(np.ascontiguousarray(to_torch(arrays[0]))))
            if layer.bias is not None:
                layer.bias.copy_(torch.from_numpy(arrays[1]))

    return Weighted(where, [shape] if layer.bias is None else [shape, (shape[-1],)], assign)


def _batch_norm(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> nn.Module:
    arguments.expect("axis", -1, x.dim() - 1, [-1], [x.dim() - 1])
    arguments.expect("renorm", False)
    arguments.take("momentum")
    arguments.take("fused")
    scale, center = bool(arguments.take("scale", True)), bool(arguments.take("center", True))
    kind = nn.BatchNorm2d if x.dim() == 4 else nn.BatchNorm1d
    norm = kind(x.shape[1], eps=float(arguments.take("epsilon", 1e-3)))
    if not scale:  # no parameter at all, so that nothing is perturbed that Keras does not have
        norm.register_parameter("weight", None)
    if not center:
        norm.register_parameter("bias", None)
    order = [norm.weight] * scale + [norm.bias] * center + [norm.running_mean, norm.running_var]

    def assign(arrays: list[np.ndarray]) -> None:
        with torch.no_grad():
            for tensor, array in zip(order, arrays, strict=True):
                assert tensor is not None
                tensor.copy_(torch.from_numpy(array))

    weighted.append(Weighted(arguments.where, [(x.shape[1],)] * len(order), assign))
    return norm


# ---------------------------------------------------------------------------------------------------- Keras's weights


def load_keras_weights(path: str | os.PathLike[str], weighted: Sequence[Weighted]) -> None:
    """Set the weights of layers from a file of ``save_weights`` of Keras, in the order of the layers.

    The file has the attribute ``layer_names``; the group of a layer has ``weight_names``, the names of its arrays in
    the order of the layer. A list that is too long for an attribute is cut into ``layer_names0``, ``layer_names1``, ...
    """
    try:
        import h5py
    except ImportError:
        raise ModuleNotFoundError("reading networks of PGDL needs h5py: pip install 'wideflat[pgdl]'") from None
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: a network of PGDL is a folder with config.json and weights.hdf5")
    try:
        with h5py.File(path, "r") as file:
            root = file.get("model_weights", file)
            arrays = []
            for group in (root[name] for name in _names(root, "layer_names")):
                if names := _names(group, "weight_names"):
                    arrays.append([np.asarray(group[name], dtype=np.float32) for name in names])
    except (OSError, KeyError) as error:
        raise ValueError(f"{path} is not a whole file of Keras weights: {error}") from None
    if len(arrays) != len(weighted):
        raise ValueError(
            f"{path} has weights of {len(arrays)} layers; config.json describes {len(weighted)} with weights"
        )
    for layer, values in zip(weighted, arrays, strict=True):
        shapes = [array.shape for array in values]
        if shapes != layer.shapes:
            raise ValueError(f"{path}: {layer.name} expects arrays of shapes {layer.shapes}, the file has {shapes}")
        layer.assign(values)


def _names(group: Any, attribute: str) -> list[str]:
    if attribute in group.attrs:
        values = list(group.attrs[attribute])
    else:
        values, part = [], 0
        while f"{attribute}{part}" in group.attrs:
            values += list(group.attrs[f"{attribute}{part}"])
            part += 1
        if not part:
            raise KeyError(f"no attribute {attribute}")
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values]
