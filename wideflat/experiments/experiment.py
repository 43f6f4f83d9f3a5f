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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from wideflat.checks.records import location
from wideflat.environment import environment
from wideflat.experiments.options import Options, chosen
from wideflat.experiments.statistics import Shown
from wideflat.experiments.table import Table
from wideflat.experiments.workers import Answer, Workers
from wideflat.report.chart import Chart
from wideflat.report.page import Page
from wideflat.report.terminal import print_table

__all__ = ["Comparison", "Experiment", "Item", "Work"]


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper, before any option is chosen.

    Args:
        name: On the command line.
        title: The heading.
        claim: What the paper shows, in a sentence or two.
        quick_means: What the reduced form computes instead of the paper's experiment.
        options: The dataclass of its options.
        make: Makes the experiment of (item, folder, options, quick).

    Example:
        >>> from wideflat.experiments import item
        >>> figure = item("fig6").open("somewhere", quick=True, restarts=2)
        >>> figure.name, figure.options.restarts, [case.label for case in figure.cases]
        ('fig6', 2, ['dropout-0', 'dropout-0.2', 'dropout-0.4'])
    """

    name: str
    title: str
    claim: str
    quick_means: str
    options: type[Options]
    make: Callable[[Item, Path, Any, bool], Experiment]

    def open(self, folder: str | Path, quick: bool = False, **options: Any) -> Any:
        """The experiment in a folder.

        Args:
            folder: Where everything of it goes.
            quick: Compute a reduced form that ends in minutes on two cores, labelled as such in every output.
            **options: Of this item; those left out have its defaults.
        """
        return self.make(self, location("folder", folder), self.options(**options), quick)


@dataclass
class Comparison:
    """Rows of paper against measured, ready to print.

    Args:
        columns: Headings.
        rows: One list a row, as many entries as headings.
        remarks: Sentences to read with it: what differs from the paper, what is missing.
        title: Above the table.
        more: Further tables.
        keys: What JSON calls the columns; as the headings say when left out.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    remarks: Sequence[str] = ()
    title: str = "Paper against measured"
    more: Sequence[Comparison] = ()
    keys: Sequence[str] = ()

    def print(self, title: str = "") -> None:
        """Print all its tables to standard output, the first under another title if one is given."""
        print_table(self.columns, self.rows, title=title or self.title)
        for table in self.more:
            print()
            table.print()

    def records(self) -> list[dict[str, object]]:
        """The rows for JSON, numbers as numbers.

        Example:
            >>> Comparison(["setting", "error (%)"], [["esgd", Shown("6.7 ± 0.3", value=6.71, spread=0.3)]]).records()
            [{'setting': 'esgd', 'error (%)': 6.71, 'error (%)_spread': 0.3}]
            >>> Comparison(["paper"], [["-"]]).records()
            [{'paper': None}]
        """
        records: list[dict[str, object]] = []
        for row in self.rows:
            record: dict[str, object] = {}
            for key, entry in zip(self.keys or self.columns, row, strict=True):
                nothing = entry in ("-", "–")  # what tables show where there is none
                record |= entry.record(key) if isinstance(entry, Shown) else {key: None if nothing else entry}
            records.append(record)
        return records


class Work(Protocol):
    """What computes the tables of an experiment, in pieces; an experiment has one."""

    def cost(self) -> str:
        """What it takes, in words: how many trainings of what, hours on what."""

    def compute(self, experiment: Experiment, workers: Workers | None = None) -> None:
        """Train and measure what is not there yet, and write the tables.

        Args:
            experiment: Whose tables.
            workers: Processes that compute the pieces; None to compute all in this one.
        """

    def compute_piece(self, name: str) -> Answer:
        """Compute one piece in this process, or find out that it cannot be; see :mod:`wideflat.experiments.workers`."""


