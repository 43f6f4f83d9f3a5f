"""``wideflat reproduce``: a table or figure of the paper, computed, drawn and compared with what the paper printed."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from wideflat.experiments import ITEMS
from wideflat.experiments import item as find
from wideflat.experiments.experiment import Comparison, Experiment
from wideflat.experiments.pieces import PieceExperiment, Workers, slurm_parameters

__all__ = ["Command"]

Item = Literal["all", "fig1", "table1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7"]

#: Fields of the command that every item takes, or that are about the command itself.
_COMMON = ("item", "out", "quick", "redraw", "json", "workers", "retries", "engine", "slurm_options")


@dataclass
class Command:
    """Compute a table or figure of the paper, draw it, and print paper against measured.

    What is finished is never computed again: interrupt it with Ctrl-C and start the same command again to go on. The
    tables, figures and a page go to OUT/ITEM (OUT/ITEM-quick for --quick).

    Trainings run in several processes, one a core, or as jobs of a Slurm cluster (--engine slurm). One that fails or is
    killed is reported and started again, from where it was; what failed for good is listed at the end.

    Examples:
        wideflat reproduce fig1 --quick
        wideflat reproduce fig1 --restarts 50 --draws balanced random
        wideflat reproduce table1 --rows cifar10-smallconvnet --algorithms sgd rsgd esgd --seeds 3 --data ~/data
        wideflat reproduce table1 --engine slurm --slurm-options partition=gpu gpus_per_node=1 timeout_min=600
        wideflat reproduce all --quick
    """

    item: Annotated[Item, tyro.conf.Positional]
    """Which table or figure, or all of them."""
    out: Path = Path("reproduction")
    """Where everything goes, one folder an item."""
    quick: bool = False
    """A reduced form that ends in minutes on two cores, labelled as such everywhere."""
    redraw: bool = False
    """Only draw and compare again from the tables that are there."""
    json: bool = False
    """Print the comparison as JSON."""
    data: Path | None = None
    """Folder of the data sets (default: $WIDEFLAT_DATA, then the usual places)."""
    allow_altered: bool = False
    """Use data files whose checksum is not the official one, knowingly."""
    seed: int | None = None
    """Seed of everything random."""
    seeds: int | None = None
    """How many seeds of each training (table1, fig2)."""
    rows: tuple[str, ...] | None = None
    """Rows of Table 1 by preset name."""
    algorithms: tuple[str, ...] | None = None
    """Which algorithms."""
    epochs: int | None = None
    """Another length of the trainings; their schedules are rescaled with it."""
    limit_data: int | None = None
    """Train and measure on at most this many images."""
    models: Path | None = None
    """A folder of trained models for the correlation figure (fig7), ours or in PGDL's format."""
    restarts: int | None = None
    """Restarts of each setting of the committee machine (fig1, fig6)."""
    slow_restarts: int | None = None
    """Restarts of rSGD slow (fig1)."""
    settings: tuple[str, ...] | None = None
    """Which settings of the committee machine: sgd-fast, sgd-slow, rsgd-fast, esgd, rsgd-slow (fig1)."""
    subsets: int | None = None
    """Training subsets that the restarts are divided over (fig1, fig6)."""
    draws: tuple[Literal["balanced", "random"], ...] | None = None
    """How the training patterns are drawn (fig1, fig6)."""
    methods: tuple[Literal["bp", "ep", "tap", "sample"], ...] | None = None
    """How the local entropy is computed (fig1, fig6)."""
    align: bool = False
    """Match the hidden units of replicas before coupling them (fig1)."""
    gradient_scale: float | None = None
    """What multiplies the gradient of the mean loss of the committee machine; 100, the default, makes it that of the
    sum over a mini-batch (fig1)."""
    size: int | None = None
    """Training patterns of the committee machine (fig1, fig6)."""
    deltas: tuple[float, ...] | None = None
    """Variances of the Gaussian at the points of the local-entropy curves (fig1, fig6)."""
    dropouts: tuple[float, ...] | None = None
    """Dropout probabilities (fig6, fig7)."""
    batch_sizes: tuple[int, ...] | None = None
    """Batch sizes of the networks that are trained (fig7)."""
    weight_decays: tuple[float, ...] | None = None
    """Weight decays of the networks that are trained (fig7)."""
    dataset: str | None = None
    """Data set that the networks are trained on (fig7)."""
    widths: tuple[int, ...] | None = None
    """Channels of the three blocks of the networks that are trained (fig7)."""
    lr: float | None = None
    """Learning rate of the networks that are trained (fig7)."""
    target_loss: float | None = None
    """Train each network until its training loss is below this (fig7)."""
    sigma: float | None = None
    """Strength of the noise of the local energy (fig7)."""
    realisations: int | None = None
    """Perturbations of each network (fig7)."""
    noise: Literal["pass", "batch", "example"] | None = None
    """What shares a perturbation: all images, as in the paper, or a batch or an image, which is faster (fig7)."""
    sigmas: tuple[float, ...] | None = None
    """Strengths of the noise of local-energy profiles (fig1, fig3 to fig6)."""
    moments: tuple[float, ...] | None = None
    """Parts of the training, up to 1, at which flatness is measured (fig3, fig5)."""
    target_stderr: float | None = None
    """Measure local energy until its standard error is below this (fig3 to fig5)."""
    max_passes: float | None = None
    """Most passes over the training images for a local energy (fig3 to fig5)."""
    runs: Path | None = None
    """Folder of the trainings of table1, fig2 to fig5 and fig7, which share them (default: OUT/runs)."""
    device: str | None = None
    """Where to train and measure: cpu, cuda, mps (default: a GPU if there is one)."""
    workers: int | None = None
    """Trainings at a time, each in a process with its share of the threads; 1: all in this process (default: one a core
    or GPU; on Slurm all; for the committee machine, whose trainings are spread over the cores by themselves, 1)."""
    retries: int = 2
    """How often a training that fails is started again."""
    engine: Literal["local", "slurm"] = "local"
    """Where the processes are: on this machine, or jobs of Slurm (pip install 'wideflat[sweep]')."""
    slurm_options: tuple[str, ...] = ()
    """KEY=VALUE: what sbatch is to be told, such as partition=gpu timeout_min=600 mem_gb=16 cpus_per_task=4."""

    def run(self) -> int:
        """Compute, draw, compare; with ``all``, go on with the next item where one fails."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _COMMON}
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        self._workers = Workers(self.workers, self.engine, slurm_parameters(self.slurm_options), self.retries)
        names = list(ITEMS) if self.item == "all" else [self.item]
        items = [self._make(name, given) for name in names]
        if not self.redraw and not self.json:
            for item in items:
                print(f"{item.name}: {item.cost()}")
        failures: list[str] = []
        for item in items:
            try:
                self._reproduce(item)
            except (ValueError, OSError, RuntimeError) as error:
                if self.item != "all":
                    raise
                failures.append(item.name)
                print(f"{item.name} failed: {error}")
        if failures:
            raise RuntimeError(f"{len(failures)} of {len(items)} items failed: {', '.join(failures)}; see above")
        return 0

    def _make(self, name: str, given: dict[str, Any]) -> Experiment:
        kind = find(name)
        known = kind.options()
        foreign = [option for option in given if option not in known]
        if foreign and self.item != "all":
            flags = ", ".join("--" + option.replace("_", "-") for option in foreign)
            raise ValueError(f"{flags} does not apply to {name}; `wideflat reproduce --help` says what each is for")
        folder = self.out / (f"{name}-quick" if self.quick else name)
        if "runs" in known and "runs" not in given:
            given = {**given, "runs": self.out / ("runs-quick" if self.quick else "runs")}
        options = {option: value for option, value in given.items() if option in known}
        item = kind(folder, self.quick, **options)
        if isinstance(item, PieceExperiment) and (self.engine != "local" or self.workers != 1):
            item.distribute(self._workers, options)
        return item

    def _reproduce(self, item: Experiment) -> None:
        try:
            if not self.redraw:
                item.compute()
        finally:  # also after Ctrl-C: a report of what is done
            if any(item.folder.glob("*.csv")):
                page = item.write_report()
                self._print(item, page)
            elif self.redraw:
                raise FileNotFoundError(f"{item.folder} holds no tables to draw from: run without --redraw first")

    def _print(self, item: Experiment, page: Path) -> None:
        comparison = item.comparison()
        if self.json:
            content: dict[str, Any] = {
                "item": item.name,
                "label": item.label,
                "rows": _records(comparison),
                "remarks": list(comparison.remarks),
            }
            if comparison.more:
                content["more"] = {table.title: _records(table) for table in comparison.more}
            print(json.dumps({**content, "report": str(page)}, default=str))
            return
        print()
        comparison.print(item.heading)
        if item.label:
            print(item.label)
        for remark in comparison.remarks:
            print(remark)
        print(f"report: {page.resolve()}")


def _records(table: Comparison) -> list[dict[str, object]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]
