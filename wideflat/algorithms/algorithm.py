"""What an algorithm is: all that a training has to know of it, as one record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from wideflat.baselines.rmsprop import TensorFlowRMSprop
from wideflat.replicas import ReplicaCoupling, ReplicaGroup, Replicas

if TYPE_CHECKING:
    from wideflat.presets import Preset

__all__ = ["Algorithm", "Gamma", "base_optimizer", "on_baseline"]


@dataclasses.dataclass(frozen=True)
class Gamma:
    """A strength that grows over the training (focusing), and where its schedule stands in a preset.

    Args:
        of: Who has it: each ``optimizer``, or the ``coupling``.
        prefix: Of the fields ``gamma0``, ``gamma_factor`` and ``focusing``.
    """

    of: Literal["optimizer", "coupling"]
    prefix: str = ""

    def schedule(self, preset: Preset) -> tuple[float | None, float, str]:
        """gamma0 (None: automatic), the factor it grows by, and the kind of schedule."""
        names = ("gamma0", "gamma_factor", "focusing")
        gamma0, factor, kind = (getattr(preset, self.prefix + name) for name in names)
        return gamma0, factor, kind


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One algorithm. A file of this folder holds one record; :data:`wideflat.algorithms.ALGORITHMS` has all of them.

    Args:
        name: On the command line and in presets.
        words: What it is, in one line.
        make_optimizer: The optimizer of one network, from a preset, the network's parameters and a seed.
        make_coupling: The attraction between the networks, from a preset, the replicas and their optimizers; None for
            an algorithm that trains one network.
        couples: Whether the attraction acts ``before`` the optimizers' steps (through gradients) or ``after`` them. In
            the first case its period is the preset's K; in the second it knows by itself when to act.
        drives: The entry of the optimizer's param groups that the schedule of the learning rate drives: the preset's
            field of this name, times the schedule.
        gammas: What is focused.
        inner: Whether it has an inner loop of L steps, so that L passes over the data are an epoch.
        closure: Whether its optimizer asks for gradients itself, through a closure, several times an iteration; for one
            network only.
        modes: Whether the attraction can also act on the weights themselves (``coupling`` of a preset, ``proximal``).
        elastic: Whether replicas may die and come back in the midst of it.
        forks: Whether replicas may start as copies of one trained network: only those that do the same as long as they
            see the same, without noise or a center of their own.
        moves_center: Whether the center is somewhere that the training did not gather batch-norm statistics for.
        center: Puts the center into a copy of the barycenter, given that copy, the optimizers and the coupling; None
            where it is the barycenter itself (of the w's of Entropy-SGD; of one network: that network).
        settings: Its preset on a row of Table 1, from the columns of that row; None where it is a column.
    """

    name: str
    words: str
    make_optimizer: Callable[[Preset, list[nn.Parameter], int], Optimizer]
    make_coupling: Callable[[Preset, Replicas | ReplicaGroup, Sequence[Optimizer]], ReplicaCoupling] | None = None
    couples: Literal["before", "after"] = "before"
    drives: str = "lr"
    gammas: tuple[Gamma, ...] = ()
    inner: bool = False
    closure: bool = False
    modes: bool = False
    elastic: bool = False
    forks: bool = False
    moves_center: bool = True
    center: Callable[[nn.Module, Sequence[Optimizer], ReplicaCoupling | None], None] | None = None
    settings: Callable[[Mapping[str, Preset]], Preset] | None = None

    def __post_init__(self) -> None:
        if self.closure and self.replicated:
            raise ValueError(
                f"{self.name}: an optimizer that asks for gradients itself trains one network, not replicas"
            )

    @property
    def replicated(self) -> bool:
        """Whether it trains several networks."""
        return self.make_coupling is not None

    @property
    def starts(self) -> tuple[str, ...]:
        """Where its networks can start: see ``start`` of a preset."""
        return ("independent",) + ("one",) * self.replicated + ("fork",) * self.forks


def base_optimizer(preset: Preset) -> Callable[..., Optimizer]:
    """What makes the optimizer that a preset names, out of parameters and ``lr``."""
    x = preset
    if x.optimizer != "sgd":
        rmsprop: Callable[..., Optimizer] = torch.optim.RMSprop if x.optimizer == "rmsprop" else TensorFlowRMSprop
        return partial(rmsprop, momentum=x.momentum, alpha=x.smoothing, eps=x.stabiliser, weight_decay=x.weight_decay)
    return partial(torch.optim.SGD, momentum=x.momentum, nesterov=x.nesterov, weight_decay=x.weight_decay, fused=True)


def on_baseline(cell: Preset, row: Mapping[str, Preset], name: str, *notes: tuple[str, str], **changes: Any) -> Preset:
    """The preset of an algorithm that is not in Table 1: a cell of the row, changed, and all of it marked as ours.

    Args:
        cell: What it is made from.
        row: The columns of Table 1 in this row.
        name: Of the algorithm.
        *notes: More to say of single fields.
        **changes: Fields that are not those of ``cell``.
    """
    ours = (*row["sgd"].notes, ("algorithm", "not in Table 1: its settings are ours, on the baseline's"))
    blank: dict[str, Any] = {"paper_error": None, "paper_spread": None, "paper_gamma1": None}
    return dataclasses.replace(cell, algorithm=name, notes=(*ours, *notes), **blank, **changes)
