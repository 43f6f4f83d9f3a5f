r"""The committee machine of Sec. 5 and Appendix B.1: network, loss, the five training settings, the trained solutions.

A committee of H units votes on a pattern x with N inputs (Eq. 7):

    y(w, x) = sign[ 1/sqrt(H) sum_h sign(w_h . x) ]

Gradients come from the surrogate tanh(beta z) in place of the hidden sign(z), and from the loss of Eq. 8. Only the
direction of each w_h matters, so every hidden unit is kept at norm one. :func:`train` trains many restarts at once.

Conventions where the paper is silent or cannot be meant literally:

* |w_h| = 1 with pre-activation w_h . x, which is the same as |w_h| = sqrt(N) with w_h . x / sqrt(N). (Norm one *and*
  the factor 1/sqrt(N) of Eq. 7 would leave tanh linear.)
* The gradient is that of the loss summed over the mini-batch of 100 (``gradient_scale=100`` times the mean), beside the
  elastic term at its printed strength. With the mean, the printed learning rates are too small to end.
* beta, omega and gamma grow once an epoch. An epoch is one pass over the training set; for eSGD it is as many *outer*
  steps as one pass has mini-batches, that is L passes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat import interruption
from wideflat.files import atomic_write

__all__ = [
    "SETTINGS",
    "CommitteeMachine",
    "Interrupted",
    "Setting",
    "Solutions",
    "balanced_error",
    "committee_loss",
    "errors",
    "train",
]


class Interrupted(interruption.Interrupted):
    """Training was interrupted with Ctrl-C; ``solutions`` holds what there is, unfinished restarts included."""

    def __init__(self, message: str, solutions: Solutions) -> None:
        super().__init__(message)
        self.solutions = solutions


class CommitteeMachine(nn.Module):
    r"""A network of ``hidden`` sign units that vote with equal weight (Eq. 7).

    In training mode the output is the differentiable surrogate 1/sqrt(H) sum_h tanh(beta w_h . x), with dropout of
    hidden units if asked for. In evaluation mode it is the exact network 1/sqrt(H) sum_h sign(w_h . x), where
    sign(0) = +1: an odd multiple of 1/sqrt(H), never zero, whose sign is the answer.

    Args:
        num_inputs: N.
        hidden: H, an odd number, so that no vote is a tie.
        tanh_beta: The slope beta; set the attribute ``tanh_beta`` to change it while training.
        dropout: The probability with which a hidden unit is left out of the surrogate in training mode.
        generator: Source of the initial weights, which are uniform and then normalised.
        device: Where the weights live.
        dtype: Their type.

    Attributes:
        weight: The only parameter, (H, N). Call :meth:`normalize_` after each update to keep its rows at norm one.

    Example:
        Two of three units say yes:

        >>> network = CommitteeMachine(2, hidden=3)
        >>> with torch.no_grad():
        ...     _ = network.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, -0.8]]))
        >>> (network.eval()(torch.tensor([[1.0, 1.0]])) * 3**0.5).round()
        tensor([1.])
        >>> network.predict(torch.tensor([[1.0, 1.0], [-1.0, 1.0]]))
        tensor([ 1., -1.])

        It trains like any other network:

        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> loss = committee_loss(network.train()(torch.tensor([[1.0, 1.0]])), torch.tensor([-1.0]), omega=5.0)
        >>> loss.backward(); optimizer.step(); network.normalize_()
        >>> network.weight.norm(dim=1).detach().allclose(torch.ones(3))
        True
    """

    def __init__(
        self,
        num_inputs: int,
        hidden: int = 9,
        *,
        tanh_beta: float = 1.0,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_inputs < 1:
            raise ValueError(f"num_inputs must be >= 1, got {num_inputs}")
        _check_hidden(hidden)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a probability below 1, got {dropout}")
        if tanh_beta <= 0:
            raise ValueError(f"tanh_beta must be > 0, got {tanh_beta}")
        self.num_inputs, self.hidden, self.dropout, self.tanh_beta = num_inputs, hidden, dropout, tanh_beta
        weight = torch.rand(hidden, num_inputs, generator=generator, dtype=dtype) * 2 - 1
        self.weight = nn.Parameter(weight.to(device))
        self.normalize_()

    def forward(self, x: Tensor) -> Tensor:
        """The surrogate output in training mode, the scaled vote in evaluation mode; shape (..., N) -> (...)."""
        if self.training:
            return self.surrogate(x)
        vote = torch.where(F.linear(x, self.weight) >= 0, 1.0, -1.0).to(x.dtype)
        return vote.sum(dim=-1) / math.sqrt(self.hidden)

    def surrogate(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """1/sqrt(H) sum_h tanh(beta w_h . x), whatever the mode.

        Args:
            x: Patterns, (..., N).
            mask: Factors of the hidden units, (..., H), in place of those that dropout draws in training mode.
        """
        hidden = torch.tanh(self.tanh_beta * F.linear(x, self.weight))
        hidden = F.dropout(hidden, self.dropout, self.training) if mask is None else hidden * mask
        return hidden.sum(dim=-1) / math.sqrt(self.hidden)

    def predict(self, x: Tensor) -> Tensor:
        """The answer of the exact network, +1 or -1, whatever the mode."""
        votes = torch.where(F.linear(x, self.weight) >= 0, 1.0, -1.0).sum(dim=-1)
        return torch.where(votes >= 0, 1.0, -1.0).to(x.dtype)

    @torch.no_grad()
    def normalize_(self) -> None:
        """Give the weights of every hidden unit norm one, in place."""
        self.weight.div_(self.weight.norm(dim=1, keepdim=True))

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"num_inputs={self.num_inputs}, hidden={self.hidden}, tanh_beta={self.tanh_beta}, dropout={self.dropout}"


def committee_loss(output: Tensor, target: Tensor, omega: float | Tensor, reduction: str = "mean") -> Tensor:
    r"""The cross entropy of Eq. 8 with the scale omega: f(x) = -x/2 + log(2 cosh(omega x)) / (2 omega), x = y * output.

    Computed as log(1 + exp(-2 omega x)) / (2 omega), which is the same and neither overflows nor cancels.

    Args:
        output: What the network says, any shape.
        target: The labels +1 and -1, same shape.
        omega: The scale, > 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Example:
        f(0) = log(2) / (2 omega); for a large omega the loss is max(-x, 0):

        >>> one = torch.ones(1)
        >>> round(committee_loss(0 * one, one, omega=0.5).item(), 6)
        0.693147
        >>> committee_loss(torch.tensor([-2.0, 3.0]), torch.ones(2), omega=1e6, reduction="none").abs()
        tensor([2., 0.])
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    loss = -F.logsigmoid(2 * omega * target * output) / (2 * omega)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def errors(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The number of patterns that committees (..., H, N) get wrong, exactly (Eq. 7, sign(0) = +1); shape (...).

    Example:
        >>> errors(torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]]), torch.tensor([[2.0, 1.0]]), torch.tensor([1.0]))
        tensor([0, 1])
    """
    return _wrong(weight, inputs, targets).sum(dim=-1)


def balanced_error(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of the error rates in the two classes, for committees (..., H, N); NaN without patterns of a class."""
    wrong = _wrong(weight, inputs, targets).double()
    return torch.stack([wrong[..., targets == label].mean(dim=-1) for label in (-1, 1)]).mean(dim=0)


