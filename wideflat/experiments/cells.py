"""Cells of Table 1: what Table 1 and Figures 2 to 5 train.

A cell is a row of Table 1 (data set and architecture), an algorithm and a seed; its run is
``RUNS/ROW-ALGORITHM-seed-N``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wideflat.experiments.options import MaybeInt, MaybeTexts, Options
from wideflat.experiments.table import Table
from wideflat.experiments.trainings import Cell, TrainingOptions, Trainings
from wideflat.models.resnet import quick_network
from wideflat.presets import ALGORITHMS, PRESETS, Preset, preset
from wideflat.training.runs import Run

__all__ = [
    "MOMENTS",
    "NAMES",
    "QUICK_MOMENTS",
    "CellOptions",
    "Cells",
    "Choice",
    "quick_cell",
    "quick_network",
    "row_of",
]

#: What legends call the algorithms.
NAMES = {"sgd": "SGD", "rsgd": "rSGD", "esgd": "eSGD", "rsgdxy": "rSGD x y", "sam": "SAM"}
#: Rows whose flatness is followed along the training (Figures 3 and 5), and the parts of the training at which.
FOLLOWED = ("cifar10-resnet18", "cifar10-resnet110")
MOMENTS = (0.1, 0.3, 0.6, 0.8, 1.0)
QUICK_MOMENTS = (0.5, 1.0)


@dataclasses.dataclass
class CellOptions(TrainingOptions, Options):
    """Options of items that train cells of Table 1."""

    rows: MaybeTexts = None
    """Rows of Table 1 by preset name; those of the item when left out."""
    algorithms: MaybeTexts = None
    """Which algorithms; those of the item when left out."""
    seeds: MaybeInt = None
    """How many seeds of each training; 5 for table1 and fig2 (quick: 2), 1 for the others when left out."""
    epochs: MaybeInt = None
    """Another length of the baseline; all trainings and their schedules are rescaled in proportion."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much is trained.

    Args:
        rows: Rows of Table 1.
        seeds: How many seeds of each training.
        epochs: Length of the baseline; None for the paper's.
        images: The most images; None for all.
    """

    rows: tuple[str, ...]
    seeds: int = 1
    epochs: int | None = None
    images: int | None = None


def _three(row: str) -> tuple[str, ...]:
    return "sgd", "rsgd", "esgd"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What an item trains where nothing else is asked for.

    Args:
        usual: As the paper.
        quick: In the reduced form.
        algorithms: The algorithms of a row.
    """

    usual: Extent
    quick: Extent
    algorithms: Callable[[str], tuple[str, ...]] = _three

    @classmethod
    def of(
        cls,
        rows: tuple[str, ...],
        seeds: int = 1,
        quick_rows: tuple[str, ...] | None = None,
        quick_seeds: int = 1,
        algorithms: Callable[[str], tuple[str, ...]] = _three,
    ) -> Choice:
        """Rows and seeds as in the paper; in the reduced form 12 epochs on 400 images."""
        quick = Extent(quick_rows or rows, quick_seeds, epochs=12, images=400)
        return cls(Extent(rows, seeds), quick, algorithms)


# ------------------------------------------------------------------------------------------------- the reduced form


