"""Local-energy profiles of trained cells: measured once, kept in files, drawn with their train and test errors.

The profile of a network is taken over the training images with the augmentation of its training, drawn anew in every
pass, as the paper says it did (App. B.2); the perturbed and the unperturbed network see the same images. All other
conventions are those of :func:`wideflat.local_energy` and are kept in each file.

Tables:

* ``networks.csv``: one row a network that was measured: its place in the training, its errors and losses.
* ``profiles.csv``: one row a point of a profile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wideflat.data.catalogue import FACTS
from wideflat.energy.profile import LocalEnergy
from wideflat.experiments.cells import MOMENTS, NAMES, QUICK_MOMENTS, CellOptions, Cells, Choice, row_of
from wideflat.experiments.experiment import Comparison, Experiment, Item
from wideflat.experiments.finding import Contrast, against, said
from wideflat.experiments.options import MaybeFloat, MaybeFloats
from wideflat.experiments.statistics import Shown, number, paper_error, percent
from wideflat.experiments.table import Table
from wideflat.experiments.trainings import CPU_SPEED, Cell, Plan, duration, forward_operations
from wideflat.presets import preset
from wideflat.report.chart import Chart, Series
from wideflat.training.flatness import profile_of_run, read_profile, without_request
from wideflat.training.runs import Run

__all__ = [
    "MomentOptions",
    "ProfileFigure",
    "ProfileOptions",
    "along_training",
]

#: Strengths of the noise in the figures.
SIGMAS = tuple(round(0.05 * k, 2) for k in range(11))
#: What both tables say of a network, and what each says besides.
KEY = ("row", "algorithm", "seed", "epoch", "part")
NETWORKS = [*KEY, "train_error", "train_error_augmented", "train_loss", "test_error", "run"]
PROFILES = [*KEY, "sigma", "delta_e", "stderr", "passes"]
#: Where profiles are compared by a single number.
AT_SIGMA = 0.5


@dataclasses.dataclass
class ProfileOptions(CellOptions):
    """Options of items that measure the local energy of cells of Table 1."""

    sigmas: MaybeFloats = None
    """Strengths of the noise; 0, 0.05, ..., 0.5 when left out (quick: every other one)."""
    target_stderr: MaybeFloat = None
    """Measure each until its standard error is below this; 0.002 when left out (quick: no such limit)."""
    max_passes: MaybeFloat = None
    """Most passes over the training images for each; 50 when left out (quick: 4)."""


@dataclasses.dataclass
class MomentOptions(ProfileOptions):
    """Options of items that follow the local energy along the training."""

    moments: MaybeFloats = None
    """Parts of the training where flatness is measured; 0.1, 0.3, 0.6, 0.8 and 1 when left out (quick: 0.5 and 1)."""


# ---------------------------------------------------------------------------------------------------------- the figure


class ProfileFigure(Experiment):
    """Local-energy profiles of cells of Table 1: Figures 3, 4 and 5.

    Args:
        item: Which.
        folder: Where everything goes.
        options: What was chosen.
        quick: The reduced form.
        choice: What is trained where nothing was chosen.
        losses: The paper's training losses of the final networks, by (row, algorithm).
        moments: Parts of the training at which networks are measured; None for its end only.
    """

    def __init__(
        self,
        item: Item,
        folder: Path,
        options: ProfileOptions,
        quick: bool = False,
        *,
        choice: Choice,
        losses: Mapping[tuple[str, str], float],
        moments: Sequence[float] | None = None,
    ) -> None:
        super().__init__(item, folder, options, quick)
        self.losses = losses
        self.moments = None if moments is None else tuple(moments)
        if any(not 0 < part <= 1 for part in self.moments or ()):
            raise ValueError(f"moments must be parts of the training, above 0 and up to 1, got {self.moments}")
        self.sigmas = tuple(options.sigmas) if options.sigmas is not None else (SIGMAS[::2] if quick else SIGMAS)
        self.settings: dict[str, Any] = {
            "target_stderr": options.target_stderr or (None if quick else 0.002),
            "max_passes": options.max_passes or (4 if quick else 50),
            "seed": options.seed,
        }
        self.cells = Cells(options, choice, self.folder, quick)
        self.numbers = self.cells.numbers()
        self.work = Plan(
            self.cells.trainings,
            self.cells.all,
            self.write_tables,
            self.measure,
            self.measured,
            self.snapshots,
            words=self._cost_of_measuring,
        )
        self._absent: list[str] = []

    # ---- which networks

    def snapshots(self, cell: Cell) -> list[int]:
        """The epochs whose network is kept."""
        return self.cells.snapshots(cell) if self.moments is None else cell.moments(self.moments)

    def epochs_of(self, cell: Cell) -> list[int | None]:
        """The epochs whose network is measured; None is the final one."""
        if self.moments is None:
            return [None]
        return [None if epoch == cell.preset.epochs else epoch for epoch in cell.moments(self.moments)]

    def part(self, cell: Cell, epoch: int | None) -> float:
        """The part of the training that a network stands for, the same for all algorithms."""
        if epoch is None or self.moments is None:
            return 1.0
        return min(self.moments, key=lambda part: abs(max(1, round(part * cell.preset.epochs)) - epoch))

    # ---- measuring

    def measure(self, cell: Cell, run: Run) -> None:
        """The profiles of a run that are not there yet."""
        images = self.cells.trainings.images(cell.preset)
        for epoch in self.epochs_of(cell):
            if epoch is None or run.result(epoch) is not None:
                path, device = self._file(run.path.name, epoch), self.cells.trainings.device
                profile_of_run(run, images, path, self.sigmas, epoch, device, **self.settings)
            else:
                self._absent.append(f"{run.path.name} was trained without keeping its network at epoch {epoch}.")

    def measured(self, cell: Cell, run: Run) -> bool:
        """Whether all of them are there."""
        epochs = [epoch for epoch in self.epochs_of(cell) if epoch is None or run.result(epoch) is not None]
        return all(self._file(run.path.name, epoch).exists() for epoch in epochs)

    def _file(self, run: str, epoch: int | None) -> Path:
        end = "final" if epoch is None else f"epoch-{epoch:04d}"
        return self.folder / "profiles" / f"{run}-{end}.json"

    def _cost_of_measuring(self) -> str:
        missing = [
            cell for cell in self.cells.all for e in self.epochs_of(cell) if not self._file(cell.name, e).exists()
        ]
        operations = 0.0
        for cell in missing:
            images = min(FACTS[cell.preset.dataset].train, self.cells.trainings.limit_data or 10**9)
            operations += 2 * images * len(self.sigmas) * forward_operations(cell.preset)
        return (
            f"Then {len(missing)} local-energy profiles of {len(self.sigmas)} points: about "
            f"{duration(operations / CPU_SPEED)} on two cores if two passes over the training images are enough."
        )

    # ---- tables

    def write_tables(self) -> None:
        """What has been measured so far."""
        about = self.provenance(**self.cells.provenance())
        networks = Table(
            NETWORKS,
            provenance={
                **about,
                "units": "errors are fractions; train_error_augmented is E(w) of the profile; train_error and "
                "train_loss of the final network are without augmentation, of earlier ones as seen in training",
                "settings": self.settings,
            },
        )
        profiles = Table(
            PROFILES, provenance={**about, "units": "delta_e is a fraction; stderr is about the noise alone"}
        )
        for cell, run in self.cells.finished(self.table("networks")):
            for epoch in self.epochs_of(cell):
                profile, result = read_profile(self._file(run.path.name, epoch)), run.result(epoch)
                if profile is not None and result is not None:
                    self._add(networks, profiles, cell, run, epoch, result, profile)
        networks.save(self.folder / "networks.csv")
        profiles.save(self.folder / "profiles.csv")

    def _add(
        self,
        networks: Table,
        profiles: Table,
        cell: Cell,
        run: Run,
        epoch: int | None,
        result: Mapping[str, Any],
        profile: LocalEnergy,
    ) -> None:
        """One network, and the points of its profile."""
        key = {
            "row": row_of(cell.preset),
            "algorithm": cell.preset.algorithm,
            "seed": cell.seed,
            "epoch": result["epoch"],
            "part": self.part(cell, epoch),
        }
        networks.add(
            **key,
            train_error=result.get("train_error"),
            train_error_augmented=profile.baseline,
            train_loss=result.get("train_loss"),
            test_error=result.get("test_error"),
            run=run.path.name,
        )
        for sigma, mean, error, passes in zip(
            profile.sigmas, profile.mean, profile.stderr, profile.passes, strict=True
        ):
            profiles.add(**key, sigma=float(sigma), delta_e=float(mean), stderr=float(error), passes=float(passes))
        profiles.provenance["conventions"] = without_request(profile)

    # ---- drawing

    def charts(self) -> list[Chart]:
        """One figure for each row and moment of the training: the curves of all algorithms."""
        networks, profiles = self.table("networks") or Table(NETWORKS), self.table("profiles") or Table(PROFILES)
        caption = [
            "Increase of the training error under multiplicative noise of strength σ, over the training images with "
            "the augmentation of the training. The band is one standard error. In the legend: epoch, unperturbed train "
            "and test error.",
            *self.deviations(),
        ]
        charts: list[Chart] = []
        for row in networks.unique("row"):
            for part in sorted(networks.where(row=row).unique("part")):
                about, points = networks.where(row=row, part=part), profiles.where(row=row, part=part)
                when = "at the end of training" if part == 1 else f"after {100 * part:.0f}% of the training"
                charts.append(
                    Chart(
                        f"{self.name}-{row}-{round(100 * part):03d}",
                        f"Local energy {when}: {row}",
                        "σ",
                        "δE train (%)",
                        _curves(about, points),
                        caption=" ".join(caption),
                    )
                )
        return charts

    def finding(self) -> str:
        """In each row, whose minima are flatter than those of SGD at the end of training."""
        profiles = self.table("profiles") or Table(PROFILES)
        clauses = []
        for row in profiles.unique("row"):
            sigmas = [sigma for sigma in profiles.where(row=row, part=1.0).unique("sigma") if sigma <= AT_SIGMA]
            if sigmas:
                points = profiles.where(row=row, part=1.0, sigma=max(sigmas))
                clauses.append(_flatness_against_sgd(points, f"local energy of {row} at σ = {max(sigmas):g}"))
        return said(*clauses)

    def comparison(self) -> Comparison:
        """Final training losses and test errors against the paper's, and whether the profiles lie below SGD's."""
        networks, profiles = self.table("networks") or Table(NETWORKS), self.table("profiles") or Table(PROFILES)
        rows = []
        for row in networks.unique("row"):
            ends, points = networks.where(row=row, part=1.0), profiles.where(row=row, part=1.0)
            for algorithm in ends.unique("algorithm"):
                rows.append([row, *self._compared(row, algorithm, ends.where(algorithm=algorithm), points)])
        return Comparison(
            [
                *("row", "algorithm", "loss, paper", "loss", "test error, Table 1 (%)", "test error (%)"),
                *("train error (%)", f"δE at σ = {AT_SIGMA:g} (%)", "below SGD at", "n"),
            ],
            rows,
            [
                "Loss: cross-entropy of the final network on the training images (without augmentation; the paper does "
                "not say). Train error: with the augmentation of the training, as in the profile.",
                "Below SGD at: the number of noise strengths at which the profile lies below that of SGD, of all; in "
                "brackets by more than two standard errors. Profiles are comparable where the train errors are close.",
                *self.deviations(),
            ],
            keys=[
                *("row", "algorithm", "paper_loss", "loss", "paper_test_error", "test_error", "train_error"),
                *("delta_e", "below_sgd", "n"),
            ],
        )

    def _compared(self, row: str, algorithm: str, about: Table, points: Table) -> list[object]:
        """One line of the comparison, after the row."""
        mine, sgd = points.where(algorithm=algorithm), points.where(algorithm="sgd")
        return [
            NAMES.get(algorithm, algorithm),
            number(self.losses.get((row, algorithm))),
            number(about["train_loss"].mean(), ".2g"),
            paper_error(preset(row, algorithm)),
            percent(about["test_error"]),
            percent(about["train_error_augmented"]),
            at_sigma(mine, AT_SIGMA),
            "-" if algorithm == "sgd" or not len(sgd) else below(mine, sgd),
            len(about),
        ]

    def deviations(self) -> list[str]:
        """In what this is not the paper's; also networks that could not be measured because they were not kept."""
        return [*self.cells.deviations(), *self._absent]


