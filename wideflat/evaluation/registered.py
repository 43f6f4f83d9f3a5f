"""Weights that a network uses although it does not know them as its parameters: no noise would move them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from wideflat.checks import warn_user

__all__ = ["hidden_weights", "require_same", "require_values", "warn_of_hidden_weights"]

#: Where modules keep what they know.
_KNOWN = ("_parameters", "_modules", "_buffers")


def hidden_weights(model: nn.Module) -> list[str]:
    """Names of parameters in plain lists, tuples and dictionaries, of modules in them, and of quantised layers.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> hidden_weights(model)
        []
        >>> model.more = [nn.Linear(2, 2, bias=False)]
        >>> hidden_weights(model)
        ['more[0].weight']
    """
    known = {id(parameter) for parameter in model.parameters()}
    found: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _KNOWN and isinstance(value, (list, tuple, Mapping)):
                for place, parameter in _parameters(value, f"{prefix}.{name}" if prefix else name):
                    found.setdefault(id(parameter), place)
        if hasattr(module, "_packed_params") and not type(module).__name__.endswith("PackedParams"):
            found[id(module)] = f"{prefix} ({type(module).__name__}, quantised)".strip()
    return [name for key, name in found.items() if key not in known]


def _parameters(value: Any, place: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters in nested containers, with their places; modules that are known elsewhere are sorted out later."""
    if isinstance(value, nn.Parameter):
        yield place, value
    elif isinstance(value, nn.Module):
        yield from ((f"{place}.{name}", parameter) for name, parameter in value.named_parameters())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _parameters(part, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _parameters(part, f"{place}[{index}]")


def warn_of_hidden_weights(model: nn.Module) -> None:
    """Warn if a network has weights that are not among its parameters."""
    if names := hidden_weights(model):
        few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        warn_user(
            f"{type(model).__name__} has weights that are not among its parameters ({few}): they stay where they are, "
            "and the result is that of the others alone. Put modules into nn.ModuleList or nn.ModuleDict and "
            "parameters into nn.ParameterList, and measure quantised layers before they are quantised"
        )


def require_same(before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Refuse a network that has other parameters than before it was called: noise would move those it no longer uses.

    >>> model = nn.Linear(2, 2)
    >>> before = dict(model.named_parameters())
    >>> model.weight = nn.Parameter(model.weight * 2)
    >>> require_same(before, model)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Linear makes, renames or replaces parameters (weight) when it is called...
    """
    now = dict(model.named_parameters())
    others = [name for name in {**before, **now} if before.get(name) is not now.get(name)]
    if others:
        raise ValueError(
            f"{type(model).__name__} makes, renames or replaces parameters ({', '.join(others[:3])}) when it is "
            "called: noise would move those that it no longer uses. Call it on a batch before it is measured; where it "
            "does that in every call, let it write into its parameters (parameter.data.copy_(...)) instead"
        )


def require_values(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter that has no values: of a lazy layer that was never called, or on the device ``meta``.

    >>> require_values("weight", nn.LazyLinear(3).weight)
    Traceback (most recent call last):
    ValueError: parameter weight has no values yet: run the network on one batch first
    """
    if is_lazy(parameter):
        raise ValueError(f"parameter {name} has no values yet: run the network on one batch first")
    if parameter.is_meta:
        raise ValueError(f"parameter {name} has no values (device meta): load weights into the network first")
