"""From the names of a row and an algorithm to the settings: columns of Table 1, as coded, and other algorithms."""

from __future__ import annotations

from wideflat import algorithms
from wideflat.checks import flag, instance
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
    if instance("name", name, str, "the name of a preset") not in PRESETS:
        raise ValueError(f"there is no preset {name!r}. {nearest(name, PRESETS)}")
    one_of("algorithm", algorithm, ALGORITHMS)
    row = PRESETS[name]
    if flag("as_coded", as_coded):
        one_of("the algorithm of a cell as coded", algorithm, row)
        return as_the_program(row[algorithm])
    if algorithm in row:
        return row[algorithm]
    settings = algorithms.ALGORITHMS[algorithm].settings
    assert settings is not None  # a record without is a column
    return settings(row)
