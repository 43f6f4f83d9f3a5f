"""Trainings that figures and tables are made of: trained into run directories, measured, shared between processes.

A run that is finished is never trained again, one that was interrupted goes on where it stopped. Items that share the
folder of runs share the trainings. The same command may be started several times (on one machine, or on several that
share the folder): each process takes what no other is working on, and all end when everything is done. One command
can also have its trainings done by several processes: see :mod:`wideflat.experiments.workers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from wideflat.data import ImageData
from wideflat.data import find as find_images
from wideflat.data import load as load_images
from wideflat.data.catalogue import FACTS
from wideflat.environment import choose_device
from wideflat.experiments.experiment import Experiment
from wideflat.experiments.options import MaybeInt, MaybePath, MaybeText
from wideflat.experiments.workers import Answer, Workers, report_lost
from wideflat.presets import PRESETS, Preset
from wideflat.progress import Progress
from wideflat.training import Diverged, Options, Run, configuration, train
from wideflat.training.runs import RunInUse

__all__ = ["Cell", "Plan", "TrainingOptions", "Trainings", "forward_operations", "training_cost"]

#: What estimates assume: floating-point operations a second that a training reaches. SmallConvNet on CIFAR-10 reaches
#: about the first on two cores of a server; the second is a third of the peak of a GPU of 30 TFLOP/s.
CPU_SPEED, GPU_SPEED = 7e10, 1e13

#: Seconds between two looks at whether another process has finished.
WAIT = 5.0


@dataclasses.dataclass
class TrainingOptions:
    """Options of items that train networks on images."""

    data: MaybePath = None
    """Folder of the data sets; $WIDEFLAT_DATA, then the usual places when left out."""
    allow_altered: bool = False
    """Use data files whose checksum is not the official one, knowingly."""
    limit_data: MaybeInt = None
    """Train and measure on at most this many images."""
    runs: MaybePath = None
    """Folder of the trainings, which table1, fig2 to fig5 and fig7 share; OUT/runs when left out."""
    device: MaybeText = None
    """Where to train and measure: cpu, cuda, mps; a GPU if there is one when left out."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training: its settings and its seed."""

    preset: Preset
    seed: int

    @property
    def name(self) -> str:
        """Of its run directory."""
        return f"{self.preset.name}-{self.preset.algorithm}-seed-{self.seed}"

    def moments(self, parts: Sequence[float]) -> list[int]:
        """The epochs at the given parts of the training, none of them twice.

        Example:
            >>> from wideflat.presets import preset
            >>> Cell(preset("cifar10-resnet18", "esgd"), 0).moments((0.001, 0.25, 1.0))
            [1, 8, 32]
        """
        return sorted({max(1, round(part * self.preset.epochs)) for part in parts})


