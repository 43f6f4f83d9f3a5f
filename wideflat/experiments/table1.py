"""Table 1: test errors of eight pairs of data set and architecture, four algorithms each."""

from __future__ import annotations

import numpy as np

from wideflat.experiments.cells import NAMES, CellExperiment, row_of
from wideflat.experiments.experiment import Comparison
from wideflat.experiments.table import Table
from wideflat.presets import COLUMNS, PRESETS, Preset, preset
from wideflat.report.chart import Chart, Series

__all__ = ["Table1", "paper_error", "percent"]


class Table1(CellExperiment):
    """Trains any cells of Table 1 and compares their test errors with the paper's.

    The error is that of the center: the network, w of Entropy-SGD, the barycenter of the replicas (with its batch norm
    computed anew). ``cells.csv`` has one row a training: also the mean error of the replicas, and of their ensemble.
    """

    name = "table1"
    title = "Table 1: test errors"
    claim = (
        "The paper finds that rSGD and eSGD reach a lower test error than the baseline with the same number of passes "
        "over the data, and that rSGD reaches a lower one still when every replica sees as much data as the baseline."
    )
    quick_means = (
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with SmallConvNet, the settings of the "
        "row otherwise; the paper's numbers are for another task"
    )
    default_rows = tuple(PRESETS)
    default_algorithms = COLUMNS
    default_seeds = 5
    quick_seeds = 2

    def write_tables(self) -> None:
        """One row a finished training."""
        table = Table(
            [
                "row",
                "algorithm",
                "seed",
                "epochs",
                "passes",
                "test_error",
                "train_error",
                "train_loss",
                "replica_test_error",
                "ensemble_test_error",
                "hours",
                "run",
            ],
            provenance=self.provenance(units="errors are fractions; train_error without augmentation"),
        )
        for cell, run in self.finished(self.rows_in("cells")):
            result = run.result()
            assert result is not None
            replicas = result.get("replica_test_errors")
            seconds = sum(row["seconds"] + row["evaluation_seconds"] for row in run.metrics("timing"))
            table.add(
                row=row_of(cell.experiment),
                algorithm=cell.experiment.algorithm,
                seed=cell.seed,
                epochs=cell.experiment.epochs,
                passes=cell.experiment.passes,
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
        table = self.table("cells")
        charts = []
        for row in [] if table is None else table.unique("row"):
            part = table.where(row=row)  # type: ignore[union-attr] # None has no rows
            charts.append(
                Chart(
                    f"table1-{row}",
                    f"Test error: {row}",
                    "",
                    "test error (%)",
                    [
                        Series(NAMES.get(name, name), [], list(100 * part.where(algorithm=name)["test_error"]))
                        for name in part.unique("algorithm")
                    ],
                    kind="distribution",
                    caption=self.caption("Every training, with mean and standard deviation over seeds."),
                )
            )
        return charts

    def comparison(self) -> Comparison:
        """Mean and standard deviation over seeds against the paper's."""
        table = self.table("cells")
        rows = []
        for row in [] if table is None else table.unique("row"):
            for algorithm in table.where(row=row).unique("algorithm"):  # type: ignore[union-attr]
                part = table.where(row=row, algorithm=algorithm)  # type: ignore[union-attr]
                rows.append(
                    [
                        row,
                        NAMES.get(algorithm, algorithm),
                        paper_error(preset(row, algorithm)),
                        percent(part["test_error"]),
                        percent(part["replica_test_error"]),
                        percent(part["ensemble_test_error"]),
                        percent(part["train_error"]),
                        len(part),
                    ]
                )
        return Comparison(
            ["row", "algorithm", "paper (%)", "measured (%)", "replicas (%)", "ensemble (%)", "training (%)", "n"],
            rows,
            [
                "Measured: test error of the center, mean ± standard deviation over n seeds; beside it the mean of the "
                "replicas, their ensemble, and the training error of the center without augmentation.",
                *self.deviations(),
            ],
        )


def paper_error(cell: Preset) -> str:
    """The number of Table 1, as printed; a dash where the table is blank.

    Example:
        >>> paper_error(preset("cifar10-resnet18", "rsgd")), paper_error(preset("cifar10-pyramidnet", "esgd"))
        ('12.4 ± 0.3', '-')
    """
    if cell.paper_error is None:
        return "-"
    return f"{cell.paper_error:.1f}" + ("" if cell.paper_spread is None else f" ± {cell.paper_spread:.1f}")


def percent(fractions: np.ndarray, digits: int = 2) -> str:
    """Mean ± standard deviation of fractions, in percent; a dash where there are none.

    Example:
        >>> percent(np.array([0.10, 0.12])), percent(np.array([0.1])), percent(np.array([np.nan]))
        ('11.00 ± 1.41', '10.00', '-')
    """
    values = 100 * fractions[np.isfinite(fractions)]
    if not len(values):
        return "-"
    spread = f" ± {values.std(ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{spread}"
