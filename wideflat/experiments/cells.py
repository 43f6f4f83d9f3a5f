"""Cells of Table 1: what Table 1 and Figures 2 to 5 share.

A cell is a row of Table 1 (data set and architecture), an algorithm and a seed; its run is
``RUNS/ROW-ALGORITHM-seed-N``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from wideflat.experiments.trainings import Cell, TrainingExperiment
from wideflat.models.initialisation import kaiming_normal
from wideflat.models.resnet import BasicBlock, ResNet
from wideflat.presets import ALGORITHMS, PRESETS, Preset, preset
from wideflat.training.runs import Run

__all__ = ["MOMENTS", "NAMES", "QUICK_MOMENTS", "CellExperiment", "quick_cell", "quick_network"]

#: What legends call the algorithms.
NAMES = {"sgd": "SGD", "rsgd": "rSGD", "esgd": "eSGD", "rsgdxy": "rSGD x y", "sam": "SAM"}
#: Rows whose flatness is followed along the training (Figures 3 and 5), and the parts of the training at which.
FOLLOWED = ("cifar10-resnet18", "cifar10-resnet110")
MOMENTS = (0.1, 0.3, 0.6, 0.8, 1.0)
QUICK_MOMENTS = (0.5, 1.0)


# ------------------------------------------------------------------------------------------------- the reduced form


def quick_network(num_classes: int = 2, in_channels: int = 1) -> nn.Module:
    """A residual network of 2 narrow blocks with batch norm: stands for the deep ones in --quick."""
    return kaiming_normal(ResNet(BasicBlock, (1, 1), 16, num_classes, "imagenet", "B", in_channels))


def quick_cell(cell: Preset, epochs: int) -> Preset:
    """The reduced form of a cell: its algorithm and settings, on the embedded images with a small network.

    Args:
        cell: A cell of Table 1.
        epochs: Length of the baseline; the cell's own is in proportion.

    Example:
        >>> quick = quick_cell(preset("cifar10-resnet18", "rsgd"), 12)
        >>> quick.name, quick.dataset, quick.epochs, quick.lr
        ('quick-cifar10-resnet18', 'dress-coat', 4, 0.02)
    """
    small = cell.model == "smallconvnet"
    return dataclasses.replace(
        _rescaled(cell, epochs),
        name=f"quick-{cell.name}",
        dataset="dress-coat",
        num_classes=2,
        image_size=28,
        padding=2,
        batch_size=12,
        augmentation="standard",
        cutout=0,
        model="smallconvnet" if small else "wideflat.experiments.cells:quick_network",
        model_arguments=(("image_size", 28), ("in_channels", 1)) if small else (("in_channels", 1),),
    )


def _rescaled(cell: Preset, epochs: int | None) -> Preset:
    """The cell with its epochs in the proportion in which ``epochs`` is to the baseline's."""
    if epochs is None:
        return cell
    baseline = preset(cell.name, "sgd")
    return cell.with_epochs(max(1, round(cell.epochs * epochs / baseline.epochs)))


# ------------------------------------------------------------------------------------------------------ the experiment