class Trainings:
    """A folder of runs, and what is needed to train into it.

    Args:
        options: What was chosen: folders, data, device.
        own: The folder of the item, for its runs where no folder of runs was chosen.
        limit_data: Train and measure on at most this many images.
        whole_test: Test on all images all the same.
        tensorboard: Write TensorBoard event files.

    Attributes:
        failed: Trainings that diverged, with the reason.
    """

    def __init__(
        self,
        options: TrainingOptions,
        own: Path,
        limit_data: int | None = None,
        whole_test: bool = False,
        tensorboard: bool = True,
    ) -> None:
        if limit_data is not None and limit_data < 1:
            raise ValueError(f"limit_data must be >= 1, got {limit_data}")
        self.folder = own / "runs" if options.runs is None else Path(options.runs)
        self.data, self.allow_altered = options.data, options.allow_altered
        self.limit_data, self.whole_test = limit_data, whole_test
        self.tensorboard = tensorboard
        self.device = str(choose_device(options.device))
        self.failed: dict[str, str] = {}
        self._data: dict[str, ImageData] = {}

    # ---- one training

    def images(self, preset: Preset) -> ImageData:
        """The data set of a training, loaded once; whole, unless only its training part is limited."""
        data = self.whole_images(preset.dataset, self.allow_altered)
        return data.limited(self.limit_data, whole_test=True) if self.whole_test else data

    def whole_images(self, name: str, allow_altered: bool) -> ImageData:
        """A data set, loaded once."""
        if name not in self._data:
            self._data[name] = load_images(name, self.data, allow_altered=allow_altered)
        return self._data[name]

    def train(self, cell: Cell, snapshots: Sequence[int], more: Mapping[str, Any], arguments: Mapping[str, Any]) -> Run:
        """The finished run of a cell, trained now if need be.

        Args:
            cell: Which.
            snapshots: Epochs whose network is kept.
            more: Options (:class:`wideflat.training.training.Options`) besides seed and images.
            arguments: More arguments of :func:`wideflat.training.training.train`.
        """
        path, data = self.folder / cell.name, self.images(cell.preset)
        options = Options(seed=cell.seed, limit_data=None if self.whole_test else self.limit_data, **more)
        if (path / "config.json").exists() and (run := Run.open(path)).result() is not None:
            run.must_be(configuration(cell.preset, data, options))
            return run
        where: dict[str, Any] = {"device": self.device, "tensorboard": self.tensorboard}
        return train(cell.preset, path, data, options, snapshots=snapshots, **where, **arguments)

    def finished(self, cell: Cell) -> Run | None:
        """The run of a cell, if it is trained to the end."""
        path = self.folder / cell.name
        if not (path / "model.json").exists() or not (path / "config.json").exists():
            return None
        run = Run.open(path)
        return run if run.result() is not None else None

    def busy(self, cell: Cell) -> bool:
        """Whether another process works on a cell."""
        path = self.folder / cell.name
        if not (path / "lock").exists():
            return False
        try:
            with Run(path, {}).locked():
                return False
        except RunInUse:
            return True

    # ---- what has been trained

    def started(self) -> Iterator[tuple[Cell, Run]]:
        """All runs in the folder, finished or not, by name."""
        for path in sorted(self.folder.glob("*/config.json")):
            with contextlib.suppress(FileNotFoundError, ValueError, RuntimeError, KeyError):
                run = Run.open(path.parent)
                yield Cell(run.experiment, run.part("options")["seed"]), run

    def cost(self, cells: Sequence[Cell]) -> str:
        """In words what it takes to train those that are not trained yet."""
        left = [cell for cell in cells if not (self.folder / cell.name / "model.json").exists()]
        return training_cost(left, self.limit_data)

    def deviations(self, quick: bool) -> list[str]:
        """In what the trainings are not the paper's, for remarks and captions; the reduced form has its own label."""
        said = []
        if not quick:
            if self.limit_data is not None:
                said.append(f"At most {self.limit_data} images are used.")
            if any(run.part("data").get("altered") for _, run in self.started()):
                said.append("Files of the data set are not the published ones (altered): the pixels differ.")
        return said + [f"{name} diverged: {reason}" for name, reason in self.failed.items()]

    def provenance(self) -> dict[str, Any]:
        """The choices that all trainings share."""
        return {"limit_data": self.limit_data, "allow_altered": self.allow_altered}


# ----------------------------------------------------------------------------------------------- training and measuring


def _nothing(cell: Cell, run: Run) -> None:
    """Nothing is measured."""


