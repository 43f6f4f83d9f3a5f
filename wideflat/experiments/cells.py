"""Cells of Table 1, trained into run directories: what Table 1 and Figures 2 to 5 share.

A cell is a row of Table 1 (data set and architecture), an algorithm and a seed; its run is
``RUNS/ROW-ALGORITHM-seed-N``. A run that is finished is never trained again, one that was interrupted goes on where it
stopped. Items that share the folder of runs share the trainings.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from wideflat.data import ImageData, ImageSplit
from wideflat.data import load as load_images
from wideflat.experiments.experiment import Experiment
from wideflat.models.initialisation import kaiming_normal
from wideflat.models.resnet import BasicBlock, ResNet
from wideflat.presets import ALGORITHMS, PRESETS, Preset, preset
from wideflat.runs import Run
from wideflat.train import Diverged, Options, train

__all__ = ["NAMES", "Cell", "CellExperiment", "quick_cell", "quick_data", "quick_network", "training_cost"]

#: What legends call the algorithms.
NAMES = {"sgd": "SGD", "rsgd": "rSGD", "esgd": "eSGD", "rsgdxy": "rSGD x y", "sam": "SAM"}
#: Algorithms in the order of Table 1, then the others.
ORDER = tuple(ALGORITHMS)
#: Training images of each data set, for estimates before it is loaded.
IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "tiny-imagenet": 100_000, "fashion-mnist": 60_000, "dress-coat": 3_927}
#: Rows whose flatness is followed along the training (Figures 3 and 5), and the parts of the training at which.
FOLLOWED = ("cifar10-resnet18", "cifar10-resnet110")
MOMENTS = (0.1, 0.3, 0.6, 0.8, 1.0)

#: What estimates assume: floating-point operations a second that a training reaches. SmallConvNet on CIFAR-10 reaches
#: about the first on two cores of a server; the second is a third of the peak of a GPU of 30 TFLOP/s.
CPU_SPEED, GPU_SPEED = 7e10, 1e13


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training: the experiment and its seed."""

    experiment: Preset
    seed: int

    @property
    def name(self) -> str:
        """Of its run directory."""
        return f"{self.experiment.name}-{self.experiment.algorithm}-seed-{self.seed}"

    def moments(self, parts: Sequence[float]) -> list[int]:
        """The epochs at the given parts of the training, none of them twice.

        Example:
            >>> Cell(preset("cifar10-resnet18", "esgd"), 0).moments((0.001, 0.25, 1.0))
            [1, 8, 32]
        """
        return sorted({max(1, round(part * self.experiment.epochs)) for part in parts})


# ------------------------------------------------------------------------------------------------- the reduced form


def quick_network(num_classes: int = 2, in_channels: int = 1) -> nn.Module:
    """A narrow residual network with batch norm (3 blocks, 8 to 32 channels): stands for the deep ones in --quick."""
    return kaiming_normal(ResNet(BasicBlock, (1, 1, 1), 8, num_classes, "cifar", "B", in_channels))


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
        batch_size=25,
        augmentation="standard",
        cutout=0,
        model="smallconvnet" if small else "wideflat.experiments.cells:quick_network",
        model_arguments=(("image_size", 28), ("in_channels", 1)) if small else (("in_channels", 1),),
    )


