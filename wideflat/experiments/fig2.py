"""Figure 2: test error along training, ResNet-18 on CIFAR-10 and ResNet-50 on Tiny ImageNet."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from wideflat.experiments.cells import NAMES, CellOptions, Cells, Choice, row_of
from wideflat.experiments.experiment import Comparison, Experiment, Item
from wideflat.experiments.finding import Contrast, against, said
from wideflat.experiments.statistics import Shown, paper_error, percent
from wideflat.experiments.table import Table
from wideflat.experiments.trainings import Plan
from wideflat.presets import COLUMNS, Preset, preset
from wideflat.report.chart import Chart, Series

__all__ = ["ITEM", "Fig2", "Fig2Options", "rescaling"]

ROWS = ("cifar10-resnet18", "tinyimagenet-resnet50")
CHOICE = Choice.of(ROWS, seeds=5, quick_seeds=2, algorithms=lambda row: COLUMNS)

#: ``curves.csv`` has one row an evaluated epoch of a training.
CURVES = [
    *("row", "algorithm", "seed", "epoch", "rescaled_epoch", "test_error", "train_error", "train_loss", "finished"),
]


@dataclasses.dataclass
class Fig2Options(CellOptions):
    """Test error along training: ResNet-18 on CIFAR-10, ResNet-50 on Tiny ImageNet.

    Examples:
      wideflat reproduce fig2 --quick
      wideflat reproduce fig2 --rows cifar10-resnet18 --seeds 1 --epochs 16 --data ~/data
    """


class Fig2(Experiment):
    """Curves of the test error, averaged over seeds."""

    def __init__(self, item: Item, folder: Path, options: Fig2Options, quick: bool = False) -> None:
        super().__init__(item, folder, options, quick)
        self.cells = Cells(options, CHOICE, self.folder, quick)
        self.numbers = self.cells.numbers()
        self.work = Plan(self.cells.trainings, self.cells.all, self.write_tables, snapshots=self.cells.snapshots)

    def write_tables(self) -> None:
        """The test errors of every training at every epoch, also of those that are under way."""
        units = "errors are fractions; train_error and train_loss as seen in training"
        table = Table(CURVES, provenance=self.provenance(**self.cells.provenance(), units=units))
        for cell, run in self.cells.started(self.table("curves")):
            for metrics in run.metrics():
                if "test_error" in metrics:
                    table.add(
                        row=row_of(cell.preset),
                        algorithm=cell.preset.algorithm,
                        seed=cell.seed,
                        epoch=metrics["epoch"],
                        rescaled_epoch=metrics["epoch"] * rescaling(cell.preset),
                        test_error=metrics["test_error"],
                        train_error=metrics["train_error"],
                        train_loss=metrics["train_loss"],
                        finished=run.result() is not None,
                    )
        table.save(self.folder / "curves.csv")

    def charts(self) -> list[Chart]:
        """One figure a row: mean over seeds with a band of one standard deviation."""
        table = self.table("curves") or Table(CURVES)
        caption = [
            "Mean over n seeds of the center's test error; the band is one standard deviation. The data consumed are "
            "the same at the same abscissa, except for rSGD x y, whose replicas each consume that much.",
            *self.cells.deviations(),
        ]
        axis = "epoch (times y for rSGD, times L for eSGD)"
        return [
            Chart(
                f"fig2-{row}",
                f"Test error along training: {row}",
                axis,
                "test error (%)",
                _mean_curves(table.where(row=row)),
                caption=" ".join(caption),
            )
            for row in table.unique("row")
        ]

    def finding(self) -> str:
        """In each row, whose test error ends below that of SGD."""
        table = self.table("curves") or Table(CURVES)
        clauses = []
        for row in table.unique("row"):
            ends = {
                name: _ends(table.where(row=row, algorithm=name)) for name in table.where(row=row).unique("algorithm")
            }
            sgd = ends.pop("sgd", [])
            contrasts = {NAMES.get(name, name): Contrast.of(values, sgd) for name, values in ends.items()}
            clauses.append(against("SGD", f"test error of {row} at the end", contrasts))
        return said(*clauses)

    def comparison(self) -> Comparison:
        """The ends of the curves against Table 1 (the figure itself prints no numbers)."""
        table = self.table("curves") or Table(CURVES)
        rows = []
        for row in table.unique("row"):
            for algorithm in table.where(row=row).unique("algorithm"):
                curve = table.where(row=row, algorithm=algorithm)
                last = {entry["seed"]: entry for entry in curve}
                ends = [entry for entry in last.values() if entry["finished"]]
                best = [curve.where(seed=entry["seed"])["test_error"].min() for entry in ends]
                rows.append(
                    [
                        row,
                        NAMES.get(algorithm, algorithm),
                        paper_error(preset(row, algorithm)),
                        percent(np.array([entry["test_error"] for entry in ends])),
                        percent(np.array(best)),
                        Shown(f"{len(ends)} of {len(last)}", value=len(ends), of=len(last)),
                    ]
                )
        return Comparison(
            ["row", "algorithm", "Table 1 (%)", "end (%)", "lowest (%)", "finished"],
            rows,
            [
                "Measured: test error of the center at the last epoch, and its lowest value along the training, mean ± "
                "standard deviation over finished seeds.",
                *self.cells.deviations(),
            ],
            keys=["row", "algorithm", "paper", "end", "lowest", "finished"],
        )


def _mean_curves(table: Table) -> list[Series]:
    """The means over the seeds of every algorithm."""
    return [_mean_curve(table.where(algorithm=name), NAMES.get(name, name)) for name in table.unique("algorithm")]


def _ends(curve: Table) -> list[float]:
    """Test errors at the end of the trainings that are finished, in percent."""
    last = {entry["seed"]: entry for entry in curve}
    return [100 * entry["test_error"] for entry in last.values() if entry["finished"]]


def _mean_curve(curve: Table, name: str) -> Series:
    x = curve.unique("rescaled_epoch")
    values = [100 * curve.where(rescaled_epoch=at)["test_error"] for at in x]
    return Series(
        name,
        x,
        [float(v.mean()) for v in values],
        error=[float(v.std(ddof=1)) if len(v) > 1 else math.nan for v in values],
        n=[len(v) for v in values],
    )


def rescaling(cell: Preset) -> int:
    """What an epoch is multiplied with on the axis of Figure 2: y for rSGD, L for eSGD, 1 for the others.

    Example:
        >>> [rescaling(preset("cifar10-resnet18", name)) for name in ("sgd", "rsgd", "esgd", "rsgdxy")]
        [1, 3, 5, 1]
    """
    if cell.algorithm == "rsgdxy":
        return 1
    return cell.num_replicas * cell.passes_per_epoch


ITEM = Item(
    name="fig2",
    title="Figure 2: test error along training",
    claim=(
        "The paper shows the test error of ResNet-18 on CIFAR-10 and of ResNet-50 on Tiny ImageNet along the training, "
        "averaged over 5 runs, epochs rescaled by y for rSGD and by L for eSGD (not for rSGD x y): the entropic "
        "algorithms end below SGD."
    ),
    quick_means=(
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with a residual network of 2 narrow "
        "blocks in the place of both, the settings of each row otherwise"
    ),
    options=Fig2Options,
    make=Fig2,
)
