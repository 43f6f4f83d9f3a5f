"""How committee machines are trained: the settings of Appendix B.1 as data.

Conventions where the paper is silent or cannot be meant literally:

* The gradient is that of the loss summed over the mini-batch of 100 (``gradient_scale=100`` times the mean), beside the
  elastic term at its printed strength. With the mean, the printed learning rates are too small to end.
* beta, omega and gamma grow once an epoch. An epoch is one pass over the training set; for eSGD it is as many *outer*
  steps as one pass has mini-batches, that is L passes.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from wideflat.checks import choice, flag, instance, number, whole
from wideflat.checks.doors import asks
from wideflat.committee.machine import check_hidden

__all__ = ["SETTINGS", "Setting", "changes_from"]


class Kind(NamedTuple):
    """What an algorithm is: the rules that can end it, and which of the two loops of the paper it has."""

    rules: tuple[str, ...]
    replicated: bool = False
    has_inner_loop: bool = False


KINDS = {
    "sgd": Kind(("errors", "loss")),
    "rsgd": Kind(("errors", "distance"), replicated=True),
    "esgd": Kind(("errors", "distance"), has_inner_loop=True),
}


@dataclass(frozen=True)
class Setting:
    """How to train a committee machine: an algorithm with its schedules and its stopping rule (Appendix B.1).

    beta(t) = min(tanh_beta0 (1 + tanh_beta1)^t, tanh_beta_max), and so for omega and (without a limit) gamma, where t
    counts epochs from 0. The limits are ours: without them omega and beta of the long rSGD runs grow beyond 1e7 and the
    gradient dies.

    Attributes:
        algorithm: ``"sgd"``, ``"rsgd"`` (Algorithm 2) or ``"esgd"`` (Algorithm 1).
        lr: eta. For eSGD the outer learning rate.
        tanh_beta0: Slope of the surrogate at the start.
        tanh_beta1: Its growth an epoch.
        omega0: Scale in the loss at the start.
        omega1: Its growth an epoch.
        stop: What ends a restart: ``"errors"`` (no training errors), ``"loss"`` (loss on the training set below
            ``tolerance``), ``"distance"`` (rSGD: mean over replicas of half the squared distance from the barycenter;
            eSGD: half the squared distance of w and mu; below ``tolerance``). Tested after every epoch.
        tolerance: See ``stop``.
        max_epochs: A restart that has not met its rule by then ends without.
        num_replicas: y of rSGD.
        gamma0: Strength of the elastic coupling at the start.
        gamma1: Its growth an epoch.
        period: K of Algorithm 2: replicas feel K gamma (w - barycenter) at every K-th step.
        inner_lr: eta' of eSGD.
        inner_steps: L of eSGD.
        epsilon: Noise of eSGD.
        alpha: Averaging of eSGD; the appendix does not print it, 0.75 is that of the main text.
        hidden: H.
        batch_size: Patterns in a mini-batch. The last one of an epoch is smaller where they do not divide evenly.
        gradient_scale: Multiplies the gradient of the mean loss; 100 with a batch of 100 is the sum. Ours.
        dropout: Probability of leaving out a hidden unit in training (Appendix B.3).
        tanh_beta_max: Limit of beta. Ours.
        omega_max: Limit of omega. Ours.
        align: Permute the hidden units of each replica to match those of the first before training and at every
            refresh (see :func:`train`). Units of a committee can be permuted freely, but the barycenter of replicas
            with unmatched units is not like any of them. Ours.
        polish_epochs: After the rule is met, at most so many epochs of plain SGD that end at zero training errors.
            Only solutions that have errors are polished, and what it did is recorded. Ours.
        polish_lr: Learning rate of the polish (with ``gradient_scale``).
        polish_beta0: Slope at the start of the polish.
        polish_beta1: Its growth an epoch.
        polish_omega: Scale in the loss of the polish.
        typical_epochs: What to expect; used for the estimate of the time left and nothing else.
        note: Where the setting comes from.
    """

    algorithm: str
    lr: float
    tanh_beta0: float
    tanh_beta1: float
    omega0: float
    omega1: float
    stop: str
    tolerance: float = 0.0
    max_epochs: int = 20_000
    num_replicas: int = 1
    gamma0: float = 0.0
    gamma1: float = 0.0
    period: int = 1
    inner_lr: float = 0.0
    inner_steps: int = 1
    epsilon: float = 0.0
    alpha: float = 0.75
    hidden: int = 9
    batch_size: int = 100
    gradient_scale: float = 100.0
    dropout: float = 0.0
    tanh_beta_max: float = 1000.0
    omega_max: float = 1000.0
    align: bool = False
    polish_epochs: int = 0
    polish_lr: float = 1e-5
    polish_beta0: float = 2.0
    polish_beta1: float = 0.01
    polish_omega: float = 5.0
    typical_epochs: int = 1000
    note: str = ""

    def __post_init__(self) -> None:
        rules = KINDS[choice("algorithm", self.algorithm, KINDS)].rules
        choice(f"stop of {self.algorithm}", self.stop, rules)
        check_hidden(self.hidden)
        self._check_numbers()
        if self.replicated and self.num_replicas < 2:
            raise ValueError(f"{self.algorithm} needs num_replicas >= 2, got {self.num_replicas}")
        if not self.replicated and self.num_replicas != 1:
            raise ValueError(f"num_replicas is for rsgd; {self.algorithm} got {self.num_replicas}")
        if self.has_inner_loop and not self.inner_lr > 0:
            raise ValueError(f"{self.algorithm} needs inner_lr > 0, got {self.inner_lr}")

    def _check_numbers(self) -> None:
        for name in ("lr", "tanh_beta0", "omega0", "gradient_scale", "tanh_beta_max", "omega_max", "polish_lr"):
            number(name, getattr(self, name), above=0)
        for name in ("max_epochs", "num_replicas", "period", "inner_steps", "batch_size"):
            whole(name, getattr(self, name), 1)
        for name in ("polish_epochs", "typical_epochs"):
            whole(name, getattr(self, name))
        for name in ("tanh_beta1", "omega1", "gamma0", "gamma1", "epsilon", "tolerance", "inner_lr"):
            number(name, getattr(self, name), 0)
        for name in ("polish_beta0", "polish_beta1", "polish_omega"):
            number(name, getattr(self, name))
        flag("align", self.align)
        instance("note", self.note, str, "a text")
        if not number("dropout", self.dropout, 0) < 1:
            raise ValueError(f"dropout must be a probability below 1, got {self.dropout}")
        if not number("alpha", self.alpha, 0) < 1:
            raise ValueError(f"alpha must be in [0, 1), got {self.alpha}")

    @property
    def replicated(self) -> bool:
        """Whether there are replicas that attract each other (Algorithm 2)."""
        return KINDS[self.algorithm].replicated

    @property
    def has_inner_loop(self) -> bool:
        """Whether an explorer makes L steps for one of the weights (Algorithm 1)."""
        return KINDS[self.algorithm].has_inner_loop

    @property
    def passes(self) -> int:
        """Passes of one network over the patterns in an epoch: L with an inner loop, else 1."""
        return self.inner_steps if self.has_inner_loop else 1

    @property
    def passes_per_epoch(self) -> int:
        """Passes over the patterns in an epoch, of all replicas together; eSGD makes L."""
        return self.num_replicas * self.passes

    def tanh_beta(self, epoch: int) -> float:
        """Slope of the surrogate in epoch ``epoch`` (from 0)."""
        return _schedule(self.tanh_beta0, self.tanh_beta1, epoch, self.tanh_beta_max)

    def omega(self, epoch: int) -> float:
        """Scale in the loss in epoch ``epoch``."""
        return _schedule(self.omega0, self.omega1, epoch, self.omega_max)

    def gamma(self, epoch: int) -> float:
        """Strength of the elastic coupling in epoch ``epoch``."""
        return _schedule(self.gamma0, self.gamma1, epoch, math.inf)

    def replace(self, **changes: Any) -> Setting:
        """The same setting with some options changed.

        Example:
            >>> SETTINGS["sgd-fast"].replace(dropout=0.3).dropout
            0.3
        """
        return dataclasses.replace(self, **changes)

    def identity(self) -> dict[str, Any]:
        """All options that a training depends on: settings that agree in them give the same solutions."""
        return {name: value for name, value in vars(self).items() if name not in ("note", "typical_epochs")}


@asks
def changes_from(texts: Iterable[str]) -> dict[str, Any]:
    """Changes of a setting from texts like ``dropout=0.3``, for :meth:`Setting.replace`.

    Example:
        >>> changes_from(["align=true", "polish_epochs=300", "dropout=0.3"])
        {'align': True, 'polish_epochs': 300, 'dropout': 0.3}
    """
    kinds = {entry.name: str(entry.type) for entry in dataclasses.fields(Setting)}
    changes: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or name not in kinds or name in ("algorithm", "note", "typical_epochs"):
            names = [n for n in kinds if n not in ("algorithm", "note", "typical_epochs")]
            hint = "".join(f"; did you mean {near!r}?" for near in difflib.get_close_matches(name, names, n=1))
            raise ValueError(
                f"a change of a setting is NAME=VALUE with one of the names {', '.join(names)}; got {text!r}{hint}"
            )
        try:
            if kinds[name] == "bool":
                changes[name] = {"true": True, "false": False}[value.lower()]
            else:
                changes[name] = {"int": int, "float": float, "str": str}[kinds[name]](value)
        except (KeyError, ValueError):
            expected = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kinds[name]]
            raise ValueError(f"{name} is {expected}, got {value!r}") from None
    return changes


def _schedule(start: float, rate: float, epoch: int, limit: float) -> float:
    return min(start * math.exp(min(epoch * math.log1p(rate), 600.0)), limit)


#: The five settings of Appendix B.1. Every number that is not a default of :class:`Setting` is printed there, except
#: ``max_epochs`` and ``typical_epochs``.
SETTINGS: dict[str, Setting] = {
    "sgd-fast": Setting(
        "sgd",
        lr=2e-4,
        tanh_beta0=2.0,
        tanh_beta1=1e-4,
        omega0=5.0,
        omega1=0.0,
        stop="errors",
        max_epochs=20_000,
        typical_epochs=1000,
        note="Appendix B.1, SGD fast: stops as soon as there are no training errors",
    ),
    "sgd-slow": Setting(
        "sgd",
        lr=3e-5,
        tanh_beta0=0.5,
        tanh_beta1=1e-3,
        omega0=0.5,
        omega1=1e-3,
        stop="loss",
        tolerance=1e-7,
        max_epochs=10_000,
        typical_epochs=4000,
        note="Appendix B.1, SGD slow: stops at a loss below 1e-7",
    ),
    "rsgd-fast": Setting(
        "rsgd",
        lr=1e-4,
        num_replicas=10,
        gamma0=2e-3,
        gamma1=2e-3,
        tanh_beta0=1.0,
        tanh_beta1=2e-4,
        omega0=0.5,
        omega1=1e-3,
        stop="distance",
        tolerance=1e-8,
        max_epochs=20_000,
        typical_epochs=5000,
        note="Appendix B.1, rSGD fast: stops with the replicas within 1e-8 of their barycenter",
    ),
    "rsgd-slow": Setting(
        "rsgd",
        lr=1e-3,
        num_replicas=10,
        gamma0=1e-4,
        gamma1=1e-4,
        tanh_beta0=1.0,
        tanh_beta1=2e-4,
        omega0=0.5,
        omega1=1e-3,
        stop="distance",
        tolerance=1e-8,
        max_epochs=150_000,
        typical_epochs=90_000,
        note="Appendix B.1, rSGD slow: as rSGD fast, with a slower growth of gamma",
    ),
    "esgd": Setting(
        "esgd",
        lr=1e-3,
        inner_lr=5e-3,
        inner_steps=20,
        epsilon=1e-6,
        gamma0=10.0,
        gamma1=5e-5,
        tanh_beta0=1.0,
        tanh_beta1=1e-4,
        omega0=0.5,
        omega1=5e-4,
        stop="distance",
        tolerance=1e-8,
        max_epochs=30_000,
        typical_epochs=9000,
        note="Appendix B.1, eSGD: stops with w and mu within 1e-8",
    ),
}
