"""Figure 7: correlation of local energy with test error over networks of one architecture.

The paper took 14 networks of the PGDL competition, VGG-like with 3 blocks of width 512 and one dense layer of 128,
trained on CIFAR-10 with different dropout, batch size and weight decay. Here they are either

* trained by us: the same architecture (or a narrower one, ``widths``) on CIFAR-10 (or a part of it, ``limit_data``),
  one network for every combination of dropout, batch size, weight decay and learning rate, each until its training loss
  without dropout is below ``target_loss``, so that networks of equal training loss are compared; or
* given, in the folder ``models``: see :mod:`wideflat.experiments.given_networks`.

``networks.csv`` has one row a network: how it was trained, its errors, and dE at one sigma.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wideflat.data.catalogue import FACTS
from wideflat.experiments.experiment import Comparison, Experiment, Item
from wideflat.experiments.given_networks import GivenNetworks
from wideflat.experiments.networks import Measurement, Network
from wideflat.experiments.options import MaybeFloats, MaybeInt, MaybeInts, MaybePath, MaybeText, Options
from wideflat.experiments.statistics import Correlation, Shown, number, partial, pearson, spearman
from wideflat.experiments.table import Table
from wideflat.experiments.trainings import Cell, Plan, TrainingOptions, Trainings
from wideflat.presets import Preset
from wideflat.report.chart import Chart, Series
from wideflat.schedules import Schedule
from wideflat.training.flatness import read_profile, without_request
from wideflat.training.runs import Run
from wideflat.training.training import Training

__all__ = ["ITEM", "Fig7", "Fig7Options", "Grid"]

#: What the paper prints.
PAPER = Correlation(r=0.90, p=1e-4, n=14)
#: Networks whose training error is above this are drawn, but left out of the correlation.
NEARLY_ZERO = 0.01
#: Channels of the three blocks of the paper's networks.
WIDTHS = (512, 512, 512)

NETWORKS = [
    *("network", "dropout", "batch_size", "weight_decay", "lr", "epochs", "train_error", "train_loss"),
    *("test_error", "sigma", "delta_e", "spread", "stderr", "realisations"),
]


@dataclasses.dataclass
class Fig7Options(TrainingOptions, Options):
    """Correlation of local energy with test error over networks of one architecture, trained here or given.

    Examples:
      wideflat reproduce fig7 --quick
      wideflat reproduce fig7 --models public_data/input_data/task1_v4
      wideflat reproduce fig7 --widths 16 32 64 --limit-data 4000 --batch-sizes 16 32 128 --lr 0.003 --epochs 240
    """

    models: MaybePath = None
    """A folder of networks to measure instead of training some: a task of PGDL, or runs."""
    sigma: float = 0.5
    """Strength of the noise."""
    realisations: MaybeInt = None
    """Perturbations of each network (passes over the data); 64 when left out, 4 for other --noise (quick: 8)."""
    noise: Literal["pass", "batch", "example"] = "pass"
    """What shares a perturbation: all images, as in the paper; or, faster and without a spread, a batch or an image."""
    dropouts: MaybeFloats = None
    """Dropout probabilities; 0, 0.25 and 0.5 when left out (quick: 0 and 0.5)."""
    batch_sizes: MaybeInts = None
    """Batch sizes; 8, 32 and 512 when left out (quick: 6 and 12)."""
    weight_decays: MaybeFloats = None
    """L2 penalties; 0 and 0.001 when left out (quick: 0 and 0.003)."""
    seeds: MaybeInt = None
    """Networks of each combination; 1 when left out."""
    widths: MaybeInts = None
    """Channels of the three blocks; 512 each when left out (quick: 16)."""
    dataset: MaybeText = None
    """What they are trained on; cifar10 when left out (quick: dress-coat)."""
    lr: MaybeFloats = None
    """Learning rates; 0.001 when left out (quick: 0.01). Momentum is 0.9."""
    epochs: MaybeInt = None
    """The most that each is trained for; 1200 when left out (quick: 40). The rate drops by 5 at 1/4, 1/2, 3/4 of it."""
    target_loss: float = 0.01
    """Each training ends when its training loss, in eval mode, is below this."""


class Grid:
    """The networks that are trained: every combination of dropout, batch size, weight decay and learning rate.

    Args:
        options: What was chosen.
        quick: Whether the rest is that of the reduced form.
    """

    def __init__(self, options: Fig7Options, quick: bool) -> None:
        self.dropouts = tuple(options.dropouts or ((0.0, 0.5) if quick else (0.0, 0.25, 0.5)))
        self.batch_sizes = tuple(options.batch_sizes or ((6, 12) if quick else (8, 32, 512)))
        self.weight_decays = tuple(options.weight_decays or ((0.0, 0.003) if quick else (0.0, 0.001)))
        self.widths = tuple(options.widths or ((16, 16, 16) if quick else WIDTHS))
        self.dataset = options.dataset or ("dress-coat" if quick else "cifar10")
        self.lrs = tuple(options.lr or ((0.01,) if quick else (0.001,)))
        self.epochs = options.epochs or (40 if quick else 1200)
        self.seeds = range(options.seed, options.seed + (1 if options.seeds is None else options.seeds))

    def cells(self) -> list[Cell]:
        """All of them, by seed first."""
        combinations = list(itertools.product(self.dropouts, self.batch_sizes, self.weight_decays, self.lrs))
        return [Cell(self.preset(*combination), seed) for seed in self.seeds for combination in combinations]

    def preset(self, dropout: float, batch_size: int, weight_decay: float, lr: float) -> Preset:
        """One combination. Rates and schedule are those of PGDL's Task 1, by its public description."""
        about = FACTS[self.dataset]
        own = (("image_size", about.size), ("in_channels", 1)) if about.channels == 1 else ()
        rate = f"-rate-{lr:g}" if len(self.lrs) > 1 else ""
        return Preset(
            name=f"vgg-dropout-{dropout:g}-batch-{batch_size}-decay-{weight_decay:g}{rate}",
            algorithm="sgd",
            dataset=self.dataset,
            model="vgg3x512",
            model_arguments=(("dropout", dropout), ("widths", self.widths), *own),
            num_classes=about.classes,
            image_size=about.size,
            padding=0,
            augmentation="none",
            epochs=self.epochs,
            batch_size=batch_size,
            lr=lr,
            schedule=Schedule(self.epochs, drops=tuple(self.epochs * k / 4 for k in (1, 2, 3)), drop_factor=0.2),
            nesterov=False,
            weight_decay=weight_decay,
        )


