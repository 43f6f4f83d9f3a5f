r"""Which hidden units and channels of a network can be renumbered, and what has to be renumbered with them.

A network computes the same when the units of a hidden layer are permuted with everything that is attached to them. What
is attached is read off its graph (``torch.fx``): the rows and bias of the layer that makes them, the parameters and
statistics of a normalisation, the columns of the layers they go into; a residual sum ties the units of its terms
together. Known are Linear, Conv, BatchNorm and LayerNorm layers, elementwise functions, pooling, flattening and sums;
anything else is refused, as it may not treat all units alike.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn

__all__ = ["Axis", "Units", "hidden_units"]

_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
    nn.Dropout, nn.Dropout2d, nn.Identity,
)  # fmt: skip
_POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_KEEPING: set[Any] = {
    F.relu, F.relu6, F.leaky_relu, F.elu, F.silu, F.gelu, F.tanh, F.sigmoid, F.softplus, F.dropout, torch.relu,
    torch.tanh, torch.sigmoid, "relu", "relu_", "tanh", "sigmoid", "contiguous",
}  # fmt: skip
_POOLING: set[Any] = {F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.max_pool1d, F.avg_pool1d}
_SUMS: set[Any] = {operator.add, operator.iadd, torch.add, "add", "add_"}
_SIZES: set[Any] = {"size", "dim", getattr, operator.getitem}


@dataclass(frozen=True)
class Axis:
    """An axis of a tensor of the network whose numbers belong to units, in equal blocks after a flattening."""

    name: str
    axis: int


@dataclass
class Units:
    """Units that are permuted together.

    Attributes:
        size: How many; None for inputs, whose number stands nowhere.
        axes: What is attached to them.
        free: Whether they may be permuted: inputs and outputs may not.
    """

    size: int | None
    axes: list[Axis] = field(default_factory=list)
    free: bool = True


@dataclass
class _Label:
    """Which units the features of a node are, and whether they are still channels with positions."""

    units: Units
    channels: bool


#: What goes from the label of a layer's input, its name and the layer to the label of its output, None where it cannot.
_ReadsLayer: TypeAlias = Callable[[_Label, str, Any], _Label | None]


def hidden_units(model: nn.Module) -> list[Units]:
    """The groups of units of a network that can be permuted, in the order in which they are computed.

    Raises:
        ValueError: For a network that cannot be traced or has a layer that may not treat all its units alike.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        >>> [(units.size, [(a.name, a.axis) for a in units.axes]) for units in hidden_units(model)]
        [(5, [('0.weight', 0), ('0.bias', 0), ('2.weight', 1)])]
    """
    named = dict(model.named_parameters())
    if tied := [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in named]:
        raise ValueError(f"the network cannot be aligned: {tied[0]} is tied to another parameter")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = fx.symbolic_trace(model)
    except Exception as error:  # whatever the tracer of torch cannot follow
        raise ValueError(
            f"{type(model).__name__} cannot be aligned: torch.fx cannot trace it ({str(error).splitlines()[0]}). Give "
            "weights that are aligned already"
        ) from None
    return _Reader(graph).read()


class _Reader:
    """Goes through a graph and notes what belongs to which units."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.groups: list[Units] = []
        self.of_axis: dict[Axis, Units] = {}
        self.labels: dict[fx.Node, _Label] = {}

    def read(self) -> list[Units]:
        """All groups that are free."""
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self.labels[node] = _Label(self._new(None, free=False), True)
            elif node.op == "output":
                for used in node.all_input_nodes:
                    if used in self.labels:
                        self.labels[used].units.free = False
            elif node.op == "call_module":
                self.labels[node] = self._module(node, self.graph.get_submodule(str(node.target)))
            elif (label := self._function(node)) is not None:
                self.labels[node] = label
        found = [units for units in self.groups if units.free and units.size is not None and units.size > 1]
        for units in found:
            self._require_axes(units)
        return found

    def _require_axes(self, units: Units) -> None:
        """Refuse units that do not divide what seems to be attached to them."""
        assert units.size is not None
        state = self.graph.state_dict()
        for axis in units.axes:
            if axis.name not in state:
                raise ValueError(f"the network cannot be aligned: {axis.name} is computed from other parameters")
            length = state[axis.name].shape[axis.axis]
            if length % units.size:
                raise ValueError(
                    f"the network cannot be aligned: axis {axis.axis} of {axis.name} has the length {length}, which "
                    f"{units.size} units do not divide"
                )

    def _new(self, size: int | None, free: bool = True) -> Units:
        self.groups.append(Units(size, free=free))
        return self.groups[-1]

    def _tie(self, a: Units, b: Units) -> Units:
        """Two groups that must be permuted alike become one."""
        if a is b:
            return a
        a.size = a.size if a.size is not None else b.size
        a.free = a.free and b.free
        a.axes += b.axes
        self.groups = [units for units in self.groups if units is not b]
        for axis in b.axes:
            self.of_axis[axis] = a
        for label in self.labels.values():
            label.units = a if label.units is b else label.units
        return a

    def _attach(self, units: Units, name: str, axis: int) -> Units:
        key = Axis(name, axis)
        if key in self.of_axis:  # a layer that is used twice
            return self._tie(self.of_axis[key], units)
        self.of_axis[key] = units
        units.axes.append(key)
        return units

    def _refuse(self, node: fx.Node, what: object) -> ValueError:
        name = getattr(what, "__name__", None) or (what if isinstance(what, str) else type(what).__name__)
        return ValueError(
            f"the network cannot be aligned: {name} ({node.name}) may not treat all units alike. Known are Linear, "
            "Conv, BatchNorm and LayerNorm layers, elementwise functions, pooling, flattening and sums"
        )

    def _module(self, node: fx.Node, module: nn.Module) -> _Label:
        """The label of what a layer makes, by its kind."""
        readers: tuple[tuple[tuple[type[nn.Module], ...], _ReadsLayer], ...] = (
            (_WEIGHTED, self._weighted),
            ((*_NORMS, nn.LayerNorm), self._normalised),
            (_ELEMENTWISE, lambda label, name, layer: label),
            (_POOLS, lambda label, name, layer: label if label.channels else None),
            ((nn.Flatten,), _flattened),
        )
        read = next((read for kinds, read in readers if isinstance(module, kinds)), None)
        sources = [self.labels.get(used) for used in node.all_input_nodes]
        if read is None or len(sources) != 1 or sources[0] is None:
            raise self._refuse(node, module)
        made = read(sources[0], str(node.target), module)
        if made is None:
            raise self._refuse(node, module)
        return _Label(made.units, made.channels)

    def _weighted(self, label: _Label, name: str, module: Any) -> _Label | None:
        """Linear and Conv: new units, whose rows are their own and whose columns are those of the units before."""
        convolution = not isinstance(module, nn.Linear)
        fits = convolution == label.channels or label.units.size is None
        if not fits or getattr(module, "groups", 1) != 1:
            return None
        self._attach(label.units, f"{name}.weight", 1)
        made = self._attach(self._new(module.weight.shape[0]), f"{name}.weight", 0)
        if module.bias is not None:
            made = self._attach(made, f"{name}.bias", 0)
        return _Label(made, convolution)

    def _normalised(self, label: _Label, name: str, module: nn.Module) -> _Label | None:
        """Normalisations: the same units, with a number of each in every parameter and statistic."""
        units = label.units
        over_features = isinstance(module, nn.LayerNorm)
        if units.size is None or (over_features and (label.channels or module.normalized_shape != (units.size,))):
            return None
        for part, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.dim() == 1:
                units = self._attach(units, f"{name}.{part}", 0)
        return _Label(units, label.channels)

    def _function(self, node: fx.Node) -> _Label | None:
        """The label of what a function or a method makes; None for sizes, which are no features."""
        known = [self.labels[used] for used in node.all_input_nodes if used in self.labels]
        if node.target in _SIZES and (not known or node.args[1:] == ("shape",) or node.op == "call_method"):
            return None
        if known and all(label.units.size is None for label in known):  # the input, whatever is done to it
            return _Label(known[0].units, True)
        if node.target in _SUMS:
            made = self._sum(known)
        else:
            made = _of_one(node, known[0]) if len(known) == 1 else None
        if made is None:
            raise self._refuse(node, node.target)
        return made

    def _sum(self, terms: list[_Label]) -> _Label | None:
        """The units of all terms become one group."""
        if not terms:
            return None
        first = terms[0]
        for other in terms[1:]:
            sizes = {first.units.size, other.units.size} - {None}
            if other.channels != first.channels or len(sizes) > 1:
                return None
            self._tie(first.units, other.units)
        return _Label(first.units, first.channels)


