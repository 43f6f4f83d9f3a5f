"""Trainings that figures and tables are made of: trained into run directories, measured, shared between processes.

A run that is finished is never trained again, one that was interrupted goes on where it stopped. Items that share the
folder of runs share the trainings. The same command may be started several times (on one machine, or on several that
share the folder): each process takes what no other is working on, and all end when everything is done. One command
can also have its trainings done by several processes: see :mod:`wideflat.experiments.pieces`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from wideflat.data import ImageData
from wideflat.data import find as find_images
from wideflat.data import load as load_images
from wideflat.experiments.pieces import Answer, PieceExperiment
from wideflat.presets import PRESETS, Preset
from wideflat.progress import Progress
from wideflat.training import Diverged, Options, configuration, train
from wideflat.training.runs import Run, RunInUse

__all__ = ["Cell", "TrainingExperiment", "forward_operations", "training_cost"]

#: Training images of each data set, for estimates before it is loaded.
IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "tiny-imagenet": 100_000, "fashion-mnist": 60_000, "dress-coat": 3_927}

#: What estimates assume: floating-point operations a second that a training reaches. SmallConvNet on CIFAR-10 reaches
#: about the first on two cores of a server; the second is a third of the peak of a GPU of 30 TFLOP/s.
CPU_SPEED, GPU_SPEED = 7e10, 1e13

#: Seconds between two looks at whether another process has finished.
WAIT = 5.0


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
            >>> from wideflat.presets import preset
            >>> Cell(preset("cifar10-resnet18", "esgd"), 0).moments((0.001, 0.25, 1.0))
            [1, 8, 32]
        """
        return sorted({max(1, round(part * self.experiment.epochs)) for part in parts})


