"""What the functions that make networks ask of their arguments, by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from wideflat.checks import choice, number, shown, whole

__all__ = ["checked"]

P = ParamSpec("P")
R = TypeVar("R")

#: Wider images and more classes are never meant; their networks would fill the memory.
MOST_PIXELS, MOST_CLASSES = 4096, 10**6

CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "num_classes": lambda name, value: whole(name, value, 1, MOST_CLASSES),
    "in_channels": lambda name, value: whole(name, value, 1, MOST_PIXELS),
    "image_size": lambda name, value: whole(name, value, 1, MOST_PIXELS),
    "alpha": lambda name, value: number(name, value, 0, MOST_PIXELS),
    "dropout": lambda name, value: number(name, value, 0, 1),
    "drop": lambda name, value: number(name, value, 0, 1),
    "stochastic_depth": lambda name, value: number(name, value, 0, 1),
    "stem": lambda name, value: choice(name, value, ("cifar", "imagenet")),
    "option": lambda name, value: choice(name, value, ("A", "B")),
    "widths": lambda name, value: _widths(name, value),
}


def checked(make: Callable[P, R]) -> Callable[P, R]:
    """A function that makes a network, with its arguments checked by their names.

    Example:
        >>> @checked
        ... def network(num_classes: int = 10) -> int:
        ...     return num_classes
        >>> network("10")
        Traceback (most recent call last):
        ...
        TypeError: num_classes must be a whole number >= 1, got '10'
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            given.arguments[name] = CHECKS[name](name, value)
        return make(*given.args, **given.kwargs)

    return checking


def _widths(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise TypeError(f"{name} must be a sequence of whole numbers >= 1, got {shown(value)}")
    return tuple(whole(name, width, 1, MOST_PIXELS) for width in value)