def _of_one(node: fx.Node, label: _Label) -> _Label | None:
    """What a function of one tensor of features makes."""
    if node.target in _KEEPING or (label.channels and node.target in _POOLING):
        return _Label(label.units, label.channels)
    if _flattens(node) or (label.channels and _averages(node)):
        return _Label(label.units, False)
    return None


def _flattened(label: _Label, name: str, module: Any) -> _Label | None:
    return _Label(label.units, False) if (module.start_dim, module.end_dim) == (1, -1) else None


def _flattens(node: fx.Node) -> bool:
    """Whether a node makes one vector of each example."""
    rest = node.args[1:]
    flatten: tuple[Callable[..., Any] | str, ...] = (torch.flatten, "flatten")
    if node.target in flatten:
        return (rest == (1,) and not node.kwargs) or (not rest and dict(node.kwargs) == {"start_dim": 1})
    shaped = node.target in ("view", "reshape") and len(rest) == 2 and _counts_examples(rest[0])
    return shaped and isinstance(rest[1], int) and rest[1] == -1


def _counts_examples(size: object) -> bool:
    """Whether a node is x.size(0) or x.shape[0]."""
    if not isinstance(size, fx.Node) or size.args[1:] != (0,):
        return False
    return size.target == "size" or size.target is operator.getitem


def _averages(node: fx.Node) -> bool:
    """Whether a node takes the mean over the positions of images."""
    rest = (*node.args[1:], *node.kwargs.values())
    places = ((2, 3), [2, 3], (-2, -1), [-2, -1])
    return node.target in ("mean", torch.mean) and len(rest) == 1 and any(rest[0] == place for place in places)
