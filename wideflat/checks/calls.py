"""What is said when something of the user's fails: that it is that, on what, and its own words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from wideflat.checks import shown

__all__ = ["called", "takes"]


def called(what: str, function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Call what the user gave; an error from deep inside of it says what failed on what.

    >>> import torch
    >>> called("the network", torch.nn.Linear(2, 1), torch.zeros(3))
    Traceback (most recent call last):
    ...
    RuntimeError: the network (Linear) fails on a tensor of shape (3,): mat1 and mat2 ...
    """
    try:
        return function(*inputs, **named)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        if type(error).__module__ != "builtins":  # it has a name that somebody waits for: a doubt, too little memory
            raise
        kind = type(error) if type(error) in (TypeError, ValueError) else RuntimeError
        name = getattr(function, "__name__", type(function).__name__)
        given = " and ".join([*map(shown, inputs), *(f"{key}={shown(value)}" for key, value in named.items())])
        raise kind(f"{what} ({name}) fails on {given}: {error}") from error


def takes(function: Callable[..., Any]) -> frozenset[str]:
    """The names of what a function of the user's takes; none of one that does not say, as some of Python's own.

    >>> sorted(takes(lambda num_classes, image_size=32: None)), sorted(takes(int))
    (['image_size', 'num_classes'], [])
    """
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()
