"""What is asked of the settings that the entropic family has: at the door, and where they were changed since."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from wideflat.checks import LARGEST, flag, number, shown, whole

__all__ = [
    "check_cycle",
    "check_entropy_sgd",
    "check_numbers_of_torch",
    "explained",
    "phase_of",
    "refuse_differentiable",
    "warn_of_adam",
]

F = TypeVar("F", bound=Callable[..., Any])


def check_cycle(settings: dict[str, Any]) -> None:
    """Refuse values that cannot be meant, of the settings that all of the entropic family have."""
    number("epsilon", settings["epsilon"], 0, LARGEST)
    number("alpha", settings["alpha"], 0, 1)
    steps = settings["inner_steps"]
    if not isinstance(steps, int) or whole("inner_steps", steps, 1) != steps:  # Python's own, which any file can hold
        raise TypeError(f"inner_steps must be a whole number >= 1, got {shown(steps)}")
    for name in ("position", "step"):  # of a group that somebody has changed
        counter = settings.get(name, 0)  # a tensor of one number where steps are captured
        if not isinstance(counter, Tensor) or counter.is_nested or counter.numel() != 1:
            whole(name, counter)
    if not isinstance(settings["seed"], int):
        raise ValueError(f"seed must be a whole number, got {shown(settings['seed'])}")


def check_numbers_of_torch(inner: Optimizer) -> None:
    """Refuse a setting of torch's that is no number: asked where a step of it has failed, in torch's own words.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> sgd.param_groups[0]["weight_decay"] = torch.ones(2)
    >>> check_numbers_of_torch(sgd)
    Traceback (most recent call last):
    ...
    TypeError: weight_decay must be a finite number, got a tensor of shape (2,)
    """
    for group in inner.param_groups:
        for name in ("lr", "weight_decay", "momentum", "dampening", "eps"):
            if group.get(name) is not None:
                number(name, group[name])


def explained(method: F) -> F:
    """A method of an optimizer; where it fails, a setting that was changed to what it cannot be is said so instead."""

    @functools.wraps(method)
    def tried(self: Any, *given: Any, **named: Any) -> Any:
        try:
            return method(self, *given, **named)
        except Exception:
            self._check_settings()
            raise

    return tried  # type: ignore[return-value]


def phase_of(groups: list[dict[str, Any]]) -> tuple[int, int]:
    """The position in the cycle and its length, the same in all groups."""
    try:
        positions = {int(settings["position"]) for settings in groups}
        lengths = {settings["inner_steps"] for settings in groups}
    except (TypeError, ValueError, RuntimeError, OverflowError):
        for settings in groups:
            check_cycle(settings)  # one that was changed since to what it cannot be is said so
        raise
    if len(positions) > 1 or len(lengths) > 1:
        raise ValueError(
            "all param groups go through the cycle together, but their positions are "
            f"{sorted(positions)} and their inner_steps {sorted(lengths)}; make them equal"
        )
    return positions.pop(), lengths.pop()


def check_entropy_sgd(group: dict[str, Any]) -> None:
    """Refuse values that cannot be meant, of a param group of Entropy-SGD."""
    if isinstance(group["lr"], Tensor) and not group["lr"].is_nested and group["lr"].numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got one of shape {tuple(group['lr'].shape)}")
    for name in ("lr", "inner_lr", "gamma", "epsilon", "weight_decay", "momentum"):
        number(name, group[name], 0, LARGEST)
    for name in ("outer_momentum", "outer_weight_decay"):
        if group[name] is not None:
            number(f"{name}, unless it is None,", group[name], 0, LARGEST)
    check_cycle(group)
    _check_nesterov(group, "nesterov", "momentum")
    _check_nesterov(group, "outer_nesterov", "outer_momentum")


def _check_nesterov(group: dict[str, Any], nesterov: str, momentum: str) -> None:
    if group[nesterov] is not None:
        flag(nesterov, group[nesterov])
    if group[nesterov] and not (group[momentum] or (group[momentum] is None and group["momentum"])):
        raise ValueError(f"{nesterov} needs a {momentum} > 0, got {group[momentum]}")


def refuse_differentiable(differentiable: bool) -> None:
    """Refuse what torch's optimizers mean by this: the weights are written in place here, and no graph can be kept."""
    if differentiable is not False:
        raise ValueError(
            "differentiable=True is not supported: w and w' are written in place, and no gradient goes through a step; "
            "unroll the steps by hand with torch.func.functional_call for that"
        )


def warn_of_adam(inner: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Warn where the pull of Entropy-SGD goes through an Adam that has few steps in a cycle.

    Args:
        inner: The inner optimizer.
        groups: The param groups of Entropy-SGD.
    """
    pulled = any(float(group["gamma"]) > 0 for group in groups)
    if pulled and groups[0]["inner_steps"] < 10 and any("betas" in group for group in inner.param_groups):
        warnings.warn(
            f"gamma > 0 in the gradient of {type(inner).__name__}, which divides by the size of its gradients, with "
            f"inner_steps = {groups[0]['inner_steps']} < 10: a small language model lost 0.39 nats a byte by it. Use "
            "wideflat.Entropic around it, whose pull is not in the gradient; or gamma = 0, or longer cycles",
            stacklevel=4,
        )