def along_training(item: Item, folder: Path, options: MomentOptions, quick: bool = False, **data: Any) -> ProfileFigure:
    """Profiles at several moments of the training: Figures 3 and 5."""
    moments = options.moments if options.moments is not None else (QUICK_MOMENTS if quick else MOMENTS)
    return ProfileFigure(item, folder, options, quick, moments=moments, **data)


# ---------------------------------------------------------------------------------------------------- from the tables


def mean_profile(points: Table) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Mean over seeds at each sigma, and its standard error (of one seed: that of the measurement)."""
    sigmas = points.unique("sigma")
    mean, error = [], []
    for sigma in sigmas:
        there = points.where(sigma=sigma)
        values = there["delta_e"]
        mean.append(values.mean())
        error.append(values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else there["stderr"][0])
    return sigmas, np.array(mean), np.array(error)


def _flatness_against_sgd(points: Table, what: str) -> str:
    sgd = 100 * points.where(algorithm="sgd")["delta_e"]
    others = [name for name in points.unique("algorithm") if name != "sgd"]
    contrasts = {
        NAMES.get(name, name): Contrast.of(100 * points.where(algorithm=name)["delta_e"], sgd) for name in others
    }
    return against("SGD", f"{what} (lower is flatter)", contrasts)


def _curves(networks: Table, profiles: Table) -> list[Series]:
    """The curve of each algorithm, with epoch, train and test error in the legend."""
    series = []
    for algorithm in networks.unique("algorithm"):
        about, points = networks.where(algorithm=algorithm), profiles.where(algorithm=algorithm)
        if not len(points):
            continue
        sigmas, mean, error = mean_profile(points)
        label = (
            f"{NAMES.get(algorithm, algorithm)}, epoch {about['epoch'].mean():g}, "
            f"train {100 * about['train_error_augmented'].mean():.2f}%, "
            f"test {100 * about['test_error'].mean():.2f}%"
        )
        series.append(Series(label, sigmas, list(100 * mean), error=list(100 * error), n=len(about)))
    return series


def at_sigma(points: Table, sigma: float) -> Shown:
    """DE and its standard error at one strength of the noise, in percent; a dash where it was not measured."""
    sigmas, mean, error = mean_profile(points)
    for k, there in enumerate(sigmas):
        if math.isclose(there, sigma):
            value, stderr = 100 * float(mean[k]), 100 * float(error[k])
            return Shown(f"{value:.2f} ± {stderr:.2f}", value=value, stderr=stderr)
    return Shown("-", value=None, stderr=None)


def below(points: Table, others: Table) -> Shown:
    """At how many strengths of the noise a profile lies below another; in brackets by two standard errors or more."""
    ours, theirs = (
        {s: (m, e) for s, m, e in zip(*mean_profile(table), strict=True) if s > 0} for table in (points, others)
    )
    common = [sigma for sigma in ours if sigma in theirs]
    lower = [sigma for sigma in common if ours[sigma][0] < theirs[sigma][0]]
    clear = [s for s in lower if theirs[s][0] - ours[s][0] > 2 * math.hypot(ours[s][1], theirs[s][1])]
    return Shown(f"{len(lower)} ({len(clear)}) of {len(common)}", value=len(lower), clearly=len(clear), of=len(common))