class Fig7(Experiment):
    """Flatness against test error over networks of one architecture."""

    def __init__(self, item: Item, folder: Path, options: Fig7Options, quick: bool = False) -> None:
        super().__init__(item, folder, options, quick)
        self.models = None if options.models is None else Path(options.models)
        self.target_loss = options.target_loss
        self.grid = Grid(options, quick)
        self.cells = self.grid.cells() if self.models is None else []
        limit = (300 if quick else None) if options.limit_data is None else options.limit_data
        self.trainings = Trainings(options, self.folder, limit, whole_test=True, tensorboard=not quick)
        self.measurement = Measurement(
            self.folder / "profiles",
            options.sigma,
            options.noise,
            _realisations(options, quick),
            options.seed,
            self.trainings.device,
        )
        self.numbers = {
            "epochs": self.grid.epochs,
            "images": self.trainings.limit_data,
            "realisations": self.measurement.realisations,
        }
        if self.models is not None:
            self.work = GivenNetworks(self.models, self.measurement, self.trainings, self._write)
        else:
            self.work = self._plan()

    # ---- training and measuring

    def _plan(self) -> Plan:
        return Plan(
            self.trainings,
            self.cells,
            self.write_tables,
            self.measure,
            lambda cell, run: self.measurement.file(run.path.name).exists(),
            options={"evaluate_every": self.grid.epochs},  # the test set is looked at once, at the end
            arguments={"on_epoch": self._look, "until": self._fits},
            words=self._cost_of_measuring,
        )

    def _look(self, training: Training, row: dict[str, Any]) -> None:
        """After an epoch: how well does the network fit its data?"""
        if row["train_error"] < 0.3:  # in vain before that
            fit = training.evaluate("train")
            row |= {"fit_error": fit.errors[0], "fit_loss": fit.losses[0]}

    def _fits(self, row: dict[str, Any]) -> bool:
        return row.get("fit_loss", math.inf) <= self.target_loss

    def measure(self, cell: Cell, run: Run) -> None:
        """The local energy of a trained network."""
        self.measurement.of_run(run, self.trainings.images(cell.preset))

    def _cost_of_measuring(self) -> str:
        return (
            f"That is if every network needs all of its {self.grid.epochs} epochs; each ends when its training loss is "
            f"below {self.target_loss:g}. Then {len(self.cells)} measurements of {self.measurement.realisations} "
            "passes."
        )

    # ---- the table

    def write_tables(self) -> None:
        """Of what was trained and measured so far."""
        names = {cell.name for cell in self.cells}
        networks = []
        for cell, run in self.trainings.started():
            profile = read_profile(self.measurement.file(run.path.name)) if cell.name in names else None
            if profile is not None and run.result() is not None:
                networks.append(Network.of_run(cell.preset, run, profile))
        self._write(networks)

    def _write(self, networks: Sequence[Network]) -> None:
        table = Table(
            NETWORKS,
            provenance=self.provenance(
                **self.trainings.provenance(),
                units="errors are fractions; spread is the standard deviation over perturbations of the whole data set",
                source="trained here" if self.models is None else f"networks given: {self.models.name}",
                noise=self.measurement.noise,
                widths=list(self.grid.widths),
                target_loss=self.target_loss,
                conventions={k: v for network in networks for k, v in without_request(network.profile).items()},
            ),
        )
        for network in networks:
            profile = network.profile
            table.add(
                network=network.name,
                dropout=network.dropout,
                batch_size=network.batch_size,
                weight_decay=network.weight_decay,
                lr=network.lr,
                epochs=network.epochs,
                train_error=network.train_error,
                train_loss=network.train_loss,
                test_error=network.test_error,
                sigma=float(profile.sigmas[-1]),
                delta_e=float(profile.mean[-1]),
                spread=None if profile.samples is None else float(profile.spread[-1]),
                stderr=float(profile.stderr[-1]),
                realisations=float(profile.passes[-1]),
            )
        table.save(self.folder / "networks.csv")

    # ---- drawing

    def charts(self) -> list[Chart]:
        """Local energy against test error, one colour a dropout probability."""
        table = self.table("networks")
        if table is None or not len(table):
            return []
        fit = fitted(table)
        series = []
        for dropout in sorted(fit.unique("dropout"), key=lambda value: (value is None, value)):
            label = "networks" if dropout is None else f"dropout {dropout:g}"
            series.append(_points(label, fit.where(dropout=dropout)))
        rest = Table(table.columns, [row for row in table.rows if row not in fit.rows])
        if len(rest):
            series.append(_points(f"training error above {100 * NEARLY_ZERO:g}%, left out", rest))
        found = pearson(100 * fit["test_error"], fit["delta_e"])
        bars = "standard deviation over perturbations" if _has_spread(table) else "standard error"
        caption = [f"One point a network; bars: {bars}. Pearson: {found}.", *self.deviations()]
        sigma = table["sigma"][0]
        title, axis = f"Local energy at σ = {sigma:g} against test error", f"δE train at σ = {sigma:g} (%)"
        return [Chart("fig7", title, "test error (%)", axis, series, kind="points", caption=" ".join(caption))]

    def finding(self) -> str:
        """Whether the networks that are flatter make fewer errors on the test images."""
        fit = fitted(self.table("networks") or Table(NETWORKS))
        r = pearson(fit["test_error"], fit["delta_e"])
        if math.isnan(r.r):
            return ""
        low, high = r.interval()
        words = (
            "make fewer" if low > 0 else "make more" if high < 0 else "make neither more nor fewer, as far as is seen,"
        )
        return (
            f"Networks in flatter minima {words} errors on the test images (correlation of local energy and test error "
            f"{r.r:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}, n = {r.n})."
        )

    def comparison(self) -> Comparison:
        """Pearson's r, its p-value and n."""
        table = self.table("networks") or Table(NETWORKS)
        fit = fitted(table)
        x, y = fit["test_error"], fit["delta_e"]
        r, rank, whole = pearson(x, y), spearman(x, y), pearson(table["test_error"], table["delta_e"])
        given = partial(x, y, fit["train_loss"]) if "train_loss" in fit.columns else Correlation.of(math.nan, 0)
        low, high = r.interval()
        spread = (100 * float(x.min()), 100 * float(x.max())) if len(x) else None
        sigmas = ", ".join(f"{sigma:g}" for sigma in table.unique("sigma")) or "-"
        return Comparison(
            ["quantity", "paper", "measured"],
            [
                ["Pearson's r", number(PAPER.r, ".2f"), Shown(f"{r.r:.2f}", value=r.r)],
                ["its 95% interval", "-", Shown(f"{low:.2f} to {high:.2f}", low=low, high=high)],
                ["p-value", number(PAPER.p, ".0e"), Shown(f"{r.p:.1g}", value=r.p)],
                ["n", PAPER.n, r.n],
                ["Spearman's rank correlation", "-", _with_interval(rank)],
                ["r at equal training loss (partial)", "-", _with_interval(given)],
                ["r with all networks", "-", Shown(f"{whole.r:.2f} (n = {whole.n})", value=whole.r, n=whole.n)],
                ["σ", number(0.5), Shown(sigmas, value=_only(table.unique("sigma")))],
                ["test errors (%)", "-", _range(spread)],
            ],
            [
                f"Networks with a training error above {100 * NEARLY_ZERO:g}% are left out of r: flatness is "
                "comparable between minima of nearly equal training error only (App. B.2).",
                "The paper's r(12) = 0.90 means n = 14, whose p-value is 1e-5; the printed 1e-4 is that of n = 12 "
                "(7e-5), as many networks of one architecture as the published grid of dropout, weight decay and batch "
                "size has.",
                *self.deviations(),
            ],
        )

    def deviations(self) -> list[str]:
        """In what this is not the paper's; also another architecture."""
        said = self.trainings.deviations(self.quick)
        if not self.quick and self.models is None:
            if self.grid.widths != WIDTHS:
                said.insert(0, f"The blocks have {', '.join(map(str, self.grid.widths))} channels instead of 512 each.")
            said.append("The networks are trained here and are not those of the competition.")
        return said