@dataclasses.dataclass
class Plan:
    """What an item has trained and measured: the work of the items on images.

    Args:
        trainings: The folder of runs.
        cells: All trainings, in an order that gives something to compare early.
        write_tables: Writes the tables of what has been trained and measured so far.
        measure: What is measured on a finished run.
        measured: Whether a finished run has been measured.
        snapshots: Epochs whose network is kept.
        options: More options of the trainings (:class:`wideflat.training.training.Options`).
        arguments: More arguments of :func:`wideflat.training.training.train`.
        words: What :meth:`cost` says after the trainings.
    """

    trainings: Trainings
    cells: Sequence[Cell]
    write_tables: Callable[[], None]
    measure: Callable[[Cell, Run], None] = _nothing
    measured: Callable[[Cell, Run], bool] = lambda cell, run: True
    snapshots: Callable[[Cell], list[int]] = lambda cell: []
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    words: Callable[[], str] = lambda: ""

    def cost(self) -> str:
        """How many trainings, how many operations, how long on what."""
        return f"{self.trainings.cost(self.cells)} {self.words()}".strip()

    def compute(self, experiment: Experiment, workers: Workers | None = None) -> None:
        """Train and measure what is not there yet; the tables are written after each training."""
        self.write_tables()
        left, answers = list(self.cells), dict[str, Answer]()
        try:
            while left:
                elsewhere = self._here(left) if workers is None else self._ask(workers, experiment, left, answers)
                if len(elsewhere) == len(left):
                    with Progress(f"waiting for another process that works on {elsewhere[0].name}") as bar:
                        time.sleep(WAIT)
                        bar.advance()
                left = elsewhere
        finally:  # also of a training that was interrupted
            self.write_tables()
        report_lost(experiment.name, answers)

    def compute_piece(self, name: str) -> Answer:
        """Train and measure the cell of this name."""
        for cell in self.cells:
            if cell.name == name:
                return self._finish(cell)
        raise ValueError(f"there is no training {name!r}; there are {', '.join(cell.name for cell in self.cells)}")

    def _finish(self, cell: Cell) -> Answer:
        """Train and measure a cell, as far as that is not done."""
        try:
            run = self.trainings.train(cell, self.snapshots(cell), self.options, self.arguments)
            with run.locked():
                self.measure(cell, run)
        except RunInUse as reason:
            return Answer("in use", str(reason))
        except Diverged as reason:
            return Answer("diverged", str(reason))
        return Answer("done")

    def _here(self, cells: Sequence[Cell]) -> list[Cell]:
        """Train and measure in this process; returns the cells that another process is working on."""
        elsewhere = []
        for cell in cells:
            answer = self._finish(cell)
            if answer.state == "in use":
                elsewhere.append(cell)
                continue
            self._note(cell, answer)
            self.write_tables()
        return elsewhere

    def _ask(
        self, workers: Workers, experiment: Experiment, cells: Sequence[Cell], answers: dict[str, Answer]
    ) -> list[Cell]:
        """Train and measure in other processes; returns the cells that are being worked on by neither."""
        missing = [cell for cell in cells if not self._is_there(cell)]
        elsewhere = self._here([cell for cell in cells if cell not in missing])
        busy = [cell for cell in missing if self.trainings.busy(cell)]
        missing = [cell for cell in missing if cell not in busy]
        if len(missing) < 2 and workers.engine == "local":  # one training has all the threads to itself
            return [*elsewhere, *busy, *self._here(missing)]
        for dataset in dict.fromkeys(cell.preset.dataset for cell in missing):
            find_images(dataset, self.trainings.data)  # says it once if it is not there
        names = [cell.name for cell in missing]
        answers |= workers.compute(experiment, names, self.write_tables, self.trainings.device, shared=True)
        for cell in missing:
            answer = answers[cell.name]
            if answer.state == "in use" or (answer.state == "done" and self._finish(cell).state == "in use"):
                elsewhere.append(cell)
            else:
                self._note(cell, answer)
        return [*elsewhere, *busy]

    def _note(self, cell: Cell, answer: Answer) -> None:
        if answer.state == "diverged":
            self.trainings.failed[cell.name] = answer.reason

    def _is_there(self, cell: Cell) -> bool:
        """Whether a cell is trained and measured."""
        run = self.trainings.finished(cell)
        return run is not None and self.measured(cell, run)


# ------------------------------------------------------------------------------------------------------------ the cost


def forward_operations(preset: Preset) -> float:
    """Floating-point operations of one image through the network, counted on a network without numbers."""
    like = dataclasses.replace(
        next(iter(PRESETS.values()))["sgd"],
        **{name: getattr(preset, name) for name in ("model", "model_arguments", "num_classes", "from_file")},
    )
    return _forward_operations(like, preset.from_file, preset.image_size)


@functools.cache
def _forward_operations(like: Preset, from_file: bool, size: int) -> float:
    with torch.device("meta"):
        network = like.build_model().eval()
        image = torch.empty(1, dict(like.model_arguments).get("in_channels", 3), size, size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(image)
    return float(counter.get_total_flops())


def training_cost(cells: Sequence[Cell], limit_data: int | None = None) -> str:
    """In words what it takes to train cells.

    A training step costs three forward passes (forward, and backward twice that); evaluation is left out.

    Example:
        >>> from wideflat.presets import preset
        >>> print(training_cost([Cell(preset("cifar10-smallconvnet"), 0)]))
        1 training, 300 passes over its data set, 4e+14 floating-point operations: 1.5 hours at 70 GFLOP/s (two cores),
        1 minute at 10 TFLOP/s (one GPU); counted as three forward passes a step.
    """
    if not cells:
        return "all trainings are finished."
    operations = passes = 0.0
    for cell in cells:
        preset = cell.preset
        images = min(FACTS[preset.dataset].train, limit_data or 10**9)
        passes += preset.passes
        operations += 3 * preset.passes * images * forward_operations(preset)
    plural = "s" if len(cells) > 1 else ""
    return (
        f"{len(cells)} training{plural}, {passes:.0f} passes over {'their data sets' if plural else 'its data set'}, "
        f"{operations:.0e} floating-point operations: {duration(operations / CPU_SPEED)} at "
        f"{CPU_SPEED / 1e9:.0f} GFLOP/s (two cores), {duration(operations / GPU_SPEED)} at {GPU_SPEED / 1e12:.0f} "
        "TFLOP/s (one GPU); counted as three forward passes a step."
    )


def duration(seconds: float) -> str:
    """A time in words, as exact as an estimate can be.

    Example:
        >>> duration(20), duration(100), duration(9000)
        ('less than a minute', '2 minutes', '2.5 hours')
    """
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    return f"{minutes} minute{'s' * (minutes > 1)}" if minutes < 60 else f"{seconds / 3600:.1f} hours"
