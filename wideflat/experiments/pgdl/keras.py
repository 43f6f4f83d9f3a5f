"""Networks of Keras layers as torch modules, with the weights that Keras saved."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.checks import shown, whole

__all__ = ["IDLE", "KerasFlatten", "SamePadding", "Weighted", "keras_sequential", "load_keras_weights"]

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
IDLE = ("Dropout", "SpatialDropout2D", "GaussianDropout", "GaussianNoise", "AlphaDropout", "ActivityRegularization")

#: Larger layers and images are never meant; their weights would fill the memory.
MOST_UNITS, MOST_PIXELS, MOST_WEIGHTS = 10**5, 4096, 10**8
#: The same of windows and strides, and of the numbers between two layers for one image.
MOST_WINDOW, MOST_VALUES = 128, 10**7

#: Arguments of layers that matter in training only.
_TRAINING_ONLY = ("name", "trainable", "dtype", "input_shape", "batch_input_shape", "build_config")


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


#: What makes modules of the arguments of a layer, for inputs like a tensor, and notes the weights of the layer.
Converter = Callable[["_Arguments", Tensor, list[Weighted]], list[nn.Module]]


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
    if len(input_shape) not in (1, 3) or math.prod(input_shape) > MOST_VALUES:
        raise ValueError(
            f"input_shape must be (height, width, channels) or (features,), got {shown(list(input_shape))}"
        )
    x = torch.zeros(1, *((input_shape[2], *input_shape[:2]) if len(input_shape) == 3 else input_shape))
    for number, layer in enumerate(layers):
        arguments = _Arguments(layer, f"layer {number + 1} ({layer.get('layer_name')})")
        new = _convert(arguments, x, weighted)
        arguments.nothing_left()
        with torch.no_grad():
            x = nn.Sequential(*new).eval()(x)
        if x.numel() > MOST_VALUES:
            raise ValueError(f"{arguments.where} gives {x.numel()} numbers for one image, more than {MOST_VALUES}")
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

    def size(self, name: str, weights_of_one: int) -> int:
        """A number of units or filters, which there must be, each with so many weights."""
        size = self._whole(name, self.take(name), MOST_UNITS)
        if size * weights_of_one > MOST_WEIGHTS:
            raise ValueError(f"{self.where}: {size} {name} of {weights_of_one} weights are more than {MOST_WEIGHTS}")
        return size

    def _whole(self, name: str, value: Any, most: int) -> int:
        """A whole number, also as JSON writes 4.0."""
        try:
            return whole(
                f"{self.where}: {name}",
                int(value) if isinstance(value, float) and value.is_integer() else value,
                1,
                most,
            )
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{self.where}: {name} must be a whole number, got {shown(value)}") from error

    def take(self, name: str, default: Any = None) -> Any:
        return self.left.pop(name, default)

    def pair(self, name: str, default: Any = None) -> tuple[int, int]:
        value = self.take(name, default)
        if value is None:
            raise ValueError(f"{self.where} has no {name}")
        both = value if isinstance(value, (list, tuple)) else (value, value)
        if len(both) != 2:
            raise ValueError(f"{self.where}: {name} must be one number or two, got {value!r:.60}")
        height, width = (self._whole(name, side, MOST_WINDOW) for side in both)
        return height, width

    def expect(self, name: str, *allowed: Any) -> Any:
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise ValueError(f"{self.where}: {name} must be one of {allowed}, got {value!r}")
        return value

    def activation(self, name: str = "activation") -> list[nn.Module]:
        value = self.take(name) or "linear"
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise ValueError(f"{self.where}: activation must be one of {', '.join(_ACTIVATIONS)}, got {value!r}")
        return [] if value == "linear" else [_ACTIVATIONS[value]()]

    def nothing_left(self) -> None:
        if self.left:
            raise ValueError(f"{self.where}: the arguments {sorted(self.left)} are not understood")


def _convert(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    """The modules of one layer, for inputs like ``x``."""
    convert = _CONVERTERS.get(arguments.kind)
    if convert is None:
        known = "Conv2D, Dense, BatchNormalization, pooling, Flatten, Activation, ReLU and dropout"
        raise ValueError(f"{arguments.where}: this kind of layer is not understood; {known} are")
    return convert(arguments, x, weighted)


def _dense(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    if x.dim() != 2:
        raise ValueError(f"{arguments.where}: expects rows, gets images; a Flatten is missing before it")
    dense = nn.Linear(x.shape[1], arguments.size("units", x.shape[1]), bias=bool(arguments.take("use_bias", True)))
    shape = dense.in_features, dense.out_features
    weighted.append(_weights(arguments.where, dense, lambda kernel: kernel.T, shape))
    return [dense, *arguments.activation()]


def _max_pooling(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    size, stride, same = _window(arguments)
    pool = nn.MaxPool2d(size, stride)
    return [SamePadding(size, stride, -math.inf), pool] if same else [pool]


def _average_pooling(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    size, stride, same = _window(arguments)
    if same and any(n % s or k != s for n, k, s in zip(x.shape[2:], size, stride, strict=True)):
        raise ValueError(f"{arguments.where}: average pooling over a padded border is not understood")
    return [nn.AvgPool2d(size, stride)]


def _window(arguments: _Arguments) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """Size and stride of pooling, and whether the border is padded."""
    size = arguments.pair("pool_size", 2)
    stride = arguments.pair("strides", None) if arguments.left.get("strides") is not None else size
    arguments.take("strides")
    arguments.expect("data_format", "channels_last", None)
    return size, stride, arguments.expect("padding", "valid", "same") == "same"


def _global_pooling(pool: Callable[[int], nn.Module]) -> Converter:
    def convert(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
        arguments.expect("data_format", "channels_last", None)
        return [pool(1), nn.Flatten()]

    return convert


def _flatten(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    arguments.expect("data_format", "channels_last", None)
    return [KerasFlatten()]


def _activation(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    return arguments.activation()


def _relu(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    arguments.expect("max_value", None)
    arguments.expect("negative_slope", 0)
    arguments.expect("threshold", 0)
    return [nn.ReLU()]


def _input(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    return []


def _idle(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    rate = arguments.take("rate", 0.0)
    arguments.left.clear()
    return [nn.Dropout(float(rate))] if arguments.kind == "Dropout" else [nn.Identity()]


def _convolution(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
    kernel, stride = arguments.pair("kernel_size"), arguments.pair("strides", 1)
    arguments.expect("data_format", "channels_last", None)
    arguments.expect("dilation_rate", 1, [1, 1])
    arguments.expect("groups", 1)
    same = arguments.expect("padding", "valid", "same") == "same"
    odd = same and stride == (1, 1) and all(size % 2 for size in kernel)
    convolution = nn.Conv2d(
        x.shape[1],
        arguments.size("filters", x.shape[1] * math.prod(kernel)),
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


def _batch_norm(arguments: _Arguments, x: Tensor, weighted: list[Weighted]) -> list[nn.Module]:
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
    return [norm]


_CONVERTERS: dict[str, Converter] = {
    "Conv2D": _convolution,
    "Dense": _dense,
    "BatchNormalization": _batch_norm,
    **dict.fromkeys(("MaxPooling2D", "MaxPool2D"), _max_pooling),
    **dict.fromkeys(("AveragePooling2D", "AvgPool2D"), _average_pooling),
    **dict.fromkeys(("GlobalAveragePooling2D", "GlobalAvgPool2D"), _global_pooling(nn.AdaptiveAvgPool2d)),
    **dict.fromkeys(("GlobalMaxPooling2D", "GlobalMaxPool2D"), _global_pooling(nn.AdaptiveMaxPool2d)),
    "Flatten": _flatten,
    "Activation": _activation,
    "ReLU": _relu,
    "InputLayer": _input,
    **dict.fromkeys(IDLE, _idle),
}


# ---------------------------------------------------------------------------------------------------- Keras's weights


def load_keras_weights(path: str | os.PathLike[str], weighted: Sequence[Weighted]) -> None:
    """Set the weights of layers from a file of ``save_weights`` of Keras, in the order of the layers.

    The file has the attribute ``layer_names``; the group of a layer has ``weight_names``, the names of its arrays in
    the order of the layer. A list that is too long for an attribute is cut into ``layer_names0``, ``layer_names1``, ...
    """
    path = Path(path)
    arrays = _arrays(path)
    if len(arrays) != len(weighted):
        raise ValueError(
            f"{path} has weights of {len(arrays)} layers; config.json describes {len(weighted)} with weights"
        )
    for layer, values in zip(weighted, arrays, strict=True):
        shapes = [array.shape for array in values]
        if shapes != layer.shapes:
            raise ValueError(f"{path}: {layer.name} expects arrays of shapes {layer.shapes}, the file has {shapes}")
        layer.assign(values)


def _arrays(path: Path) -> list[list[np.ndarray]]:
    """The arrays of every layer that has some."""
    try:
        import h5py
    except ImportError:
        raise ModuleNotFoundError("reading networks of PGDL needs h5py: pip install 'wideflat[pgdl]'") from None
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: a network of PGDL is a folder with config.json and weights.hdf5")
    arrays = []
    try:
        with h5py.File(path, "r") as file:
            root = file.get("model_weights", file)
            for group in (root[name] for name in _names(root, "layer_names")):
                if names := _names(group, "weight_names"):
                    arrays.append([_array(group, name) for name in names])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, AttributeError, MemoryError) as error:
        raise ValueError(f"{path} is not a whole file of Keras weights: {error}") from None
    return arrays


def _array(group: Any, name: str) -> np.ndarray:
    """An array of a group, if it is one, lies in this file and is no larger than a layer can be."""
    if "External" in type(group.get(name, getlink=True)).__name__:
        raise ValueError(f"{name} is a link to another file, which is not followed")
    found = group[name]
    if not hasattr(found, "dtype") or found.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be an array of numbers, is {shown(found)}")
    if found.external or found.is_virtual or math.prod(found.shape) > MOST_WEIGHTS:
        raise ValueError(f"{name} lies in another file, or is larger than any layer: {found.shape}")
    return np.asarray(found, dtype=np.float32)


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
