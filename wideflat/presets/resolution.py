"""From the names of a row and an algorithm to the settings: columns of Table 1, as coded, and other algorithms."""

from __future__ import annotations

import dataclasses

from wideflat.presets.program import as_the_program
from wideflat.presets.settings import ALGORITHMS, Preset, nearest, one_of
from wideflat.presets.table1 import PRESETS

__all__ = ["preset"]


def preset(name: str, algorithm: str = "sgd", as_coded: bool = False) -> Preset:
    """The settings of one row with one algorithm.

    The four columns of Table 1 are the paper's; the other algorithms take the row's baseline and the customary
    settings of each, all marked as ours in ``notes``.

    Args:
        name: A row of Table 1, such as ``cifar10-smallconvnet``.
        algorithm: One of :data:`ALGORITHMS`.
        as_coded: A column of Table 1 as copies of the authors' program have it (:mod:`wideflat.presets.program`).

    Example:
        >>> cell = preset("cifar10-smallconvnet", "esgd")
        >>> cell.epochs, cell.inner_steps, cell.passes, cell.lr, cell.inner_lr, cell.paper_error
        (60, 5, 300, 0.5, 0.02, 14.7)
        >>> preset("cifar10-smallconvnet", "rsgd").passes
        300
    """
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}. {nearest(name, PRESETS)}")
    one_of("algorithm", algorithm, ALGORITHMS)
    row = PRESETS[name]
    if as_coded:
        one_of("the algorithm of a cell as coded", algorithm, row)
        return as_the_program(row[algorithm])
    return row[algorithm] if algorithm in row else _other(row, algorithm)


def _other(row: dict[str, Preset], algorithm: str) -> Preset:
    """An algorithm that is not in Table 1, on a row of it."""
    sgd, rsgd, esgd = row["sgd"], row["rsgd"], row["esgd"]
    ours = (*sgd.notes, ("algorithm", "not in Table 1: its settings are ours, on the baseline's"))
    if algorithm == "sam":
        return dataclasses.replace(
            sgd,
            algorithm=algorithm,
            rho=0.05,
            paper_error=None,
            paper_spread=None,
            notes=(*ours, ("epochs", "as many passes as the baseline, but two gradients for each mini-batch")),
        )
    if algorithm == "lookahead":
        cell = dataclasses.replace(
            sgd,
            algorithm=algorithm,
            lr=0.5,
            inner_lr=sgd.lr,
            inner_steps=esgd.inner_steps,
            paper_error=None,
            paper_spread=None,
            notes=(*ours, ("schedule", "drives the inner learning rate; the outer one is constant")),
        )
        return cell.with_epochs(esgd.epochs)
    if algorithm == "easgd":
        return dataclasses.replace(
            rsgd,
            algorithm=algorithm,
            lr=sgd.lr,
            schedule=sgd.schedule.rescaled(rsgd.epochs),
            gamma0=0.3 / (10 * sgd.lr),
            gamma_factor=1.0,
            focusing="constant",
            period=10,
            period_changes=(),
            paper_error=None,
            paper_spread=None,
            notes=(*ours, ("gamma0", "lr K gamma = 0.9 / y at the start, the moving rate of the EASGD paper")),
        )
    return dataclasses.replace(  # parle
        esgd.with_epochs(max(1, round(esgd.epochs / rsgd.num_replicas))),
        algorithm=algorithm,
        num_replicas=rsgd.num_replicas,
        replica_gamma0=rsgd.gamma0,
        replica_gamma_factor=rsgd.gamma_factor,
        replica_focusing=rsgd.focusing,
        paper_error=None,
        paper_spread=None,
        paper_gamma1=None,
        notes=(
            *ours,
            ("epochs", "Entropy-SGD's divided by the replicas: as many passes in all"),
            ("gamma0", "Entropy-SGD's within each replica"),
            ("replica_gamma0", "Replicated-SGD's between replicas"),
        ),
    )