def quick_data(images: int = 600) -> ImageData:
    """The embedded Dress-vs-Coat images, as many of each class (at most 344), with the whole test set.

    Example:
        >>> data = quick_data(100)
        >>> len(data.train), len(data.test), int(data.train.targets.sum())
        (100, 677, 50)
    """
    whole = load_images("dress-coat")
    targets = whole.train.targets
    half = min(-(-images // 2), *(int((targets == k).sum()) for k in (0, 1)))
    chosen = torch.stack([torch.nonzero(targets == k).flatten()[:half] for k in (0, 1)], 1).flatten()[:images]
    return dataclasses.replace(whole, train=ImageSplit(whole.train.images[chosen].contiguous(), targets[chosen]))


def _rescaled(cell: Preset, epochs: int | None) -> Preset:
    """The cell with its epochs in the proportion in which ``epochs`` is to the baseline's."""
    if epochs is None:
        return cell
    baseline = preset(cell.name, "sgd")
    return cell.with_epochs(max(1, round(cell.epochs * epochs / baseline.epochs)))


# ------------------------------------------------------------------------------------------------------ the experiment


class CellExperiment(Experiment):
    """An experiment on cells of Table 1.

    Args:
        folder: Where everything of this item goes.
        quick: The reduced form: the embedded images, a small network, few epochs.
        data: The folder of the data sets; None to look in the usual places.
        seed: The first seed.
        rows: Rows of Table 1; None for those of the item.
        algorithms: Which algorithms; None for those of the item.
        seeds: How many seeds of each training.
        epochs: Another length of the baseline; all trainings and their schedules are rescaled in proportion.
        limit_data: Train, test and measure on at most this many images.
        allow_altered: Use data files whose checksum is not the published one.
        runs: The folder of the runs, to share trainings between items; None for one of its own.
        device: Where to compute; None for a GPU if there is one.
    """

    #: What is trained where nothing else is asked for.
    default_rows: tuple[str, ...]
    default_algorithms: tuple[str, ...] = ("sgd", "rsgd", "esgd")
    default_seeds = 1
    #: The same for the reduced form: rows, seeds, epochs of the baseline, training images.
    quick_rows: tuple[str, ...] = ("cifar10-smallconvnet",)
    quick_seeds = 1
    quick_epochs = 12
    quick_images = 600

    def __init__(
        self,
        folder: Path,
        quick: bool = False,
        data: Path | None = None,
        seed: int = 0,
        rows: Sequence[str] | None = None,
        algorithms: Sequence[str] | None = None,
        seeds: int | None = None,
        epochs: int | None = None,
        limit_data: int | None = None,
        allow_altered: bool = False,
        runs: Path | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(folder, quick, data, seed)
        self.rows = tuple(rows or (self.quick_rows if quick else self.default_rows))
        self.chosen = None if algorithms is None else tuple(algorithms)
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
        self.limit_data = limit_data or (self.quick_images if quick else None)
        self.allow_altered = allow_altered
        self.runs = Path(runs) if runs is not None else self.folder / "runs"
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._data: dict[str, ImageData] = {}
        self._failed: dict[str, str] = {}

    # ---- what is to be trained

    def algorithms_of(self, row: str) -> tuple[str, ...]:
        """The algorithms that a row is trained with."""
        return self.chosen or self.default_algorithms

    def experiment(self, row: str, algorithm: str) -> Preset:
        """The settings of a training."""
        cell = preset(row, algorithm)
        return quick_cell(cell, self.epochs or self.quick_epochs) if self.quick else _rescaled(cell, self.epochs)

    def cells(self) -> list[Cell]:
        """All trainings, in an order that gives something to compare early."""
        return [
            Cell(self.experiment(row, algorithm), self.seed + number)
            for row in self.rows
            for number in range(self.seeds)
            for algorithm in self.algorithms_of(row)
        ]

    def parts(self, row: str) -> tuple[float, ...]:
        """The parts of the training at which the network is kept for the flatness figures."""
        return MOMENTS if row in FOLLOWED and not self.quick else ()

    # ---- training

    def compute(self) -> None:
        """Train what is not finished, cell by cell; the tables are written after each."""
        self.write_tables()
        try:
            for cell in self.cells():
                run = self.train(cell)
                if run is not None:
                    self.measure(cell, run)
                self.write_tables()
        finally:  # also of a training that was interrupted
            self.write_tables()

    def measure(self, cell: Cell, run: Run) -> None:
        """What is measured on a finished run (nothing, unless an item says otherwise)."""

    @abc.abstractmethod
    def write_tables(self) -> None:
        """Write the tables of what has been trained and measured so far."""

    def train(self, cell: Cell) -> Run | None:
        """The finished run of a cell, trained now if need be; None if it diverged (which the tables then say)."""
        path = self.runs / cell.name
        if (path / "config.json").exists() and (run := Run.open(path)).result() is not None:
            self._must_be(run, cell)
            return run
        try:
            return train(
                cell.experiment,
                path,
                self.images(cell.experiment),
                self.options_of(cell),
                device=self.device,
                snapshots=cell.moments(self.parts(self._row(cell.experiment.name))),
                tensorboard=not self.quick,
            )
        except Diverged as reason:
            self._failed[cell.name] = str(reason)
            return None

    def options_of(self, cell: Cell) -> Options:
        """How a cell is computed."""
        return Options(seed=cell.seed, limit_data=self.limit_data)

    def images(self, experiment: Preset) -> ImageData:
        """The data set of an experiment, loaded once."""
        name = experiment.dataset
        if name not in self._data:
            if self.quick:
                self._data[name] = quick_data(self.limit_data or self.quick_images)
            else:
                self._data[name] = load_images(name, self.data, allow_altered=self.allow_altered)
        return self._data[name]

    def _must_be(self, run: Run, cell: Cell) -> None:
        """A finished run is of this cell and not of another experiment in the same folder."""
        there = Preset.from_dict(run.config["experiment"])
        limit = run.config["options"]["limit_data"]
        if there != cell.experiment or limit != self.limit_data:
            names = [
                f.name for f in dataclasses.fields(Preset) if getattr(there, f.name) != getattr(cell.experiment, f.name)
            ]
            differ = ", ".join([*names, *(["limit_data"] if limit != self.limit_data else [])])
            raise ValueError(
                f"{run.path} holds another experiment (other {differ}): give another --out, or its settings"
            )

    # ---- what has been trained

    @staticmethod
    def _row(name: str) -> str:
        return name.removeprefix("quick-")

    def started(self, rows: Sequence[str] = ()) -> list[tuple[Cell, Run]]:
        """The runs of the chosen rows (and of ``rows``), by row and algorithm in the order of Table 1, then by seed."""
        wanted = {*self.rows, *rows}
        found = []
        for run in self._runs():
            experiment = Preset.from_dict(run.config["experiment"])
            row = self._row(experiment.name)
            if row in wanted and experiment.name.startswith("quick-") == self.quick:
                cell = Cell(experiment, run.config["options"]["seed"])
                place = (list(PRESETS).index(row), ORDER.index(experiment.algorithm), cell.seed)
                found.append((place, cell, run))
        return [(cell, run) for _, cell, run in sorted(found, key=lambda entry: entry[0])]

    def finished(self, rows: Sequence[str] = ()) -> list[tuple[Cell, Run]]:
        """Those of :meth:`started` that are finished."""
        return [(cell, run) for cell, run in self.started(rows) if run.result() is not None]

    def _runs(self) -> Iterator[Run]:
        """All runs in the folder of runs."""
        for path in sorted(self.runs.glob("*/config.json")):
            with contextlib.suppress(FileNotFoundError, ValueError):
                yield Run.open(path.parent)

    def rows_in(self, name: str) -> list[str]:
        """The rows of Table 1 that a table of this item has already, so that another choice of rows adds to it."""
        table = self.table(name)
        return [] if table is None else [row for row in table.unique("row") if row in PRESETS]

    # ---- what is said about it

    def deviations(self) -> list[str]:
        """In what the chosen settings are not the paper's, for remarks and captions."""
        said = []
        if not self.quick:
            if self.epochs is not None:
                said.append(
                    f"The trainings are shorter or longer than the paper's: {self.epochs} epochs of the baseline."
                )
            if self.limit_data is not None:
                said.append(f"At most {self.limit_data} images are used.")
            if any(run.config["data"]["altered"] for run in self._runs()):
                said.append("Files of the data set are not the published ones (altered): the pixels differ.")
        return said + [f"{name} diverged: {reason}" for name, reason in self._failed.items()]

    def caption(self, text: str) -> str:
        """A caption that says in what the figure is not the paper's."""
        return " ".join([text, *self.deviations()])

    def cost(self) -> str:
        """How many trainings, how many operations, how long on what."""
        return training_cost([cell for cell in self.cells() if not self._done(cell)], self.limit_data)

    def _done(self, cell: Cell) -> bool:
        return (self.runs / cell.name / "model.json").exists()

    def provenance(self, **more: Any) -> dict[str, Any]:
        """With the choices of this item."""
        return super().provenance(
            rows=list(self.rows), seeds=self.seeds, epochs=self.epochs, limit_data=self.limit_data, **more
        )


# ------------------------------------------------------------------------------------------------------------ the cost


@functools.cache
def forward_operations(experiment: Preset) -> float:
    """Floating-point operations of one image through the network, counted on a network without numbers."""
    channels = dict(experiment.model_arguments).get("in_channels", 3)
    with torch.device("meta"):
        network = experiment.build_model().eval()
        image = torch.empty(1, channels, experiment.image_size, experiment.image_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(image)
    return float(counter.get_total_flops())


def training_cost(cells: Sequence[Cell], limit_data: int | None = None) -> str:
    """In words what it takes to train cells.

    A training step costs three forward passes (forward, and backward twice that); evaluation is left out.

    Example:
        >>> print(training_cost([Cell(preset("cifar10-smallconvnet"), 0)]))
        1 training, 300 passes over its data set, 4e+14 floating-point operations: ... hours at 70 GFLOP/s (two cores),
        0.0 at 10 TFLOP/s (one GPU); counted as three forward passes a step.
    """
    if not cells:
        return "all trainings are finished."
    operations = passes = 0.0
    for cell in cells:
        experiment = cell.experiment
        images = min(IMAGES.get(experiment.dataset, 50_000), limit_data or 10**9)
        passes += experiment.passes
        operations += (
            3
            * experiment.passes
            * images
            * forward_operations(dataclasses.replace(experiment, algorithm="sgd", notes=()))
        )
    plural = "s" if len(cells) > 1 else ""
    return (
        f"{len(cells)} training{plural}, {passes:.0f} passes over {'their data sets' if plural else 'its data set'}, "
        f"{operations:.0e} floating-point operations: {operations / CPU_SPEED / 3600:.1f} hours at "
        f"{CPU_SPEED / 1e9:.0f} GFLOP/s (two cores), {operations / GPU_SPEED / 3600:.1f} at {GPU_SPEED / 1e12:.0f} "
        "TFLOP/s (one GPU); counted as three forward passes a step."
    )