class CellExperiment(TrainingExperiment):
    """An experiment on cells of Table 1.

    Args:
        folder: Where everything of this item goes.
        quick: The reduced form: the embedded images, a small network, few epochs.
        rows: Rows of Table 1; None for those of the item.
        algorithms: Which algorithms; None for those of the item.
        seeds: How many seeds of each training.
        epochs: Another length of the baseline; all trainings and their schedules are rescaled in proportion.
        limit_data: Train, test and measure on at most this many images.
        **more: See :class:`wideflat.experiments.trainings.TrainingExperiment`.
    """

    #: What is trained where nothing else is asked for.
    default_rows: tuple[str, ...]
    default_algorithms: tuple[str, ...] = ("sgd", "rsgd", "esgd")
    default_seeds = 1
    #: The same for the reduced form: rows, seeds, epochs of the baseline, images.
    quick_rows: tuple[str, ...] = ("cifar10-smallconvnet",)
    quick_seeds = 1
    quick_epochs = 12
    quick_images = 400

    def __init__(
        self,
        folder: Path,
        quick: bool = False,
        rows: Sequence[str] | None = None,
        algorithms: Sequence[str] | None = None,
        seeds: int | None = None,
        epochs: int | None = None,
        limit_data: int | None = None,
        **more: Any,
    ) -> None:
        super().__init__(folder, quick, limit_data=limit_data or (self.quick_images if quick else None), **more)
        self.rows = tuple(rows or (self.quick_rows if quick else self.default_rows))
        self.chosen = tuple(algorithms) if algorithms else None
        for row in self.rows:
            preset(row)  # an unknown name fails here, with the nearest one
        for algorithm in self.chosen or ():
            preset(self.rows[0], algorithm)
        self.seeds = seeds if seeds is not None else (self.quick_seeds if quick else self.default_seeds)
        if self.seeds < 1:
            raise ValueError(f"seeds must be >= 1 (how many of them), got {self.seeds}")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be >= 1, got {epochs}")
        self.epochs = epochs or (self.quick_epochs if quick else None)
        self.quick_means = self.quick_means.format(epochs=self.epochs, images=self.limit_data)

    # ---- what is to be trained

    def algorithms_of(self, row: str) -> tuple[str, ...]:
        """The algorithms that a row is trained with."""
        return self.chosen or self.default_algorithms

    def experiment(self, row: str, algorithm: str) -> Preset:
        """The settings of a training."""
        cell = preset(row, algorithm)
        return quick_cell(cell, self.epochs or self.quick_epochs) if self.quick else _rescaled(cell, self.epochs)

    def cells(self) -> list[Cell]:
        """By row, then by seed, then by algorithm."""
        return [
            Cell(self.experiment(row, algorithm), self.seed + number)
            for row in self.rows
            for number in range(self.seeds)
            for algorithm in self.algorithms_of(row)
        ]

    def parts(self, row: str) -> tuple[float, ...]:
        """The parts of the training at which the network is kept for the flatness figures."""
        if row not in FOLLOWED:
            return ()
        return QUICK_MOMENTS if self.quick else MOMENTS

    def snapshots(self, cell: Cell) -> list[int]:
        """Epochs at those parts."""
        return cell.moments(self.parts(row_of(cell.experiment)))

    # ---- what has been trained

    def started(self, rows: Sequence[str] = ()) -> list[tuple[Cell, Run]]:
        """The runs of the chosen rows (and of ``rows``), by row and algorithm in the order of Table 1, then by seed."""
        wanted = {*self.rows, *rows}
        found = []
        for cell, run in self.trained():
            experiment = cell.experiment
            row = row_of(experiment)
            if row in wanted and row in PRESETS and experiment.name.startswith("quick-") == self.quick:
                place = (list(PRESETS).index(row), list(ALGORITHMS).index(experiment.algorithm), cell.seed)
                found.append((place, cell, run))
        return [(cell, run) for _, cell, run in sorted(found, key=lambda entry: entry[0])]

    def finished(self, rows: Sequence[str] = ()) -> list[tuple[Cell, Run]]:
        """Those of :meth:`started` that are finished."""
        return [(cell, run) for cell, run in self.started(rows) if run.result() is not None]

    def rows_in(self, name: str) -> list[str]:
        """The rows of Table 1 that a table of this item has already, so that another choice of rows adds to it."""
        table = self.table(name)
        return [] if table is None else table.unique("row")

    # ---- what is said about it

    def deviations(self) -> list[str]:
        """Also another length of the trainings."""
        said = super().deviations()
        if self.epochs is not None and not self.quick:
            said.insert(0, f"The trainings have another length than the paper's: {self.epochs} epochs of the baseline.")
        return said

    def provenance(self, **more: Any) -> dict[str, Any]:
        """With the choices of this item."""
        return super().provenance(rows=list(self.rows), seeds=self.seeds, epochs=self.epochs, **more)


def row_of(experiment: Preset) -> str:
    """The row of Table 1 that an experiment is, or is the reduced form of."""
    return experiment.name.removeprefix("quick-")