def quick_cell(cell: Preset) -> Preset:
    """The reduced form of a cell: its algorithm and settings, on the embedded images with a small network.

    Example:
        >>> quick = quick_cell(preset("cifar10-resnet18", "rsgd"))
        >>> quick.name, quick.dataset, quick.num_classes, quick.lr
        ('quick-cifar10-resnet18', 'dress-coat', 2, 0.02)
    """
    small = cell.model == "smallconvnet"
    return dataclasses.replace(
        cell,
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
    """A cell of Table 1 with its epochs in the proportion in which ``epochs`` is to the baseline's."""
    if epochs is None:
        return cell
    baseline = preset(cell.name, "sgd")
    return cell.with_epochs(max(1, round(cell.epochs * epochs / baseline.epochs)))


# ----------------------------------------------------------------------------------------------------------- the cells


class Cells:
    """The cells of Table 1 that an item trains, and their runs.

    Args:
        options: What was chosen.
        choice: What is trained where nothing was.
        folder: Of the item.
        quick: The reduced form: the embedded images, a small network, few epochs.

    Attributes:
        rows, seeds, epochs: What is trained.
        trainings: The folder of runs.
        all: Every cell: by row, then by seed, then by algorithm.
    """

    def __init__(self, options: CellOptions, choice: Choice, folder: Path, quick: bool) -> None:
        self.quick = quick
        default = choice.quick if quick else choice.usual
        self.rows = tuple(options.rows or default.rows)
        self.chosen = tuple(options.algorithms or ())
        self.seeds = default.seeds if options.seeds is None else options.seeds
        self.epochs = default.epochs if options.epochs is None else options.epochs
        self._check()
        limit = default.images if options.limit_data is None else options.limit_data
        self.trainings = Trainings(options, folder, limit, tensorboard=not quick)
        self.all = [
            Cell(self.preset(row, algorithm), options.seed + number)
            for row in self.rows
            for number in range(self.seeds)
            for algorithm in self.chosen or choice.algorithms(row)
        ]

    def _check(self) -> None:
        for row in self.rows:
            preset(row)  # an unknown name fails here, with the nearest one
        for algorithm in self.chosen:
            preset(self.rows[0], algorithm)
        if self.seeds < 1:
            raise ValueError(f"seeds must be >= 1 (how many of them), got {self.seeds}")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be >= 1, got {self.epochs}")

    def preset(self, row: str, algorithm: str) -> Preset:
        """The settings of a training."""
        cell = _rescaled(preset(row, algorithm), self.epochs)
        return quick_cell(cell) if self.quick else cell

    def snapshots(self, cell: Cell) -> list[int]:
        """The epochs whose network is kept for the flatness figures."""
        if row_of(cell.preset) not in FOLLOWED:
            return []
        return cell.moments(QUICK_MOMENTS if self.quick else MOMENTS)

    # ---- what has been trained

    def started(self, known: Table | None = None) -> list[tuple[Cell, Run]]:
        """The runs of the chosen rows, by row and algorithm in the order of Table 1, then by seed.

        Args:
            known: A table of the item, whose rows of Table 1 count too, so that another choice of rows adds to it.
        """
        wanted = {*self.rows, *([] if known is None else known.unique("row"))}
        found = []
        for cell, run in self.trainings.started():
            row = row_of(cell.preset)
            if row in wanted and row in PRESETS and cell.preset.name.startswith("quick-") == self.quick:
                place = (list(PRESETS).index(row), list(ALGORITHMS).index(cell.preset.algorithm), cell.seed)
                found.append((place, cell, run))
        return [(cell, run) for _, cell, run in sorted(found, key=lambda entry: entry[0])]

    def finished(self, known: Table | None = None) -> list[tuple[Cell, Run]]:
        """Those of :meth:`started` that are finished."""
        return [(cell, run) for cell, run in self.started(known) if run.result() is not None]

    # ---- what is said about it

    def numbers(self) -> dict[str, Any]:
        """What the words about the reduced form leave open."""
        return {"epochs": self.epochs, "images": self.trainings.limit_data}

    def deviations(self) -> list[str]:
        """In what the trainings are not the paper's, for remarks and captions."""
        said = self.trainings.deviations(self.quick)
        if self.epochs is not None and not self.quick:
            said.insert(0, f"The trainings have another length than the paper's: {self.epochs} epochs of the baseline.")
        return said

    def provenance(self) -> dict[str, Any]:
        """The choices, for the record."""
        chosen = {"rows": list(self.rows), "seeds": self.seeds, "epochs": self.epochs}
        return {**self.trainings.provenance(), **chosen}


def row_of(cell: Preset) -> str:
    """The row of Table 1 that a training is of, or is the reduced form of."""
    return cell.name.removeprefix("quick-")
