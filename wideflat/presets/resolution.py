"""From the names of a row and an algorithm to the settings: columns of Table 1, as coded, and other algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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
    if algorithm in row:
        return row[algorithm]
    ours = (*row["sgd"].notes, ("algorithm", "not in Table 1: its settings are ours, on the baseline's"))
    cell = OTHERS[algorithm](row)
    return dataclasses.replace(
        cell, algorithm=algorithm, paper_error=None, paper_spread=None, paper_gamma1=None, notes=(*ours, *cell.notes)
    )


# ------------------------------------------------------------------------------ algorithms that are not in Table 1


def _sam(row: dict[str, Preset]) -> Preset:
    note = ("epochs", "as many passes as the baseline, but two gradients for each mini-batch")
    return dataclasses.replace(row["sgd"], rho=0.05, notes=(note,))


def _lookahead(row: dict[str, Preset]) -> Preset:
    sgd, esgd = row["sgd"], row["esgd"]
    note = ("schedule", "drives the inner learning rate; the outer one is constant")
    cell = dataclasses.replace(sgd, lr=0.5, inner_lr=sgd.lr, inner_steps=esgd.inner_steps, notes=(note,))
    return cell.with_epochs(esgd.epochs)


def _easgd(row: dict[str, Preset]) -> Preset:
    sgd, rsgd = row["sgd"], row["rsgd"]
    return dataclasses.replace(
        rsgd,
        lr=sgd.lr,
        schedule=sgd.schedule.rescaled(rsgd.epochs),
        gamma0=0.3 / (10 * sgd.lr),
        gamma_factor=1.0,
        focusing="constant",
        period=10,
        period_changes=(),
        notes=(("gamma0", "lr K gamma = 0.9 / y at the start, the moving rate of the EASGD paper"),),
    )


def _parle(row: dict[str, Preset]) -> Preset:
    rsgd, esgd = row["rsgd"], row["esgd"]
    return dataclasses.replace(
        esgd.with_epochs(max(1, round(esgd.epochs / rsgd.num_replicas))),
        num_replicas=rsgd.num_replicas,
        replica_gamma0=rsgd.gamma0,
        replica_gamma_factor=rsgd.gamma_factor,
        replica_focusing=rsgd.focusing,
        notes=(
            ("epochs", "Entropy-SGD's divided by the replicas: as many passes in all"),
            ("gamma0", "Entropy-SGD's within each replica"),
            ("replica_gamma0", "Replicated-SGD's between replicas"),
        ),
    )


#: How the settings of each are made from a row of Table 1.
OTHERS: dict[str, Callable[[dict[str, Preset]], Preset]] = {
    "sam": _sam,
    "lookahead": _lookahead,
    "easgd": _easgd,
    "parle": _parle,
}
