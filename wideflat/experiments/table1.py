"""Table 1: test errors of eight pairs of data set and architecture, four algorithms each."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from wideflat.experiments.cells import NAMES, CellOptions, Cells, Choice, row_of
from wideflat.experiments.experiment import Comparison, Experiment, Item
from wideflat.experiments.finding import Contrast, against, said
from wideflat.experiments.statistics import paper_error, percent
from wideflat.experiments.table import Table
from wideflat.experiments.trainings import Plan
from wideflat.presets import COLUMNS, PRESETS, preset
from wideflat.report.chart import Chart, Series

__all__ = ["ITEM", "Table1", "Table1Options"]

CHOICE = Choice.of(
    tuple(PRESETS), seeds=5, quick_rows=("cifar10-smallconvnet",), quick_seeds=2, algorithms=lambda row: COLUMNS
)

#: ``cells.csv`` has one row a training.
CELLS = [
    *("row", "algorithm", "seed", "epochs", "passes", "test_error", "train_error", "train_loss"),
    *("replica_test_error", "ensemble_test_error", "hours", "run"),
]


@dataclasses.dataclass
class Table1Options(CellOptions):
    """Test errors of eight pairs of data set and architecture, four algorithms each, against the paper's.

    Examples:
      wideflat reproduce table1 --quick
      wideflat reproduce table1 --rows cifar10-smallconvnet --algorithms sgd rsgd esgd --seeds 3 --data ~/data
      wideflat reproduce table1 --engine slurm --slurm-options partition=gpu gpus_per_node=1 timeout_min=600
    """


class Table1(Experiment):
    """Trains any cells of Table 1 and compares their test errors with the paper's.

    The error is that of the center: the network, w of Entropy-SGD, the barycenter of the replicas (with its batch norm
    computed anew). ``cells.csv`` also has the mean error of the replicas, and that of their ensemble.
    """

    def __init__(self, item: Item, folder: Path, options: Table1Options, quick: bool = False) -> None:
        super().__init__(item, folder, options, quick)
        self.cells = Cells(options, CHOICE, self.folder, quick)
        self.numbers = self.cells.numbers()
        self.work = Plan(self.cells.trainings, self.cells.all, self.write_tables, snapshots=self.cells.snapshots)

    def write_tables(self) -> None:
        """One row a finished training."""
        units = "errors are fractions; train_error without augmentation"
        table = Table(CELLS, provenance=self.provenance(**self.cells.provenance(), units=units))
        for cell, run in self.cells.finished(self.table("cells")):
            result = run.result()
            assert result is not None
            replicas = result.get("replica_test_errors")
            seconds = sum(row["seconds"] + row["evaluation_seconds"] for row in run.metrics("timing"))
            table.add(
                row=row_of(cell.preset),
                algorithm=cell.preset.algorithm,
                seed=cell.seed,
                epochs=cell.preset.epochs,
                passes=cell.preset.passes,
                test_error=result["test_error"],
                train_error=result["train_error"],
                train_loss=result["train_loss"],
                replica_test_error=None if replicas is None else float(np.mean(replicas)),
                ensemble_test_error=result.get("ensemble_test_error"),
                hours=round(seconds / 3600, 4),
                run=run.path.name,
            )
        table.save(self.folder / "cells.csv")

    def charts(self) -> list[Chart]:
        """Test errors of every training, one figure a row of the table."""
        table = self.table("cells") or Table(CELLS)
        caption = ["Every training, with mean and standard deviation over seeds.", *self.cells.deviations()]
        charts = []
        for row in table.unique("row"):
            part = table.where(row=row)
            series = [
                Series(NAMES.get(name, name), [], list(100 * part.where(algorithm=name)["test_error"]))
                for name in part.unique("algorithm")
            ]
            title, about = f"Test error: {row}", " ".join(caption)
            charts.append(
                Chart(f"table1-{row}", title, "", "test error (%)", series, kind="distribution", caption=about)
            )
        return charts

    def finding(self) -> str:
        """In each row, whose test error is lower than that of SGD."""
        table = self.table("cells") or Table(CELLS)
        return said(*(_errors_against_sgd(table.where(row=row), row) for row in table.unique("row")))

    def comparison(self) -> Comparison:
        """Mean and standard deviation over seeds against the paper's."""
        table = self.table("cells") or Table(CELLS)
        rows = []
        for row in table.unique("row"):
            for algorithm in table.where(row=row).unique("algorithm"):
                part = table.where(row=row, algorithm=algorithm)
                errors = ("test_error", "replica_test_error", "ensemble_test_error", "train_error")
                paper = paper_error(preset(row, algorithm))
                rows.append(
                    [row, NAMES.get(algorithm, algorithm), paper, *(percent(part[name]) for name in errors), len(part)]
                )
        return Comparison(
            ["row", "algorithm", "paper (%)", "measured (%)", "replicas (%)", "ensemble (%)", "training (%)", "n"],
            rows,
            [
                "Measured: test error of the center, mean ± standard deviation over n seeds; beside it the mean of the "
                "replicas, their ensemble, and the training error of the center without augmentation.",
                *self.cells.deviations(),
            ],
            keys=["row", "algorithm", "paper", "measured", "replicas", "ensemble", "training", "n"],
        )


def _errors_against_sgd(part: Table, row: str) -> str:
    sgd = 100 * part.where(algorithm="sgd")["test_error"]
    others = [name for name in part.unique("algorithm") if name != "sgd"]
    contrasts = {
        NAMES.get(name, name): Contrast.of(100 * part.where(algorithm=name)["test_error"], sgd) for name in others
    }
    return against("SGD", f"test error of {row}", contrasts)


ITEM = Item(
    name="table1",
    title="Table 1: test errors",
    claim=(
        "The paper finds that rSGD and eSGD reach a lower test error than the baseline with the same number of passes "
        "over the data, and that rSGD reaches a lower one still when every replica sees as much data as the baseline."
    ),
    quick_means=(
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with SmallConvNet, the settings of the "
        "row otherwise; the paper's numbers are for another task"
    ),
    options=Table1Options,
    make=Table1,
)