def _realisations(options: Fig7Options, quick: bool) -> int:
    count = options.realisations
    if count is None:
        return 8 if quick else 64 if options.noise == "pass" else 4
    if count < 2:
        raise ValueError(f"realisations must be >= 2: one perturbation has no spread, got {count}")
    return count


def fitted(table: Table) -> Table:
    """The networks with nearly zero training error."""
    index = table.columns.index("train_error")
    return Table(table.columns, [row for row in table.rows if row[index] <= NEARLY_ZERO], table.provenance)


def _points(label: str, part: Table) -> Series:
    bars = part["spread"] if _has_spread(part) else part["stderr"]
    names = [str(name) for name in part["network"]]
    return Series(label, list(100 * part["test_error"]), list(100 * part["delta_e"]), list(100 * bars), names=names)


def _has_spread(table: Table) -> bool:
    return bool(np.isfinite(table["spread"]).all())


def _range(bounds: tuple[float, float] | None) -> Shown:
    if bounds is None:
        return Shown("-", low=None, high=None)
    return Shown(f"{bounds[0]:.1f} to {bounds[1]:.1f}", low=bounds[0], high=bounds[1])


def _with_interval(found: Correlation) -> Shown:
    low, high = found.interval()
    text = "-" if math.isnan(found.r) else f"{found.r:.2f} ({low:.2f} to {high:.2f}, p = {found.p:.1g})"
    return Shown(text, value=found.r, low=low, high=high, p=found.p)


def _only(values: Sequence[float]) -> float | None:
    return values[0] if len(values) == 1 else None


ITEM = Item(
    name="fig7",
    title="Figure 7: flatness and test error of networks of one architecture",
    claim=(
        "Over 14 networks of one VGG-like architecture from the PGDL competition, trained on CIFAR-10 with different "
        "dropout, batch size and weight decay, the paper finds that the local energy at σ = 0.5 correlates with the "
        "test error: r(12) = 0.90, p = 1e-4."
    ),
    quick_means=(
        "8 VGG-like networks of width 16, trained for at most {epochs} epochs on {images} Dress-vs-Coat images "
        "(28x28, two classes); {realisations} perturbations"
    ),
    options=Fig7Options,
    make=Fig7,
)