class TrainingExperiment(PieceExperiment):
    """An experiment whose tables are made of trainings.

    Args:
        folder: Where everything of this item goes.
        quick: The reduced form.
        data: The folder of the data sets; None to look in the usual places.
        seed: The first seed.
        limit_data: Use at most this many images.
        allow_altered: Use data files whose checksum is not the published one.
        runs: The folder of the runs, to share trainings between items; None for one of its own.
        device: Where to compute; None for a GPU if there is one.
    """

    def __init__(
        self,
        folder: Path,
        quick: bool = False,
        data: Path | None = None,
        seed: int = 0,
        limit_data: int | None = None,
        allow_altered: bool = False,
        runs: Path | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(folder, quick, data, seed)
        if limit_data is not None and limit_data < 1:
            raise ValueError(f"limit_data must be >= 1, got {limit_data}")
        self.limit_data = limit_data
        self.allow_altered = allow_altered
        self.runs = Path(runs) if runs is not None else self.folder / "runs"
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._data: dict[str, ImageData] = {}
        self._failed: dict[str, str] = {}

    pieces_are_locked = True

    # ---- what an item says

    @abc.abstractmethod
    def cells(self) -> list[Cell]:
        """All trainings, in an order that gives something to compare early."""

    @abc.abstractmethod
    def write_tables(self) -> None:
        """Write the tables of what has been trained and measured so far."""

    def measure(self, cell: Cell, run: Run) -> None:
        """What is measured on a finished run (nothing, unless an item says otherwise)."""

    def measured(self, cell: Cell, run: Run) -> bool:
        """Whether a finished run has been measured."""
        return True

    def snapshots(self, cell: Cell) -> list[int]:
        """Epochs whose network is kept."""
        return []

    def options_of(self, cell: Cell) -> Options:
        """How a cell is computed."""
        return Options(seed=cell.seed, limit_data=self.limit_data)

    def more_of(self, cell: Cell) -> dict[str, Any]:
        """More arguments of :func:`wideflat.training.train`."""
        return {}

    # ---- computing

    def compute(self) -> None:
        """Train and measure what is not there yet; the tables are written after each training."""
        self.write_tables()
        left = self.cells()
        try:
            while left:
                elsewhere = self._by_workers(left) if self.workers is not None else self._here(left)
                if len(elsewhere) == len(left):
                    with Progress(f"waiting for another process that works on {elsewhere[0].name}") as bar:
                        time.sleep(WAIT)
                        bar.advance()
                left = elsewhere
        finally:  # also of a training that was interrupted
            self.write_tables()
        self.report_lost()

    def _here(self, cells: Sequence[Cell]) -> list[Cell]:
        """Train and measure in this process; returns the cells that another process is working on."""
        elsewhere = []
        for cell in cells:
            answer = self._do(cell)
            if answer.state == "in use":
                elsewhere.append(cell)
                continue
            self._note(cell, answer)
            self.write_tables()
        return elsewhere

    def _by_workers(self, cells: Sequence[Cell]) -> list[Cell]:
        """Train and measure in other processes; returns the cells that are being worked on by neither."""
        assert self.workers is not None
        missing = [cell for cell in cells if not self._is_there(cell)]
        elsewhere = self._here([cell for cell in cells if cell not in missing])
        busy = [cell for cell in missing if self._is_busy(cell)]
        missing = [cell for cell in missing if cell not in busy]
        if len(missing) < 2 and self.workers.engine == "local":  # one training has all the threads to itself
            return [*elsewhere, *busy, *self._here(missing)]
        for dataset in dict.fromkeys(cell.experiment.dataset for cell in missing):
            find_images(dataset, self.data)  # says it once if it is not there
        answers = self.ask_workers([cell.name for cell in missing], self.write_tables)
        for cell in missing:
            answer = answers[cell.name]
            if answer.state == "in use" or (answer.state == "done" and self._do(cell).state == "in use"):
                elsewhere.append(cell)
            else:
                self._note(cell, answer)
        return [*elsewhere, *busy]

    def do_piece(self, name: str) -> Answer:
        """Train and measure the cell of this name."""
        for cell in self.cells():
            if cell.name == name:
                return self._do(cell)
        raise ValueError(f"{self.name} has no training {name!r}")

    def _do(self, cell: Cell) -> Answer:
        """Train and measure a cell, as far as that is not done."""
        try:
            run = self.train(cell)
            with run.locked():
                self.measure(cell, run)
        except RunInUse as reason:
            return Answer("in use", str(reason))
        except Diverged as reason:
            return Answer("diverged", str(reason))
        return Answer("done")

    def _note(self, cell: Cell, answer: Answer) -> None:
        if answer.state == "diverged":
            self._failed[cell.name] = answer.reason

    def _is_there(self, cell: Cell) -> bool:
        """Whether a cell is trained and measured."""
        path = self.runs / cell.name
        if not (path / "model.json").exists() or not (path / "config.json").exists():
            return False
        run = Run.open(path)
        return run.result() is not None and self.measured(cell, run)

    def _is_busy(self, cell: Cell) -> bool:
        """Whether another process works on a cell."""
        path = self.runs / cell.name
        if not (path / "lock").exists():
            return False
        try:
            with Run(path, {}).locked():
                return False
        except RunInUse:
            return True

    def train(self, cell: Cell) -> Run:
        """The finished run of a cell, trained now if need be."""
        path, data, options = self.runs / cell.name, self.images(cell.experiment), self.options_of(cell)
        if (path / "config.json").exists() and (run := Run.open(path)).result() is not None:
            run.must_be(configuration(cell.experiment, data, options))
            return run
        return train(
            cell.experiment,
            path,
            data,
            options,
            device=self.device,
            snapshots=self.snapshots(cell),
            tensorboard=not self.quick,
            **self.more_of(cell),
        )

    def images(self, experiment: Preset) -> ImageData:
        """The data set of an experiment, loaded once."""
        name = experiment.dataset
        if name not in self._data:
            self._data[name] = load_images(name, self.data, allow_altered=self.allow_altered)
        return self._data[name]

    # ---- what has been trained

    def trained(self) -> Iterator[tuple[Cell, Run]]:
        """All runs in the folder of runs, finished or not, by name."""
        for path in sorted(self.runs.glob("*/config.json")):
            with contextlib.suppress(FileNotFoundError, ValueError, RuntimeError, KeyError):
                run = Run.open(path.parent)
                yield Cell(Preset.from_dict(run.config["experiment"]), run.config["options"]["seed"]), run

    def deviations(self) -> list[str]:
        """In what the chosen settings are not the paper's, for remarks and captions."""
        said = []
        if not self.quick:
            if self.limit_data is not None:
                said.append(f"At most {self.limit_data} images are used.")
            if any(run.config["data"]["altered"] for _, run in self.trained()):
                said.append("Files of the data set are not the published ones (altered): the pixels differ.")
        return said + [f"{name} diverged: {reason}" for name, reason in self._failed.items()]

    def caption(self, text: str) -> str:
        """A caption that says in what the figure is not the paper's."""
        return " ".join([text, *self.deviations()])

    def cost(self) -> str:
        """How many trainings, how many operations, how long on what."""
        left = [cell for cell in self.cells() if not (self.runs / cell.name / "model.json").exists()]
        return training_cost(left, self.limit_data)

    def provenance(self, **more: Any) -> dict[str, Any]:
        """With the choices that all trainings share."""
        return super().provenance(limit_data=self.limit_data, allow_altered=self.allow_altered, **more)


# ------------------------------------------------------------------------------------------------------------ the cost


def forward_operations(experiment: Preset) -> float:
    """Floating-point operations of one image through the network, counted on a network without numbers."""
    own = experiment.model_arguments
    return _forward_operations(experiment.model, own, experiment.num_classes, experiment.image_size)


@functools.cache
def _forward_operations(model: str, arguments: tuple[tuple[str, Any], ...], num_classes: int, size: int) -> float:
    like = dataclasses.replace(
        next(iter(PRESETS.values()))["sgd"], model=model, model_arguments=arguments, num_classes=num_classes
    )
    with torch.device("meta"):
        network = like.build_model().eval()
        image = torch.empty(1, dict(arguments).get("in_channels", 3), size, size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(image)
    return float(counter.get_total_flops())


def training_cost(cells: Sequence[Cell], limit_data: int | None = None) -> str:
    """In words what it takes to train cells.

    A training step costs three forward passes (forward, and backward twice that); evaluation is left out.

    Example:
        >>> from wideflat.presets import preset
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
        operations += 3 * experiment.passes * images * forward_operations(experiment)
    plural = "s" if len(cells) > 1 else ""
    return (
        f"{len(cells)} training{plural}, {passes:.0f} passes over {'their data sets' if plural else 'its data set'}, "
        f"{operations:.0e} floating-point operations: {operations / CPU_SPEED / 3600:.1f} hours at "
        f"{CPU_SPEED / 1e9:.0f} GFLOP/s (two cores), {operations / GPU_SPEED / 3600:.1f} at {GPU_SPEED / 1e12:.0f} "
        "TFLOP/s (one GPU); counted as three forward passes a step."
    )
