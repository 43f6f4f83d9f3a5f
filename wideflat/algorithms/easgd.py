"""Elastic averaging SGD: replicas tied to a center with an inertia of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from wideflat.algorithms.algorithm import Algorithm, Gamma, on_baseline
from wideflat.algorithms.sgd import make_optimizer
from wideflat.baselines.easgd import EASGD
from wideflat.replicas import ReplicaCoupling, ReplicaGroup, Replicas

if TYPE_CHECKING:
    from wideflat.presets import Preset


def make_coupling(preset: Preset, replicas: Replicas | ReplicaGroup, optimizers: Sequence[Optimizer]) -> EASGD:
    """The tie to the center."""
    return EASGD(replicas, period=preset.period)


@torch.no_grad()
def center(copy: nn.Module, optimizers: Sequence[Optimizer], coupling: ReplicaCoupling | None) -> None:
    """The center variable; parameters that are not trained are those of the barycenter."""
    assert isinstance(coupling, EASGD)
    torch._foreach_copy_([p.detach() for p in copy.parameters() if p.requires_grad], coupling.center)


def settings(row: Mapping[str, Preset]) -> Preset:
    """Replicated-SGD's number of replicas and epochs, the baseline's rate, a constant strength."""
    sgd, rsgd = row["sgd"], row["rsgd"]
    return on_baseline(
        rsgd,
        row,
        "easgd",
        ("gamma0", "lr K gamma = 0.9 / y at the start, the moving rate of the EASGD paper"),
        lr=sgd.lr,
        schedule=sgd.schedule.rescaled(rsgd.epochs),
        gamma0=0.3 / (10 * sgd.lr),
        gamma_factor=1.0,
        focusing="constant",
        period=10,
        period_changes=(),
    )


ALGORITHM = Algorithm(
    name="easgd",
    words="elastic averaging: replicas pulled to a center that follows them, constant strength",
    make_optimizer=make_optimizer,
    make_coupling=make_coupling,
    gammas=(Gamma("coupling"),),
    center=center,
    settings=settings,
)
