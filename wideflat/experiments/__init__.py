"""The experiments of the paper, one module per table and figure: compute, write a table, draw from the table."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wideflat.experiments.experiment import Item

__all__ = ["ITEMS", "item"]

#: Every table and figure: its module, whose ``ITEM`` it is, and what it shows.
ITEMS: dict[str, str] = {
    "fig1": "committee machine: local entropy, local energy and test error of the five settings",
    "table1": "test errors of eight pairs of data set and architecture, four algorithms each",
    "fig2": "test error along training: ResNet-18 on CIFAR-10, ResNet-50 on Tiny ImageNet",
    "fig3": "local energy along training: ResNet-18 on CIFAR-10",
    "fig4": "local energy at the end of training: EfficientNet, PyramidNet, ResNet-50, DenseNet",
    "fig5": "local energy along training: ResNet-110 on CIFAR-10",
    "fig6": "committee machine trained with dropout: local entropy, local energy and test error",
    "fig7": "correlation of local energy with test error over networks of one architecture",
    "volume": "free entropy against local energy and test error of trained networks (not in the paper)",
}


def item(name: str) -> Item:
    """A table or figure by its name on the command line.

    Example:
        >>> item("fig1").title
        'Figure 1: flatness and generalisation of a committee machine'
    """
    if name not in ITEMS:
        raise ValueError(f"there is no item {name!r}; there are {', '.join(ITEMS)}")
    return importlib.import_module(f"wideflat.experiments.{name}").ITEM
