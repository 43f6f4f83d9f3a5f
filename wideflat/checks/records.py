"""What is asked of what was written before: paths, arrays, states, records that may not be whole; and shares."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from wideflat.checks import MOST, a_kind, instance, number, shown

__all__ = [
    "array",
    "check_state_dict",
    "copiable",
    "dense",
    "fitting",
    "in_json",
    "location",
    "of_shape",
    "parts_of",
    "reading",
    "share",
]


def location(name: str, value: Any) -> Path:
    """The path of a file or folder.

    >>> location("path", 3)
    Traceback (most recent call last):
    ...
    TypeError: path must be the path of a file, got 3
    """
    try:
        place = os.fspath(value)
        os.fsencode(place)
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be the path of a file, got one that no file can have, {value!r:.60}") from None
    except Exception:  # it is none, or one of the user's own kind, which fails
        raise TypeError(f"{name} must be the path of a file, got {shown(value)}") from None
    if not isinstance(place, str):
        raise TypeError(f"{name} must be the path of a file, got {shown(value)}")
    if "\0" in place:
        raise ValueError(f"{name} must be the path of a file, got one with a zero byte in it, {place!r:.60}")
    return Path(place)


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Around what reads a record: whatever one that is damaged runs it into becomes one kind of error.

    >>> with reading("a slice"):
    ...     {}["positions"]
    Traceback (most recent call last):
    ...
    ValueError: this is not a whole slice: a part is missing or damaged (KeyError: 'positions')
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"this is not a whole {what.removeprefix('a ')}: {error}") from error
    except (LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error!s:.200}"
        what = what.removeprefix("a ")
        raise ValueError(f"this is not a whole {what}: a part is missing or damaged ({reason})") from error


def array(name: str, value: Any) -> np.ndarray:
    """Numbers as an array of floats with at least one dimension.

    >>> array("mean", [1, 2])
    array([1., 2.])
    >>> array("mean", {"a": 1})
    Traceback (most recent call last):
    ...
    TypeError: mean must be an array of numbers, got {'a': 1} (a dict)
    """
    if isinstance(value, Sequence) and len(value) > MOST:
        raise ValueError(f"{name} must be an array of at most {MOST} numbers, got {shown(value)}")
    try:
        made = np.array(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=float)
    except Exception:  # whatever it is that NumPy asks it for
        raise TypeError(f"{name} must be an array of numbers, got {shown(value)}") from None
    if made.ndim == 0:
        raise ValueError(f"{name} must be an array of numbers, got {shown(value)}")
    return made


def parts_of(what: str, content: Any, arrays: Iterable[str] = (), kind: str | None = None) -> dict[str, Any]:
    """What stands in a record of format 1, with these parts as arrays. Anything may stand in the place of each.

    Args:
        what: What it is a record of.
        content: As it was read.
        arrays: Names of parts.
        kind: What the record must say that it is, if it says so.

    Example:
        >>> parts_of("slice", {"format": 1, "mean": [1, 2]}, ["mean"])
        {'mean': array([1., 2.])}
        >>> parts_of("slice", {"format": 2})
        Traceback (most recent call last):
        ...
        ValueError: expected a slice of format 1, got one of format 2
    """
    if not isinstance(content, dict):
        raise ValueError(f"expected a {what} of format 1, got {shown(content)}")
    said, named = content.get("format"), content.get("kind")
    if kind is not None and not (isinstance(named, str) and named == kind):
        raise ValueError(f"expected a {what} of format 1, got a record of the kind {shown(named)}")
    if not (isinstance(said, int) and said == 1):
        raise ValueError(f"expected a {what} of format 1, got one of format {shown(said)}")
    parts = {name: value for name, value in content.items() if name != "format"}
    with reading(what):
        return {**parts, **{name: array(name, parts[name]) for name in arrays}}


#: Settings that torch's optimizers have had from the beginning.
_OLD = frozenset({"lr", "momentum", "betas", "eps", "weight_decay"})


def check_state_dict(value: Any, defaults: Iterable[str] = ()) -> dict[str, Any]:
    """Refuse what no optimizer has given as its state: to be asked before it is taken apart.

    Args:
        value: The state.
        defaults: Names of an optimizer's settings; those that every version of it had must be in each group.

    >>> check_state_dict({"state": {}})
    Traceback (most recent call last):
    ...
    ValueError: the state of an optimizer must have state and param_groups, as state_dict() gave them, got {'state': ...
    """
    wanted = "the state of an optimizer must have state and param_groups, as state_dict() gave them"
    if not isinstance(value, dict) or not {"state", "param_groups"} <= value.keys():
        raise (ValueError if isinstance(value, dict) else TypeError)(f"{wanted}, got {shown(value)}")
    state, groups = value["state"], value["param_groups"]
    if not isinstance(state, dict) or not all(
        isinstance(each, dict) and all(isinstance(name, str) for name in each) for each in state.values()
    ):
        raise TypeError(f"{wanted}; state must be a dictionary of dictionaries, got {shown(state)}")
    if (
        not isinstance(groups, (list, tuple))
        or not all(isinstance(group, dict) and isinstance(group.get("params"), (list, tuple)) for group in groups)
        or not all(isinstance(number, (int, str)) for group in groups for number in group["params"])
    ):
        raise TypeError(f"{wanted}; param_groups must be dictionaries with a list of params, got {shown(groups)}")
    needed = _OLD.intersection(defaults)
    for group in groups:
        if absent := sorted(needed.difference(group)):
            raise ValueError(f"a param group has no {' and no '.join(absent)}: the state is that of another optimizer")
    return value


def copiable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state whose settings can be copied, as torch does before anybody looks at them.

    >>> copiable({"param_groups": [{"lr": (x for x in [])}]})
    Traceback (most recent call last):
    ...
    TypeError: the settings of a param group must be plain values, got {'lr': ... (a dict)
    """
    groups = instance("state_dict", state_dict, dict, "a dictionary, as state_dict() gave it").get("param_groups")
    for group in groups if isinstance(groups, (list, tuple)) else []:
        try:
            copy.deepcopy(group)
        except Exception:  # of whatever stands there
            raise TypeError(f"the settings of a param group must be plain values, got {shown(group)}") from None
    return state_dict


def dense(name: str, value: Any) -> Tensor:
    """A tensor whose numbers can be copied.

    >>> dense("center", torch.eye(2).to_sparse())
    Traceback (most recent call last):
    ...
    TypeError: center must be a dense tensor of real numbers, got a tensor of shape (2, 2) of torch.float32
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {shown(value)}")
    if isinstance(value, UninitializedParameter):
        raise TypeError(f"{name} must be a dense tensor of real numbers, got a parameter without a shape")
    if value.layout is not torch.strided or value.is_nested or value.is_complex() or value.is_quantized:
        raise TypeError(f"{name} must be a dense tensor of real numbers, got {shown(value)} of {value.dtype}")
    return value


def fitting(**tensors: Any) -> None:
    """Refuse tensors whose shapes do not go together element by element, or that are in different places.

    >>> fitting(output=torch.zeros(2), target=torch.zeros(3), omega=0.5)
    Traceback (most recent call last):
    ...
    ValueError: output, target must have shapes that fit each other, got (2,), (3,)
    """
    given = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    try:
        torch.broadcast_shapes(*(value.shape for value in given.values()))
        fits = len({value.device for value in given.values() if value.dim()}) <= 1
    except RuntimeError:
        fits = False
    if not fits:
        shapes = ", ".join(str(tuple(value.shape)) for value in given.values())
        raise ValueError(f"{', '.join(given)} must have shapes that fit each other, got {shapes}")


def in_json(name: str, value: Any, indent: int | None = None) -> str:
    """What a value is as a JSON document.

    >>> in_json("row", {"epoch": 1})
    '{"epoch": 1}'
    >>> in_json("row", {"net": torch.nn.Linear(1, 1)})
    Traceback (most recent call last):
    ...
    TypeError: row must be what JSON can say, got a dict: Object of type Linear is not JSON serializable
    """
    try:
        return json.dumps(value, indent=indent)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name} must be what JSON can say, got {a_kind(value)}: {error!s:.100}") from None


def of_shape(name: str, value: Any, p: Tensor) -> Tensor:
    """What a state remembers of a parameter.

    >>> of_shape("sharpness", 3, torch.zeros(2))
    Traceback (most recent call last):
    ...
    ValueError: sharpness must have the shape (2,) of its parameter, got 3; the state is that of another network
    """
    if not isinstance(p, Tensor):  # the number of one, under which torch's loader leaves what it cannot place
        raise ValueError(f"{name} is there of a parameter that the optimizer does not have: {shown(p)}")
    plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    if not plain or value.shape != p.shape:
        raise ValueError(
            f"{name} must have the shape {tuple(p.shape)} of its parameter, got {shown(value)}; the state is that of "
            "another network"
        )
    return value


def share(name: str, value: Any) -> float:
    """A number between 0 and 1, neither of which it is.

    >>> share("confidence", 95)
    Traceback (most recent call last):
    ...
    ValueError: confidence must be between 0 and 1, got 95
    """
    if not 0 < (plain := number(name, value)) < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {plain:g}")
    return plain
