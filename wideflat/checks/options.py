"""What is asked of options: words, a strength, a device, a type of numbers, a param group; and of whole records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wideflat.checks import LARGEST, flag, instance, number, real_tensor, shown, up_to
from wideflat.checks.records import array

__all__ = ["bounded", "check_fields", "device", "dtype", "param_group", "strength", "text", "value_of"]

#: No network has more parameters, each of which is a tensor.
MOST_PARAMS = 10**5


def text(name: str, value: Any) -> str | None:
    """Words, or a number in their place; None stays None.

    >>> text("label", 3), text("label", [3])
    Traceback (most recent call last):
    ...
    TypeError: label must be a text, got [3] (a list)
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float, np.number)):
        return shown(value) if type(value) in (int, float) else str(value)
    raise TypeError(f"{name} must be a text, got {shown(value)}")


def strength(name: str, value: Any) -> Any:
    """A finite number; a tensor of one element stays what it is, so that no device is waited for.

    >>> strength("gamma", torch.tensor(0.5))
    tensor(0.5000)
    >>> strength("gamma", "x")
    Traceback (most recent call last):
    ...
    TypeError: gamma must be a finite number, got 'x'
    """
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_nested
    if plain and value.is_floating_point() and value.numel() == 1 and not value.is_meta:
        return value
    return number(name, number(name, value), -LARGEST, LARGEST)


def value_of(name: str, value: Any) -> float:
    """A number that was measured: it may be infinite, or NaN.

    >>> value_of("baseline", np.float32("nan"))
    nan
    """
    try:
        return number(name, value)
    except ValueError:
        try:
            return float(value)
        except OverflowError:  # a whole number of hundreds of digits
            return math.inf if value > 0 else -math.inf


def device(name: str, value: Any) -> torch.device | None:
    """A device that is here and holds numbers; None stays None.

    >>> device("state_device", "cpu")
    device(type='cpu')
    >>> device("state_device", 0.5)
    Traceback (most recent call last):
    ...
    TypeError: state_device must be a device, such as "cpu" or "cuda", got 0.5
    """
    if value is None:
        return None
    wanted = f'{name} must be a device, such as "cpu" or "cuda"'
    if not isinstance(value, (str, int, torch.device)) or isinstance(value, bool):
        raise TypeError(f"{wanted}, got {shown(value)}")
    if str(value) == "meta":
        raise ValueError(f'{name} must be a device that holds numbers, got "meta"')
    try:
        torch.empty(0, device=value)
        return torch.device(value)
    except Exception as error:  # of each backend, an error of its own
        reason = str(error).partition("\n")[0][:100]
        raise ValueError(f"{wanted}, which is here; got {str(value)!r:.60} ({reason})") from None


def dtype(name: str, value: Any) -> torch.dtype:
    """A type of real numbers.

    >>> dtype("dtype", torch.int64)
    Traceback (most recent call last):
    ...
    ValueError: dtype must be a type of real numbers, such as torch.float32, got torch.int64
    """
    wanted = f"{name} must be a type of real numbers, such as torch.float32"
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return value
    if isinstance(value, torch.dtype):
        raise ValueError(f"{wanted}, got {value}")
    raise TypeError(f"{wanted}, got {shown(value)}")


def param_group(value: Any) -> dict[str, Any]:
    """A param group, as an optimizer takes it.

    >>> param_group({"lr": 0.1})
    Traceback (most recent call last):
    ...
    ValueError: a param group must be a dictionary with params, got {'lr': 0.1} (a dict)
    """
    if not isinstance(value, dict):
        raise TypeError(f"a param group must be a dictionary with params, got {shown(value)}")
    if "params" not in value:
        raise ValueError(f"a param group must be a dictionary with params, got {shown(value)}")
    params = bounded(value["params"])
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"params must be a tensor, or a sequence of tensors, got {shown(params)}")
    for entry in params if isinstance(params, (list, tuple)) else ():
        if isinstance(entry, tuple) and len(entry) != 2:
            raise TypeError(f"params must be tensors, or pairs of a name and a tensor, got {shown(entry)}")
    return value if params is value["params"] else {**value, "params": params}


def bounded(params: Any) -> Any:
    """Parameters or param groups of an optimizer: those of what has no length in a list, unless it has no end.

    >>> len(bounded(iter([torch.zeros(1)] * 3)))
    3
    >>> import itertools
    >>> bounded(itertools.repeat(0.1))
    Traceback (most recent call last):
    ...
    ValueError: params must be at most 100000 parameters or groups, got an iterator of more
    """
    if not isinstance(params, Iterable) or isinstance(params, (Tensor, list, tuple, dict, set, str)):
        return params
    found = up_to(MOST_PARAMS + 1, "params", params)
    if len(found) > MOST_PARAMS:
        raise ValueError(f"params must be at most {MOST_PARAMS} parameters or groups, got an iterator of more")
    return found


def _numeric(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray) and type(value) is np.ndarray and value.dtype.kind in "biuf" and value.ndim:
        return value
    return array(name, value)


def _integral(name: str, value: Any) -> int:
    plain = number(name, value)
    if not plain.is_integer():
        raise ValueError(f"{name} must be a whole number, got {plain:g}")
    return int(plain)


#: What the fields of a record are asked for, by the word with which their annotation begins.
_KINDS: dict[str, Callable[[str, Any], Any]] = {
    "np.ndarray": _numeric,
    "Tensor": lambda name, value: real_tensor(name, instance(name, value, Tensor)),
    "float": value_of,
    "int": lambda name, value: value if isinstance(value, int) else _integral(name, value),
    "bool": flag,
    "str": lambda name, value: instance(name, value, str, "a text"),
    "dict": lambda name, value: instance(name, value, Mapping, "a dictionary"),
    "list": lambda name, value: instance(name, value, list),
    "list[float]": lambda name, value: [value_of(f"an entry of {name}", each) for each in instance(name, value, list)],
}


def check_fields(record: Any) -> None:
    """Refuse a dataclass a field of which is not what its annotation says; numbers become plain ones, lists arrays.

    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: float
    ...     __post_init__ = check_fields
    >>> Point(np.float32(0.5))
    Point(x=0.5)
    >>> Point("x")
    Traceback (most recent call last):
    ...
    TypeError: x must be a finite number, got 'x'
    """
    for field in dataclasses.fields(record):
        value, kind = getattr(record, field.name), str(field.type)
        kind_of_it = kind.removesuffix(" | None")
        check = _KINDS.get(kind_of_it) or _KINDS.get(kind_of_it.partition("[")[0])
        if check is not None and not (value is None and (kind.endswith("None") or field.default is None)):
            setattr(record, field.name, check(field.name, value))