def _wrong(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    inputs = inputs.to(weight.dtype)
    rows = weight.reshape(-1, *weight.shape[-2:])  # one committee at a time: its answer must not depend on the others
    votes = [(unit @ inputs.T >= 0).sum(dim=0) * 2 > weight.shape[-2] for unit in rows]
    answers = torch.stack(votes) if votes else torch.empty(0, len(inputs), dtype=torch.bool)
    return (answers != (targets > 0)).reshape(*weight.shape[:-2], len(inputs))


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
        rules = {"sgd": ("errors", "loss"), "rsgd": ("errors", "distance"), "esgd": ("errors", "distance")}
        if self.algorithm not in rules:
            raise ValueError(f'algorithm must be "sgd", "rsgd" or "esgd", got {self.algorithm!r}')
        if self.stop not in rules[self.algorithm]:
            raise ValueError(f"stop must be one of {rules[self.algorithm]} for {self.algorithm}, got {self.stop!r}")
        _check_hidden(self.hidden)
        positive = ("lr", "tanh_beta0", "omega0", "gradient_scale", "tanh_beta_max", "omega_max", "polish_lr")
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("max_epochs", "num_replicas", "period", "inner_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("tanh_beta1", "omega1", "gamma0", "gamma1", "epsilon", "tolerance", "polish_epochs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be a probability below 1, got {self.dropout}")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha must be in [0, 1), got {self.alpha}")
        if self.algorithm == "rsgd" and self.num_replicas < 2:
            raise ValueError(f"rsgd needs num_replicas >= 2, got {self.num_replicas}")
        if self.algorithm != "rsgd" and self.num_replicas != 1:
            raise ValueError(f"num_replicas is for rsgd; {self.algorithm} got {self.num_replicas}")
        if self.algorithm == "esgd" and not self.inner_lr > 0:
            raise ValueError(f"esgd needs inner_lr > 0, got {self.inner_lr}")

    @property
    def passes_per_epoch(self) -> int:
        """Passes over the patterns in an epoch, of all replicas together; eSGD makes L."""
        return self.num_replicas * (self.inner_steps if self.algorithm == "esgd" else 1)

    def tanh_beta(self, epoch: int) -> float:
        """Slope of the surrogate in epoch ``epoch`` (from 0)."""
        return _schedule(self.tanh_beta0, self.tanh_beta1, epoch, self.tanh_beta_max)

    def omega(self, epoch: int) -> float:
        """Scale in the loss in epoch ``epoch``."""
        return _schedule(self.omega0, self.omega1, epoch, self.omega_max)

    def gamma(self, epoch: int) -> float:
        """Strength of the elastic coupling in epoch ``epoch``."""
        return _schedule(self.gamma0, self.gamma1, epoch, math.inf)

    def but(self, **changes: Any) -> Setting:
        """The same setting with some options changed.

        Example:
            >>> SETTINGS["sgd-fast"].but(dropout=0.3).dropout
            0.3
        """
        return dataclasses.replace(self, **changes)

    def identity(self) -> dict[str, Any]:
        """All options that a training depends on: settings that agree in them give the same solutions."""
        return {name: value for name, value in vars(self).items() if name not in ("note", "typical_epochs")}


def changes_from(texts: Iterable[str]) -> dict[str, Any]:
    """Changes of a setting from texts like ``dropout=0.3``, for :meth:`Setting.but`.

    Example:
        >>> changes_from(["align=true", "polish_epochs=300", "dropout=0.3"])
        {'align': True, 'polish_epochs': 300, 'dropout': 0.3}
    """
    kinds = {entry.name: str(entry.type) for entry in dataclasses.fields(Setting)}
    changes: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or name not in kinds or name in ("algorithm", "note", "typical_epochs"):
            names = ", ".join(n for n in kinds if n not in ("algorithm", "note", "typical_epochs"))
            raise ValueError(f"a change of a setting is NAME=VALUE with one of the names {names}; got {text!r}")
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


def _check_hidden(hidden: int) -> None:
    if hidden < 1 or hidden % 2 == 0:
        raise ValueError(f"hidden must be an odd number, so that no vote is a tie; got {hidden}")


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


@dataclass
class Solutions:
    """What training left: the weights of every restart, with an honest record of how each ended.

    Attributes:
        weights: (R, H, N), rows of norm one. For rSGD the normalised barycenter, for eSGD w.
        inputs: The training inputs, (P, N).
        targets: Their labels.
        test_inputs: The test inputs, (Q, N); Q may be 0.
        test_targets: Their labels.
        name: Name of the setting, or of the algorithm for one that has no name.
        setting: Every option that the solutions were trained with.
        seeds: Seed of each restart.
        epochs: Epochs that each restart took (the polish not counted).
        stop: Why each ended: ``"errors"``, ``"loss"``, ``"distance"`` for the rule of its setting, ``"max_epochs"`` or
            ``"interrupted"`` without it.
        value: What the rule measures, at the end: training errors, loss or distance.
        errors_before: Training errors before the polish.
        train_errors: Training errors of ``weights``.
        polish_epochs: Epochs that the polish took; 0 where there was none.
        polish_movement: |w_after - w_before|^2 / H of the polish.
        test_error: Fraction of test patterns that are wrong; NaN without a test set.
        balanced_test_error: Mean of that fraction in the two classes.
        options: How it was computed (number format, form, source of the patterns).
    """

    weights: Tensor
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    name: str
    setting: Setting
    seeds: list[int]
    epochs: list[int]
    stop: list[str]
    value: list[float]
    errors_before: list[int]
    train_errors: list[int]
    polish_epochs: list[int]
    polish_movement: list[float]
    test_error: list[float]
    balanced_test_error: list[float]
    options: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def reached(self) -> list[bool]:
        """Whether each restart met the stopping rule of its setting."""
        return [stop == self.setting.stop for stop in self.stop]

    @property
    def solved(self) -> list[bool]:
        """Whether each restart has no training errors. Only such references belong in a ranking by local entropy."""
        return [count == 0 for count in self.train_errors]

    def machine(self, restart: int) -> CommitteeMachine:
        """The network of one restart, in evaluation mode."""
        hidden, num_inputs = self.weights.shape[1:]
        network = CommitteeMachine(num_inputs, hidden, dtype=self.weights.dtype)
        network.weight.data.copy_(self.weights[restart])
        return network.eval()

    def summary(self) -> dict[str, float]:
        """Means over the restarts: shares reached and solved, epochs, errors before the polish, test errors and spread.

        The spread is the standard deviation between restarts (NaN for a single one).
        """
        test = np.array(self.test_error, dtype=float)
        balanced = np.array(self.balanced_test_error, dtype=float)
        with np.errstate(invalid="ignore"):
            return {
                "restarts": len(self),
                "reached": float(np.mean(self.reached)),
                "solved_before_polish": float(np.mean(np.array(self.errors_before) == 0)),
                "solved": float(np.mean(self.solved)),
                "epochs": float(np.mean(self.epochs)),
                "epochs_least": float(np.min(self.epochs)),
                "epochs_most": float(np.max(self.epochs)),
                "errors_before": float(np.mean(self.errors_before)),
                "test_error": float(test.mean()),
                "test_error_spread": float(test.std(ddof=1)) if len(test) > 1 else math.nan,
                "balanced_test_error": float(balanced.mean()),
                "balanced_test_error_spread": float(balanced.std(ddof=1)) if len(test) > 1 else math.nan,
            }

    def subset(self, restarts: Sequence[int]) -> Solutions:
        """The solutions of some restarts, by position."""
        chosen: dict[str, Any] = {name: [getattr(self, name)[i] for i in restarts] for name in _RECORD}
        return dataclasses.replace(self, weights=self.weights[list(restarts)], **chosen)

    def joined(self, more: Solutions) -> Solutions:
        """These solutions and others of the same setting on the same patterns."""
        if self.setting.identity() != more.setting.identity() or not torch.equal(self.inputs, more.inputs):
            raise ValueError("only solutions of one setting on the same training patterns can be joined")
        both: dict[str, Any] = {name: getattr(self, name) + getattr(more, name) for name in _RECORD}
        return dataclasses.replace(self, weights=torch.cat([self.weights, more.weights]), **both)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one ``.npz`` file of plain arrays and JSON, whole or not at all."""
        metadata = {
            "format": _FORMAT,
            "name": self.name,
            "setting": dataclasses.asdict(self.setting),
            "options": self.options,
            **{name: getattr(self, name) for name in _RECORD},
        }
        with atomic_write(path, "wb") as file:
            np.savez_compressed(
                file,
                metadata=np.array(json.dumps(metadata)),
                weights=self.weights.numpy(),
                inputs=_compact(self.inputs),
                targets=_compact(self.targets),
                test_inputs=_compact(self.test_inputs),
                test_targets=_compact(self.test_targets),
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Solutions:
        """Read what :meth:`save` wrote. Nothing is unpickled; a file that is damaged or something else is an error."""
        where = os.fspath(path)
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files}
            metadata = json.loads(str(arrays.pop("metadata")))
            if metadata.pop("format") != _FORMAT:
                raise ValueError("another format")
            known = {item.name for item in dataclasses.fields(Setting)}
            setting = Setting(**{name: value for name, value in metadata.pop("setting").items() if name in known})
            weights = torch.from_numpy(arrays.pop("weights"))
            tensors: dict[str, Any] = {n: torch.from_numpy(arrays[n]).to(torch.float32) for n in _PATTERNS}
            return cls(weights=weights, setting=setting, **tensors, **metadata)
        except (zipfile.BadZipFile, EOFError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{where} is not a whole file of committee solutions ({error}); such files are written by "
                "`wideflat train committee-...` and Solutions.save"
            ) from error


_FORMAT = "wideflat committee solutions 1"
_PATTERNS = ("inputs", "targets", "test_inputs", "test_targets")
_RECORD = (
    "seeds",
    "epochs",
    "stop",
    "value",
    "errors_before",
    "train_errors",
    "polish_epochs",
    "polish_movement",
    "test_error",
    "balanced_test_error",
)


def _compact(patterns: Tensor) -> np.ndarray:
    """Patterns as int8 where that loses nothing."""
    small = patterns.to(torch.int8)
    return (small if torch.equal(small.to(patterns.dtype), patterns) else patterns).numpy()


def train(
    setting: Setting | str,
    inputs: Tensor,
    targets: Tensor,
    seeds: Sequence[int] = range(50),
    *,
    test_inputs: Tensor | None = None,
    test_targets: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    form: str = "auto",
    refresh: int = 50,
    threads: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    source: str = "arrays",
) -> Solutions:
    """Train committee machines from many random restarts together (Algorithms 1 and 2, Appendix B.1).

    Every restart has its own seed, which sets its initial weights and the order of its data; what it does depends on
    that seed alone, bit for bit, not on the restarts beside it nor on the number of threads.

    Args:
        setting: A :class:`Setting`, or the name of one of :data:`SETTINGS`.
        inputs: Training patterns, (P, N), +-1 or real.
        targets: Their labels, +1 or -1.
        seeds: One restart for each.
        test_inputs: Patterns to measure the test error on.
        test_targets: Their labels.
        dtype: float32 or float64.
        form: How a step is computed. ``"gram"`` works on the pre-activations of all training patterns through their
            Gram matrix (about P H B multiplications a step with a batch of B), ``"direct"`` on the weights (2 N H B).
            They agree up to rounding, except for the noise of eSGD: ``"direct"`` adds it at every inner step, while
            ``"gram"`` adds it to w at every refresh, with the variance gathered until then. ``"auto"`` takes
            ``"gram"`` where it is cheaper (P <= 1.5 N) and the noise too small to be felt in between.
        refresh: Epochs between two computations of the weights from scratch, which end the accumulation of rounding
            errors. State is saved there, and hidden units are aligned there if the setting says so.
        threads: Threads to compute on, by default ``torch.get_num_threads()``.
        checkpoint: A file to save the state to about twice a minute. If it is there, training goes on from it, and
            ends with the result of an uninterrupted run, bit for bit. It is deleted by the caller, not here.
        progress: Whether to show progress.
        source: Where the patterns come from, for the record.

    Raises:
        Interrupted: On Ctrl-C. Its ``solutions`` has what is done; with ``checkpoint`` nothing is lost.

    Example:
        Four patterns that one direction separates:

        >>> x = torch.tensor([[1.0, 1.0, -1.0], [1.0, -1.0, 1.0], [-1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
        >>> y = torch.tensor([1.0, 1.0, -1.0, -1.0])
        >>> setting = SETTINGS["sgd-fast"].but(hidden=3, batch_size=2, lr=1e-3)
        >>> solutions = train(setting, x, y, seeds=range(3), progress=False)
        >>> solutions.train_errors, solutions.stop
        ([0, 0, 0], ['errors', 'errors', 'errors'])
    """
    from wideflat.committee.training import run
    from wideflat.data.patterns import Patterns

    if isinstance(setting, str) and setting not in SETTINGS:
        raise ValueError(f"there is no setting {setting!r}; there are {', '.join(SETTINGS)}")
    name = setting if isinstance(setting, str) else next((k for k, v in SETTINGS.items() if v == setting), None)
    setting = SETTINGS[setting] if isinstance(setting, str) else setting
    patterns = Patterns.from_arrays(inputs, targets, test_inputs, test_targets, source)
    return run(
        setting,
        patterns,
        [int(seed) for seed in seeds],
        name=name or setting.algorithm,
        dtype=dtype,
        form=form,
        refresh=refresh,
        threads=threads,
        checkpoint=checkpoint,
        progress=progress,
    )
