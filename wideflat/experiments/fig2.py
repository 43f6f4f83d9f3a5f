"""Figure 2: test error along training, ResNet-18 on CIFAR-10 and ResNet-50 on Tiny ImageNet."""

from __future__ import annotations

import numpy as np

from wideflat.experiments.cells import NAMES, CellExperiment, row_of
from wideflat.experiments.experiment import Comparison
from wideflat.experiments.table import Table
from wideflat.experiments.table1 import paper_error, percent
from wideflat.presets import COLUMNS, Preset, preset
from wideflat.report.chart import Chart, Series

__all__ = ["Fig2", "rescaling"]


class Fig2(CellExperiment):
    """Curves of the test error, averaged over seeds. ``curves.csv`` has one row an evaluated epoch of a training."""

    name = "fig2"
    title = "Figure 2: test error along training"
    claim = (
        "The paper shows the test error of ResNet-18 on CIFAR-10 and of ResNet-50 on Tiny ImageNet along the training, "
        "averaged over 5 runs, epochs rescaled by y for rSGD and by L for eSGD (not for rSGD x y): the entropic "
        "algorithms end below SGD."
    )
    quick_means = (
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with a residual network of 2 narrow "
        "blocks in the place of both, the settings of each row otherwise"
    )
    default_rows = ("cifar10-resnet18", "tinyimagenet-resnet50")
    default_algorithms = COLUMNS
    default_seeds = 5
    quick_rows = default_rows
    quick_seeds = 2

    def write_tables(self) -> None:
        """The test errors of every training at every epoch, also of those that are under way."""
        table = Table(
            [
                "row",
                "algorithm",
                "seed",
                "epoch",
                "rescaled_epoch",
                "test_error",
                "train_error",
                "train_loss",
                "finished",
            ],
            provenance=self.provenance(units="errors are fractions; train_error and train_loss as seen in training"),
        )
        for cell, run in self.started(self.rows_in("curves")):
            experiment = cell.experiment
            for metrics in run.metrics():
                if "test_error" in metrics:
                    table.add(
                        row=row_of(experiment),
                        algorithm=experiment.algorithm,
                        seed=cell.seed,
                        epoch=metrics["epoch"],
                        rescaled_epoch=metrics["epoch"] * rescaling(experiment),
                        test_error=metrics["test_error"],
                        train_error=metrics["train_error"],
                        train_loss=metrics["train_loss"],
                        finished=run.result() is not None,
                    )
        table.save(self.folder / "curves.csv")

    def charts(self) -> list[Chart]:
        """One figure a row: mean over seeds with a band of one standard deviation."""
        table = self.table("curves")
        charts = []
        for row in [] if table is None else table.unique("row"):
            part = table.where(row=row)  # type: ignore[union-attr] # None has no rows
            series = []
            seeds = {}
            for algorithm in part.unique("algorithm"):
                curve = part.where(algorithm=algorithm)
                seeds[algorithm] = len(curve.unique("seed"))
                x = curve.unique("rescaled_epoch")
                values = [100 * curve.where(rescaled_epoch=at)["test_error"] for at in x]
                series.append(
                    Series(
                        f"{NAMES.get(algorithm, algorithm)} (n = {seeds[algorithm]})",
                        x,
                        [float(v.mean()) for v in values],
                        error=[float(v.std(ddof=1)) if len(v) > 1 else 0.0 for v in values],
                    )
                )
            charts.append(
                Chart(
                    f"fig2-{row}",
                    f"Test error along training: {row}",
                    "epoch (times y for rSGD, times L for eSGD)",
                    "test error (%)",
                    series,
                    caption=self.caption(
                        "Mean over n seeds of the center's test error; the band is one standard deviation. The data "
                        "consumed are the same at the same abscissa, except for rSGD x y, whose replicas each consume "
                        "that much."
                    ),
                )
            )
        return charts

    def comparison(self) -> Comparison:
        """The ends of the curves against Table 1 (the figure itself prints no numbers)."""
        table = self.table("curves")
        rows = []
        for row in [] if table is None else table.unique("row"):
            for algorithm in table.where(row=row).unique("algorithm"):  # type: ignore[union-attr]
                curve = table.where(row=row, algorithm=algorithm)  # type: ignore[union-attr]
                last = {}
                for entry in curve:
                    last[entry["seed"]] = entry
                ends = [entry for entry in last.values() if entry["finished"]]
                best = [curve.where(seed=entry["seed"])["test_error"].min() for entry in ends]
                rows.append(
                    [
                        row,
                        NAMES.get(algorithm, algorithm),
                        paper_error(preset(row, algorithm)),
                        percent(np.array([entry["test_error"] for entry in ends])),
                        percent(np.array(best)),
                        f"{len(ends)} of {len(last)}",
                    ]
                )
        return Comparison(
            ["row", "algorithm", "Table 1 (%)", "end (%)", "lowest (%)", "finished"],
            rows,
            [
                "Measured: test error of the center at the last epoch, and its lowest value along the training, mean ± "
                "standard deviation over finished seeds.",
                *self.deviations(),
            ],
        )


def rescaling(experiment: Preset) -> int:
    """What an epoch is multiplied with on the axis of Figure 2: y for rSGD, L for eSGD, 1 for the others.

    Example:
        >>> [rescaling(preset("cifar10-resnet18", name)) for name in ("sgd", "rsgd", "esgd", "rsgdxy")]
        [1, 3, 5, 1]
    """
    if experiment.algorithm == "rsgdxy":
        return 1
    return experiment.num_replicas * experiment.passes_per_epoch
