"""Parle: Entropy-SGD in every replica, replicas that attract each other at its outer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from wideflat.algorithms.algorithm import Algorithm, Gamma, on_baseline
from wideflat.algorithms.esgd import make_optimizer
from wideflat.baselines.parle import Parle
from wideflat.replicas import ReplicaGroup, Replicas

if TYPE_CHECKING:
    from wideflat.presets import Preset


def make_coupling(preset: Preset, replicas: Replicas | ReplicaGroup, optimizers: Sequence[Optimizer]) -> Parle:
    """The attraction whenever a cycle has ended."""
    return Parle(replicas, optimizers)  # type: ignore[arg-type] # Parle checks that they are EntropySGD


def settings(row: Mapping[str, Preset]) -> Preset:
    """Entropy-SGD's settings within each replica, Replicated-SGD's between them."""
    rsgd, esgd = row["rsgd"], row["esgd"]
    return on_baseline(
        esgd.with_epochs(max(1, round(esgd.epochs / rsgd.num_replicas))),
        row,
        "parle",
        ("epochs", "Entropy-SGD's divided by the replicas: as many passes in all"),
        ("gamma0", "Entropy-SGD's within each replica"),
        ("replica_gamma0", "Replicated-SGD's between replicas"),
        num_replicas=rsgd.num_replicas,
        replica_gamma0=rsgd.gamma0,
        replica_gamma_factor=rsgd.gamma_factor,
        replica_focusing=rsgd.focusing,
    )


ALGORITHM = Algorithm(
    name="parle",
    words="Entropy-SGD in every replica, coupled at its outer steps",
    make_optimizer=make_optimizer,
    make_coupling=make_coupling,
    couples="after",
    gammas=(Gamma("optimizer"), Gamma("coupling", prefix="replica_")),
    inner=True,
    settings=settings,
)
