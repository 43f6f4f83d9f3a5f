"""What a public function asks of all its arguments at once, by the words of its annotations."""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from wideflat.checks import MOST_NUMBERS, a_kind, choice, elements, flag, function, instance, network, number, shown
from wideflat.checks.options import device
from wideflat.checks.records import dense, location

__all__ = ["asks"]

F = TypeVar("F", bound=Callable[..., Any])


def asks(door: F) -> F:
    """A function, or a class, that refuses arguments which are not what its annotations say, before anything is done.

    What an annotation cannot say (a range, a shape) the function asks itself. Annotations of types that are imported
    for the type checker only ask for nothing.

    Example:
        >>> @asks
        ... def scaled(path: str | os.PathLike[str], factor: float = 1.0, names: Iterable[str] = ()) -> None: ...
        >>> scaled("a.npz", np.float32(2))
        >>> scaled(3)
        Traceback (most recent call last):
        ...
        TypeError: path must be the path of a file, got 3
        >>> scaled("a.npz", "x")
        Traceback (most recent call last):
        ...
        TypeError: factor must be a finite number, got 'x'
        >>> scaled("a.npz", names=3)
        Traceback (most recent call last):
        ...
        TypeError: names must be a sequence, got 3
    """
    if isinstance(door, type):
        door.__init__ = asks(door.__init__)  # type: ignore[misc]
        return door
    signature = inspect.signature(door)
    checks: dict[str, Callable[[str, Any], Any]] | None = None

    @functools.wraps(door)
    def checked(*given: Any, **named: Any) -> Any:
        nonlocal checks
        if checks is None:  # now that all names of its module are there
            checks = {name: found for name, p in signature.parameters.items() if (found := _check_of(p, door))}
        try:
            bound = signature.bind(*given, **named)
        except TypeError:  # Python's words for too many, too few or unknown ones name the function itself
            return door(*given, **named)
        for name, value in bound.arguments.items():
            if name in checks:
                bound.arguments[name] = checks[name](name, value)
        return door(*bound.args, **bound.kwargs)

    return checked  # type: ignore[return-value]


def _check_of(parameter: inspect.Parameter, door: Callable[..., Any]) -> Callable[[str, Any], Any] | None:
    """What is asked of one argument; None where its annotation does not say."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.annotation is parameter.empty:
        return None
    words = [word for word in _alternatives(str(parameter.annotation)) if word != "None"]
    if "torch.device" in words:
        return _or_none(device, parameter)
    words.sort(key=lambda word: word != "Tensor")  # a tensor of one number stays one, with its graph
    found = [_kind(word, door) for word in words if word != "os.PathLike[str]" or "str" not in words]
    if "os.PathLike[str]" in words:
        return _or_none(_a_path, parameter)
    checks = [check for check in found if check is not None]
    if not checks or len(checks) < len(found):
        return None
    return _or_none(functools.partial(_first_of, checks), parameter)


def _or_none(check: Callable[[str, Any], Any], parameter: inspect.Parameter) -> Callable[[str, Any], Any]:
    if parameter.default is None or "None" in _alternatives(str(parameter.annotation)):
        return lambda name, value: None if value is None else check(name, value)
    return check


def _alternatives(annotation: str) -> list[str]:
    """The types between the bars of an annotation.

    >>> _alternatives("dict[str, int | None] | str | None")
    ['dict[str, int | None]', 'str', 'None']
    """
    parts, depth = [""], 0
    for letter in annotation:
        depth += (letter in "[(") - (letter in "])")
        if letter == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _kind(word: str, door: Callable[..., Any]) -> Callable[[str, Any], Any] | None:
    """What one of the alternatives of an annotation asks for."""
    if word.startswith("Literal["):
        return functools.partial(_one_of, re.findall(r'"([^"]*)"|\'([^\']*)\'', word))
    plain, _, inside = word.partition("[")
    if plain in ("Sequence", "Iterable", "Collection", "list", "tuple"):
        inner = _kind(inside.removesuffix("]").removesuffix(", ..."), door)
        return functools.partial(_a_sequence, tuple if plain == "tuple" else list, inner)
    if plain in _KINDS:
        return _KINDS[plain]
    found: Any = door.__globals__.get(plain.partition(".")[0])
    for part in plain.split(".")[1:]:
        found = getattr(found, part, None)
    plain_class = isinstance(found, type) and found is not Any and not getattr(found, "_is_protocol", False)
    return functools.partial(_an_instance, found) if plain_class else None


def _first_of(checks: list[Callable[[str, Any], Any]], name: str, value: Any) -> Any:
    """What the first check makes of a value that does not refuse it; else what the last one says."""
    for check in checks[:-1]:
        try:
            return check(name, value)
        except (TypeError, ValueError):
            continue
    return checks[-1](name, value)


def _one_of(words: list[tuple[str, str]], name: str, value: Any) -> Any:
    return choice(name, value, [double or single for double, single in words])


def _an_instance(kind: type, name: str, value: Any) -> Any:
    return instance(name, value, kind, a_kind(kind))


def _a_path(name: str, value: Any) -> Any:
    location(name, value)
    return value


def _an_integer(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} must be a whole number, got {shown(value)}")
    try:
        plain = operator.index(value)
    except Exception:  # a tensor that is no whole number, or something of the user's that fails
        raise TypeError(f"{name} must be a whole number, got {shown(value)}") from None
    if abs(plain) >= 2**64:
        raise ValueError(f"{name} must be a whole number of at most 64 bits, got {shown(plain)}")
    return plain


def _a_text(name: str, value: Any) -> str:
    return instance(name, value, str, "a text")


def _a_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.is_meta:
        raise TypeError(f"{name} must be a tensor with content, got one on the device meta")
    return dense(name, value)


def _a_sequence(kind: type, inner: Callable[[str, Any], Any] | None, name: str, value: Any) -> Any:
    """Something to go through, of which each is asked; tensors, arrays and ranges stay what they are."""
    short_range = isinstance(value, range) and value == value[:MOST_NUMBERS]
    plain = short_range or (isinstance(value, (Tensor, np.ndarray)) and value.ndim)
    if plain and kind is list and inner in (None, number, _an_integer):
        return value
    letters_or_names = inner is _a_text and isinstance(value, (str, dict, set, frozenset))
    values = list(value) if letters_or_names else elements(name, value, "a sequence")
    return kind(values if inner is None else [inner(f"an entry of {name}", each) for each in values])


#: By the word with which an annotation begins.
_KINDS: dict[str, Callable[[str, Any], Any]] = {
    "int": _an_integer,
    "float": number,
    "bool": flag,
    "str": _a_text,
    "Tensor": _a_tensor,
    "torch.Tensor": _a_tensor,
    "torch.dtype": lambda name, value: instance(name, value, torch.dtype, "a type, such as torch.float32"),
    "Callable": function,
    "nn.Module": lambda name, value: network(value, name),
    "dict": lambda name, value: instance(name, value, Mapping, "a dictionary"),
    "Mapping": lambda name, value: instance(name, value, Mapping, "a dictionary"),
}