class Experiment(abc.ABC):
    """One table or figure of the paper, with its options, in its folder.

    Args:
        item: Which.
        folder: Where everything of it goes.
        options: What was chosen.
        quick: The reduced form.

    Attributes:
        work: What computes the tables.
        numbers: What the words about the reduced form leave open.
    """

    work: Work

    def __init__(self, item: Item, folder: Path, options: Options, quick: bool = False) -> None:
        self.item, self.folder, self.options, self.quick = item, location("folder", folder), options, quick
        self.numbers: dict[str, Any] = {}

    def cost(self) -> str:
        """What computing it takes, in words."""
        return self.work.cost()

    def compute(self, workers: Workers | None = None) -> None:
        """Train and measure what is not there yet, and write the tables; see :class:`Work`."""
        self.work.compute(self, workers)

    def compute_piece(self, name: str) -> Answer:
        """Compute one piece in this process; see :class:`Work`."""
        return self.work.compute_piece(name)

    @abc.abstractmethod
    def charts(self) -> list[Chart]:
        """The figures, drawn from the tables (of what has been computed so far)."""

    @abc.abstractmethod
    def comparison(self) -> Comparison:
        """Paper against measured, from the tables."""

    def finding(self) -> str:
        """What came out, in one sentence made of the tables; empty where there is nothing to say yet."""
        return ""

    @property
    def name(self) -> str:
        """On the command line."""
        return self.item.name

    @property
    def label(self) -> str:
        """Empty for the paper's own experiment; for the reduced form, what it is instead."""
        words = self.item.quick_means.format(**self.numbers)
        return f"QUICK, not the paper's experiment: {words}" if self.quick else ""

    @property
    def heading(self) -> str:
        """The title, marked if it is the reduced form."""
        return f"{self.item.title}{' [QUICK]' if self.quick else ''}"

    def provenance(self, **more: Any) -> dict[str, Any]:
        """What a table of this experiment says about its origin."""
        where = {key: value for key, value in environment().items() if key not in ("host", "pid")}
        about = {"item": self.name, "label": self.label, "seed": self.options.seed, "options": chosen(self.options)}
        return {**about, **where, **more}

    def table(self, name: str) -> Table | None:
        """A table of this experiment, or None where it has not been computed yet."""
        path = self.folder / f"{name}.csv"
        return Table.load(path) if path.exists() else None

    def record(self, report: Path) -> dict[str, Any]:
        """What JSON says of it: paper against measured, numbers as numbers.

        Args:
            report: The page that was written.
        """
        comparison = self.comparison()
        record: dict[str, Any] = {"item": self.name, "label": self.label, "finding": self.finding()}
        record["rows"] = comparison.records()
        record["remarks"] = list(comparison.remarks)
        if comparison.more:
            record["more"] = {table.title: table.records() for table in comparison.more}
        return {**record, "report": str(report)}

    def write_report(self) -> Path:
        """Save every chart and the page; returns the path of the page."""
        charts = self.charts()
        if self.label:
            for chart in charts:
                chart.title = f"[QUICK] {chart.title}"
                chart.caption = f"{self.label}. {chart.caption}".strip()
        for chart in charts:
            chart.save(self.folder / "figures")
        page = Page(self.heading, f"wideflat reproduce {self.name}", finding=self.finding())
        self.add_to(page, charts, alone=True)
        path = self.folder / "report.html"
        page.write(path)
        return path

    def add_to(self, page: Page, charts: Sequence[Chart], alone: bool = False) -> None:
        """Write this experiment into a page: question, finding, label, tables, figures, provenance.

        Args:
            page: Where.
            charts: Its figures, with names that the page does not have yet.
            alone: The page is of this experiment only: its title and finding stand at the top already.
        """
        comparison = self.comparison()
        page.section("What was asked" if alone else self.item.title)
        page.paragraph(self.item.claim)
        if not alone and self.finding():
            page.paragraph(f"Found here: {self.finding()}", kind="finding")
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
