"""Which parameters of a network are perturbed: the names that a word, a pattern or a function chooses."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wideflat.checks import network, shown
from wideflat.evaluation.registered import require_values

__all__ = ["NothingSelected", "Selection", "layers_of", "select_parameters"]

#: Which parameters are perturbed: a word, a regular expression for the whole name, several of them, or a predicate.
Selection: TypeAlias = str | Iterable[str] | Callable[[str, nn.Parameter], bool]

_NORMALISATIONS = (
    _BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
#: Those of other libraries, such as LlamaRMSNorm and T5LayerNorm, are known by their names.
_NORMALISATION_NAME = re.compile(r".*(Batch|Layer|Group|RMS|Rms|Instance)Norm(alization)?[0-9]*d?")
#: More names and patterns are never meant.
MOST_NAMES = 10**5


def _of_normalisations(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _NORMALISATIONS) or _NORMALISATION_NAME.fullmatch(type(module).__name__)
        for name, _ in module.named_parameters(recurse=False)
    }


def _biases(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"}


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


#: The words for selections, and the names that each leaves out.
_WORDS: dict[str, Callable[[nn.Module], set[str]]] = {
    "all": lambda model: set(),
    "no batch norm": _of_normalisations,
    "no biases": _biases,
    "weights": lambda model: _of_normalisations(model) | _biases(model),
    "trainable": _frozen,
}


class NothingSelected(ValueError):
    """A selection that no parameter of the network fits."""


def select_parameters(model: nn.Module, selection: Selection = "all") -> tuple[list[str], str]:
    """The names of the parameters to perturb, and the selection in words.

    Args:
        model: The network. Frozen parameters (``requires_grad=False``) count too: Eq. 4 perturbs w, not what was
            trained. Tied parameters appear once. Buffers are never perturbed. Parameters that lie in the same memory
            without being one object are refused: it is not said whether their noise is one or two.
        selection: One of

            * ``"all"``: every parameter, as Eq. 4 says;
            * ``"no batch norm"``: without the affine parameters of normalisation layers;
            * ``"no biases"``: without the parameters called ``bias`` (those of normalisation layers too);
            * ``"weights"``: without both;
            * ``"trainable"``: those with ``requires_grad``, such as the adapters of LoRA;
            * a regular expression that the whole name must match, or several of them (``"layer1.*"``,
              ``["conv1.weight", "fc.*"]``);
            * a function of the name and the parameter that says whether it is perturbed.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> select_parameters(model, "weights")
        (['0.weight'], 'weights')
        >>> select_parameters(model, "0[.].*")
        (['0.weight', '0.bias'], '0[.].*')
    """
    if isinstance(selection, (Tensor, nn.Module)) or not (callable(selection) or isinstance(selection, Iterable)):
        raise TypeError(f"parameters must be names, regular expressions or a function, got {shown(selection)}")
    network(model)
    parameters = dict(model.named_parameters())
    if callable(selection):
        chosen = [name for name, parameter in parameters.items() if selection(name, parameter)]
        words = f"function {getattr(selection, '__qualname__', type(selection).__qualname__)}"
    elif isinstance(selection, str) and selection in _WORDS:
        words = str(selection)
        without = _WORDS[words](model)
        chosen = [name for name in parameters if name not in without]
    else:
        chosen, words = _matching(parameters, selection)
    if not chosen:
        raise NothingSelected(
            f"parameters={shown(selection)} selects none of the {len(parameters)} parameters; "
            f"their names are {', '.join(list(parameters)[:8])}{', ...' if len(parameters) > 8 else ''}"
        )
    _refuse_shared_memory(parameters, set(chosen))
    return chosen, words


def _matching(names: Iterable[str], selection: str | Iterable[str]) -> tuple[list[str], str]:
    """The names that one of the regular expressions matches as a whole, and these in words."""
    try:
        patterns = [selection] if isinstance(selection, str) else _names(selection)
        words = " | ".join(patterns)
        return [name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)], words
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(
            f"parameters must be one of {(*_WORDS,)}, a regular expression, several of them, or a function of name and "
            f"parameter; got {shown(selection)} ({error})"
        ) from None


def _names(given: Iterable[str]) -> list[str]:
    try:
        return list(islice(given, MOST_NAMES))
    except Exception as error:  # of the user's
        raise TypeError(f"names cannot be gone through: {type(error).__name__}: {error!s:.200}") from error


def layers_of(model: nn.Module, layers: Iterable[str] | None = None) -> dict[str, list[str]]:
    """The names of the parameters of each layer; layers whose parameters are all tied to those of another are left out.

    Args:
        model: The network.
        layers: Names of modules; by default all that have parameters of their own.

    Example:
        >>> layers_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False)))
        {'0': ['0.weight', '0.bias'], '2': ['2.weight']}
    """
    modules = dict(network(model).named_modules())
    own = [prefix for prefix, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
    if layers is not None and (not isinstance(layers, Iterable) or isinstance(layers, (str, Tensor, nn.Module))):
        raise TypeError(f"layers must be a list of names of modules, got {shown(layers)}")
    wanted = own if layers is None else _names(layers)
    if unknown := [layer for layer in wanted if not isinstance(layer, str) or layer not in modules]:
        raise ValueError(f"the network has no layer {shown(unknown[0])}; its layers are {', '.join(sorted(own))}")
    names = [name for name, _ in model.named_parameters()]
    found = {
        layer: [name for name in names if (name.startswith(layer + ".") if layer else "." not in name)]
        for layer in wanted
    }
    return {layer: inside for layer, inside in found.items() if inside}


def _refuse_shared_memory(parameters: dict[str, nn.Parameter], chosen: set[str]) -> None:
    """An error where a number in memory belongs to a chosen parameter and to another one, or twice to one."""
    groups: dict[tuple[int, torch.dtype], list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        require_values(name, parameter)
        if name in chosen and 0 in (s for s, n in zip(parameter.stride(), parameter.shape, strict=True) if n > 1):
            raise ValueError(
                f"parameter {name} is an expanded view: one number in memory stands for several of its weights; give "
                "it memory of its own (.data = .data.clone()), or make the smaller tensor the parameter"
            )
        if parameter.numel():
            groups[parameter.untyped_storage().data_ptr(), parameter.dtype].append(name)
    for names in groups.values():
        if len(names) > 1 and chosen & set(names):
            _refuse_overlap({name: _places(parameters[name]) for name in names}, chosen)


def _refuse_overlap(places: dict[str, Tensor], chosen: set[str]) -> None:
    """An error where a chosen parameter has a place in common with another one of the same storage."""
    owners = torch.zeros(1 + max(int(place.max()) for place in places.values()), dtype=torch.int32)
    for place in places.values():
        owners[place] += 1
    for a in (name for name in places if name in chosen):
        both = places[a][owners[places[a]] > 1]
        if len(both):
            b = next(name for name, place in places.items() if name != a and bool((place == both[0]).any()))
            raise ValueError(
                f"parameters {a} and {b} lie in the same memory but are two objects, so it is not said whether their "
                f"noise is one or two: tie them ({b} = {a}, one nn.Parameter), or give one memory of its own "
                "(.data = .data.clone())"
            )


def _places(parameter: Tensor) -> Tensor:
    """Where in its storage the numbers of a parameter lie."""
    size = parameter.untyped_storage().nbytes() // parameter.element_size()
    return torch.arange(size).as_strided(parameter.shape, parameter.stride(), parameter.storage_offset()).flatten()
