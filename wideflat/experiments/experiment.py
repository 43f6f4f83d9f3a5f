"""What every table and figure of the paper shares: compute into tables, draw from tables, compare with the paper.

::

    FOLDER/ITEM/
      *.csv, *.json         the tables and where their numbers come from
      figures/              every chart as CSV, SVG and PNG
      report.html           the item on one page
      ...                   runs and solutions that the tables were measured on

``compute`` may be interrupted at any moment and called again: what is finished is not computed again. ``charts`` and
``comparison`` read the tables only, so a figure can be redrawn without computing.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wideflat.environment import environment
from wideflat.experiments.table import Table
from wideflat.report.chart import Chart
from wideflat.report.page import Page
from wideflat.report.terminal import print_table

__all__ = ["Comparison", "Experiment"]


@dataclass
class Comparison:
    """Rows of paper against measured, ready to print.

    Args:
        columns: Headings.
        rows: One list a row, as many entries as headings.
        remarks: Sentences to read with it: what differs from the paper, what is missing.
        title: Above the table.
        more: Further tables.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    remarks: Sequence[str] = ()
    title: str = "Paper against measured"
    more: Sequence[Comparison] = ()

    def print(self, title: str = "") -> None:
        """Print all its tables to standard output, the first under another title if one is given."""
        print_table(self.columns, self.rows, title=title or self.title)
        for table in self.more:
            print()
            table.print()


class Experiment(abc.ABC):
    """One table or figure of the paper.

    Args:
        folder: Where everything of this item goes.
        quick: Compute a reduced form that ends in minutes on two cores. It is labelled as such in every output.
        data: The folder of the data sets, for experiments on images; None to look in the usual places.
        seed: Of everything random.
    """

    #: The name on the command line, and the heading.
    name: str
    title: str
    #: What the paper shows, in a sentence or two.
    claim: str
    #: What the reduced form computes instead of the paper's experiment.
    quick_means: str

    def __init__(self, folder: Path, quick: bool = False, data: Path | None = None, seed: int = 0) -> None:
        self.folder = Path(folder)
        self.quick = quick
        self.data = data
        self.seed = seed

    @classmethod
    def options(cls) -> set[str]:
        """Names of the keyword arguments that the constructor takes, those of its base classes included."""
        names: set[str] = set()
        for kind in cls.__mro__:
            if "__init__" in vars(kind) and kind is not object:
                names |= set(inspect.signature(vars(kind)["__init__"]).parameters)
        return names - {"self", "folder", "quick", "more"}

    @abc.abstractmethod
    def cost(self) -> str:
        """What computing it takes, in words: how many trainings of what, hours on what."""

    @abc.abstractmethod
    def compute(self) -> None:
        """Train and measure what is not there yet, and write the tables."""

    @abc.abstractmethod
    def charts(self) -> list[Chart]:
        """The figures, drawn from the tables (of what has been computed so far)."""

    @abc.abstractmethod
    def comparison(self) -> Comparison:
        """Paper against measured, from the tables."""

    @property
    def label(self) -> str:
        """Empty for the paper's own experiment; for the reduced form, what it is instead."""
        return f"QUICK, not the paper's experiment: {self.quick_means}" if self.quick else ""

    @property
    def heading(self) -> str:
        """The title, marked if it is the reduced form."""
        return f"{self.title}{' [QUICK]' if self.quick else ''}"

    def provenance(self, **more: Any) -> dict[str, Any]:
        """What a table of this experiment says about its origin."""
        where = {key: value for key, value in environment().items() if key not in ("host", "pid")}
        return {"item": self.name, "label": self.label, "seed": self.seed, **where, **more}

    def table(self, name: str) -> Table | None:
        """A table of this experiment, or None where it has not been computed yet."""
        path = self.folder / f"{name}.csv"
        return Table.load(path) if path.exists() else None

    def write_report(self) -> Path:
        """Save every chart and the page; returns the path of the page."""
        charts = self.charts()
        if self.label:
            for chart in charts:
                chart.title = f"[QUICK] {chart.title}"
                chart.caption = f"{self.label}. {chart.caption}".strip()
        for chart in charts:
            chart.save(self.folder / "figures")
        page = Page(self.heading, f"wideflat reproduce {self.name}")
        self.add_to(page, charts)
        path = self.folder / "report.html"
        page.write(path)
        return path

    def add_to(self, page: Page, charts: Sequence[Chart]) -> None:
        """Write this experiment into a page: claim, label, paper against measured, figures, provenance."""
        comparison = self.comparison()
        page.section(self.title)
        page.paragraph(self.claim)
        if self.label:
            page.paragraph(self.label, kind="warning")
        for table in (comparison, *comparison.more):
            page.table(table.columns, table.rows, caption=table.title)
        for remark in comparison.remarks:
            page.paragraph(remark, kind="quiet")
        if charts:
            page.charts(*charts)
        for path in sorted(self.folder.glob("*.csv")):
            page.details(f"Where {path.name} comes from", Table.load(path).provenance)
