"""Replicated-SGD (Algorithm 2): y networks, each with the baseline's optimizer, that attract each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from wideflat.algorithms.algorithm import Algorithm, Gamma
from wideflat.algorithms.sgd import make_optimizer
from wideflat.replicas import ReplicaCoupling, ReplicaGroup, Replicas

if TYPE_CHECKING:
    from wideflat.presets import Preset


def make_coupling(
    preset: Preset, replicas: Replicas | ReplicaGroup, optimizers: Sequence[Optimizer]
) -> ReplicaCoupling:
    """The attraction towards the barycenter, at every K-th iteration."""
    return ReplicaCoupling(replicas, period=preset.period, mode=preset.coupling, optimizer=optimizers)


ALGORITHM = Algorithm(
    name="rsgd",
    words="Replicated-SGD (Algorithm 2), as many passes over the data as the baseline in all",
    make_optimizer=make_optimizer,
    make_coupling=make_coupling,
    modes=True,
    gammas=(Gamma("coupling"),),
    elastic=True,
    forks=True,
)
