"""``wideflat reproduce``: a table or figure of the paper, computed, drawn and compared with what the paper printed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import CascadeSubcommandArgs, OmitArgPrefixes, OmitSubcommandPrefixes, configure, subcommand

from wideflat.commands import usage
from wideflat.commands.answers import answer
from wideflat.experiments import ITEMS
from wideflat.experiments import item as find_item
from wideflat.experiments.experiment import Experiment
from wideflat.experiments.fig1 import Fig1Options
from wideflat.experiments.fig2 import Fig2Options
from wideflat.experiments.fig3 import Fig3Options
from wideflat.experiments.fig4 import Fig4Options
from wideflat.experiments.fig5 import Fig5Options
from wideflat.experiments.fig6 import Fig6Options
from wideflat.experiments.fig7 import Fig7Options
from wideflat.experiments.options import MaybeFloats, MaybeInt, Pairs
from wideflat.experiments.table1 import Table1Options
from wideflat.experiments.volume import VolumeOptions
from wideflat.experiments.workers import Workers, slurm_parameters

__all__ = ["AllOptions", "Command"]


@dataclass
class AllOptions(
    Fig7Options,
    VolumeOptions,
    Fig6Options,
    Fig1Options,
    Fig5Options,
    Fig4Options,
    Fig3Options,
    Fig2Options,
    Table1Options,
):
    """Every table and figure, one after the other; each takes those of the options that are its own.

    Examples:
      wideflat reproduce all --quick
      wideflat reproduce all --data ~/data --seeds 1
    """

    seeds: MaybeInt = None
    """How many seeds of each training (table1, fig2 to fig5, fig7)."""
    epochs: MaybeInt = None
    """Another length of the trainings (table1, fig2 to fig5, fig7); their schedules are rescaled with it."""
    sigmas: MaybeFloats = None
    """Strengths of the noise of local-energy profiles (fig1, fig3 to fig6)."""
    dropouts: MaybeFloats = None
    """Dropout probabilities (fig6, fig7)."""


Choice = (
    Annotated[Fig1Options, subcommand("fig1")]
    | Annotated[Table1Options, subcommand("table1")]
    | Annotated[Fig2Options, subcommand("fig2")]
    | Annotated[Fig3Options, subcommand("fig3")]
    | Annotated[Fig4Options, subcommand("fig4")]
    | Annotated[Fig5Options, subcommand("fig5")]
    | Annotated[Fig6Options, subcommand("fig6")]
    | Annotated[Fig7Options, subcommand("fig7")]
    | Annotated[VolumeOptions, subcommand("volume")]
    | Annotated[AllOptions, subcommand("all")]
)


@configure(CascadeSubcommandArgs, OmitArgPrefixes, OmitSubcommandPrefixes)
@dataclass
class Command:
    """Compute a table or figure of the paper, draw it, and print paper against measured.

    What is finished is never computed again: interrupt it with Ctrl-C and start the same command again to go on. The
    tables, figures and a page go to OUT/ITEM (OUT/ITEM-quick for --quick).

    Trainings run in several processes, one a core, or as jobs of a Slurm cluster (--engine slurm). One that fails or is
    killed is reported and started again, from where it was; what failed for good is listed at the end.

    `wideflat reproduce ITEM --help` shows the options of an item.

    Examples:
      wideflat reproduce fig1 --quick
      wideflat reproduce fig1 --restarts 50 --draws balanced random
      wideflat reproduce table1 --rows cifar10-smallconvnet --algorithms sgd rsgd esgd --seeds 3 --data ~/data
      wideflat reproduce table1 --engine slurm --slurm-options partition=gpu gpus_per_node=1 timeout_min=600
      wideflat reproduce all --quick
    """

    item: Choice
    """Which table or figure."""
    out: Path = Path("reproduction")
    """Where everything goes, one folder an item."""
    quick: bool = False
    """A reduced form that ends in minutes on two cores, labelled as such everywhere."""
    redraw: bool = False
    """Only draw and compare again from the tables that are there."""
    json: bool = False
    """Print the comparison as JSON."""
    workers: MaybeInt = None
    """Trainings at a time, each in its own process; one a core or GPU when left out (Slurm: all; fig1, fig6: 1)."""
    retries: int = 2
    """How often a training that fails is started again."""
    engine: Literal["local", "slurm"] = "local"
    """Where the processes are: on this machine, or jobs of Slurm (pip install 'wideflat[sweep]')."""
    slurm_options: Pairs = ()
    """KEY=VALUE: what sbatch is to be told, such as partition=gpu timeout_min=600 mem_gb=16 cpus_per_task=4."""

    def run(self) -> int:
        """Compute, draw, compare; with ``all``, go on with the next item where one fails."""
        everything = isinstance(self.item, AllOptions)
        with usage():
            workers = Workers(self.workers, self.engine, slurm_parameters(self.slurm_options), self.retries)
            items = [self._open(name) for name in ITEMS if isinstance(self.item, find_item(name).options)]
        here = self.engine == "local" and self.workers == 1
        if not self.redraw and not self.json:
            for item in items:
                print(f"{item.name}: {item.cost()}")
        records: list[dict[str, Any]] = []
        failures: dict[str, str] = {}
        try:
            for item in items:
                try:
                    self._reproduce(item, None if here else workers, records)
                except (ValueError, OSError, RuntimeError) as error:
                    if not everything:
                        raise
                    failures[item.name] = str(error)
                    print(f"{item.name} failed: {error}")
        finally:  # also after Ctrl-C
            if self.json and (everything or records):
                answer({"items": records, "failed": failures} if everything else records[0])
        if failures:
            raise RuntimeError(f"{len(failures)} of {len(items)} items failed: {', '.join(failures)}")
        return 0

    def _open(self, name: str) -> Experiment:
        """An item with those of the options that it has; its trainings are shared with the other items."""
        item = find_item(name)
        options = {field.name: getattr(self.item, field.name) for field in dataclasses.fields(item.options)}
        if "runs" in options and options["runs"] is None:
            options["runs"] = self.out / ("runs-quick" if self.quick else "runs")
        return item.open(self.out / (f"{name}-quick" if self.quick else name), self.quick, **options)

    def _reproduce(self, item: Experiment, workers: Workers | None, records: list[dict[str, Any]]) -> None:
        try:
            if not self.redraw:
                item.compute(workers)
        finally:  # also after Ctrl-C: a report of what is done
            if any(item.folder.glob("*.csv")):
                page = item.write_report()
                if self.json:
                    records.append(item.record(page))
                else:
                    _print(item, page)
            elif self.redraw:
                raise FileNotFoundError(f"{item.folder} holds no tables to draw from: run without --redraw first")


def _print(item: Experiment, page: Path) -> None:
    comparison = item.comparison()
    print()
    comparison.print(item.heading)
    if item.label:
        print(item.label)
    for remark in comparison.remarks:
        print(remark)
    print(f"report: {page.resolve()}")
