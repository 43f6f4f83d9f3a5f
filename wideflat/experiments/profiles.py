"""Local-energy profiles of trained cells: measured once, kept in files, drawn with their train and test errors.

The profile of a network is taken over the training images with the augmentation of its training, drawn anew in every
pass, as the paper says it did (App. B.2); the perturbed and the unperturbed network see the same images. All other
conventions are those of :func:`wideflat.local_energy.local_energy` and are kept in each file.

Tables:

* ``networks.csv``: one row a network that was measured: its place in the training, its errors and losses.
* ``profiles.csv``: one row a point of a profile.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from wideflat.data import Augmentation, ImageData
from wideflat.data.augmentation import normalise
from wideflat.energy.measure import local_energy
from wideflat.energy.profile import LocalEnergy
from wideflat.experiments.cells import MOMENTS, NAMES, QUICK_MOMENTS, CellExperiment, row_of
from wideflat.experiments.experiment import Comparison
from wideflat.experiments.table import Table
from wideflat.experiments.table1 import paper_error, percent
from wideflat.experiments.trainings import CPU_SPEED, IMAGES, Cell, forward_operations
from wideflat.presets import preset
from wideflat.report.chart import Chart, Series
from wideflat.training.runs import Run

__all__ = ["Evolution", "ProfileExperiment", "augmenting", "kept", "profile_of_run"]

#: Strengths of the noise in the figures.
SIGMAS = tuple(round(0.05 * k, 2) for k in range(11))
#: What both tables say of a network.
KEY = ("row", "algorithm", "seed", "epoch", "part")
#: Where profiles are compared by a single number.
AT_SIGMA = 0.5


# ---------------------------------------------------------------------------------------------------- one measurement


def augmenting(augmentation: Augmentation, data: ImageData) -> Callable[[Tensor], Tensor]:
    """What makes the input of a network of bytes (n, H, W, C): augmentation and normalisation, by torch's own seed."""

    def augment(pixels: Tensor) -> Tensor:
        return augmentation(pixels, data.mean, data.std, torch.default_generator)

    return augment


def kept(path: Path, request: dict[str, Any], measure: Callable[[], LocalEnergy]) -> LocalEnergy:
    """The profile in the file ``path`` if it is what is asked for; otherwise it is measured and written there.

    Args:
        path: The file.
        request: What is asked for: everything that the result depends on. Kept in the file.
        measure: Measures it.
    """
    request = {name: list(value) if isinstance(value, tuple) else value for name, value in request.items()}
    if path.exists():
        with contextlib.suppress(ValueError):  # a damaged file is measured again
            profile = LocalEnergy.load(path)
            if profile.conventions.get("request") == request:
                return profile
    profile = measure()
    profile.conventions["request"] = request
    profile.save(path)
    return profile


def profile_of_run(
    run: Run,
    data: ImageData,
    path: Path,
    sigmas: Sequence[float],
    epoch: int | None = None,
    device: str = "cpu",
    **settings: Any,
) -> LocalEnergy:
    """The local energy of a run's network over its training images, with the augmentation of its training.

    Args:
        run: The run.
        data: The data set that it was trained on.
        path: The file that the profile is kept in.
        sigmas: Strengths of the noise.
        epoch: A snapshot; None for the final network.
        device: Where to compute.
        **settings: More arguments of :func:`wideflat.local_energy.local_energy`.
    """
    limit = run.config["options"]["limit_data"]
    if limit is not None:
        data = data.subset(min(limit, len(data.train)))
    augmentation = run.augmentation()
    request = {
        "run": run.path.name,
        "epoch": epoch,
        "sigmas": tuple(float(sigma) for sigma in sigmas),
        "augmentation": repr(augmentation),
        "images": len(data.train),
        **settings,
    }

    def measure() -> LocalEnergy:
        pixels = data.train.images.permute(0, 2, 3, 1).contiguous().to(device)
        augment: Callable[[Tensor], Tensor] | None = augmenting(augmentation, data)
        if augmentation == augmentation.evaluation() and augmentation.size in (None, data.image_size):
            pixels, augment = normalise(pixels, data.mean, data.std), None  # the same in every pass
        images = pixels, data.train.targets.to(device)
        return local_energy(run.load_model(epoch, device), images, list(sigmas), augment=augment, **settings)

    return kept(path, request, measure)


# ------------------------------------------------------------------------------------------------------ the experiment


class ProfileExperiment(CellExperiment):
    """Local-energy profiles of cells of Table 1 at the end of their training.

    Args:
        folder: Where everything goes.
        quick: The reduced form.
        sigmas: Strengths of the noise; None for 0, 0.05, ..., 0.5.
        target_stderr: Stop at each sigma when the standard error of dE is below this; None for 0.002 (quick: no limit).
        max_passes: Stop at each sigma after this many passes over the training images.
        **more: See :class:`wideflat.experiments.cells.CellExperiment`.
    """

    #: The paper's training losses of the final networks, by (row, algorithm).
    paper_losses: ClassVar[Mapping[tuple[str, str], float]] = {}

    def __init__(
        self,
        folder: Path,
        quick: bool = False,
        sigmas: Sequence[float] | None = None,
        target_stderr: float | None = None,
        max_passes: float | None = None,
        **more: Any,
    ) -> None:
        super().__init__(folder, quick, **more)
        self.sigmas = tuple(sigmas) if sigmas is not None else (SIGMAS[::2] if quick else SIGMAS)
        self.settings = {
            "target_stderr": target_stderr or (None if quick else 0.002),
            "max_passes": max_passes or (4 if quick else 50),
            "seed": self.seed,
        }
        self._absent: list[str] = []

    # ---- measuring

    def epochs_of(self, cell: Cell) -> list[int | None]:
        """The epochs whose network is measured; None is the final one."""
        return [None]

    def measure(self, cell: Cell, run: Run) -> None:
        """The profiles of a run that are not there yet."""
        for epoch in self.epochs_of(cell):
            if epoch is None or run.result(epoch) is not None:
                self.profile(cell, run, epoch)
            else:
                self._absent.append(f"{run.path.name} was trained without keeping its network at epoch {epoch}.")

    def measured(self, cell: Cell, run: Run) -> bool:
        """Whether all of them are there."""
        epochs = [epoch for epoch in self.epochs_of(cell) if epoch is None or run.result(epoch) is not None]
        return all(self._file(run, epoch).exists() for epoch in epochs)

    def profile(self, cell: Cell, run: Run, epoch: int | None) -> LocalEnergy:
        """One profile, from its file or measured now."""
        return profile_of_run(
            run,
            self.images(cell.experiment),
            self._file(run, epoch),
            self.sigmas,
            epoch,
            self.device,
            **self.settings,
        )

    def _file(self, run: Run, epoch: int | None) -> Path:
        end = "final" if epoch is None else f"epoch-{epoch:04d}"
        return self.folder / "profiles" / f"{run.path.name}-{end}.json"

    # ---- tables

    def write_tables(self) -> None:
        """What has been measured so far."""
        networks = Table(
            [*KEY, "train_error", "train_error_augmented", "train_loss", "test_error", "run"],
            provenance=self.provenance(
                units="errors are fractions; train_error_augmented is E(w) of the profile; train_error and train_loss "
                "of the final network are without augmentation, of earlier ones as seen in training",
                settings=self.settings,
            ),
        )
        profiles = Table(
            [*KEY, "sigma", "delta_e", "stderr", "passes"],
            provenance=self.provenance(units="delta_e is a fraction; stderr is about the noise alone"),
        )
        for cell, run in self.finished(self.rows_in("networks")):
            experiment = cell.experiment
            for epoch in self.epochs_of(cell):
                path = self._file(run, epoch)
                about = run.result(epoch)
                if not path.exists() or about is None:
                    continue
                try:
                    profile = LocalEnergy.load(path)
                except ValueError:  # damaged: measured again by compute
                    continue
                key = {
                    "row": row_of(experiment),
                    "algorithm": experiment.algorithm,
                    "seed": cell.seed,
                    "epoch": about["epoch"],
                    "part": 1.0 if epoch is None else self.part(cell, epoch),
                }
                networks.add(
                    **key,
                    train_error=about.get("train_error"),
                    train_error_augmented=profile.baseline,
                    train_loss=about.get("train_loss"),
                    test_error=about.get("test_error"),
                    run=run.path.name,
                )
                for sigma, mean, error, passes in zip(
                    profile.sigmas, profile.mean, profile.stderr, profile.passes, strict=True
                ):
                    profiles.add(
                        **key, sigma=float(sigma), delta_e=float(mean), stderr=float(error), passes=float(passes)
                    )
                profiles.provenance["conventions"] = {
                    name: value for name, value in profile.conventions.items() if name != "request"
                }
        networks.save(self.folder / "networks.csv")
        profiles.save(self.folder / "profiles.csv")

    def part(self, cell: Cell, epoch: int) -> float:
        """The part of the training that a snapshot stands for."""
        return epoch / cell.experiment.epochs

    # ---- drawing

    def curve(self, profiles: Table) -> tuple[list[float], np.ndarray, np.ndarray]:
        """Mean over seeds at each sigma, and its standard error (of one seed: that of the measurement)."""
        sigmas = profiles.unique("sigma")
        mean, error = [], []
        for sigma in sigmas:
            points = profiles.where(sigma=sigma)
            values = points["delta_e"]
            mean.append(values.mean())
            error.append(values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else points["stderr"][0])
        return sigmas, np.array(mean), np.array(error)

    def charts(self) -> list[Chart]:
        """One figure for each row and moment of the training: the curves of all algorithms."""
        networks, profiles = self.table("networks"), self.table("profiles")
        charts: list[Chart] = []
        if networks is None or profiles is None:
            return charts
        for row in networks.unique("row"):
            for part in sorted(networks.where(row=row).unique("part")):
                series = []
                for algorithm in networks.where(row=row, part=part).unique("algorithm"):
                    about = networks.where(row=row, part=part, algorithm=algorithm)
                    points = profiles.where(row=row, part=part, algorithm=algorithm)
                    if not len(points):
                        continue
                    sigmas, mean, error = self.curve(points)
                    n = len(about)
                    label = (
                        f"{NAMES.get(algorithm, algorithm)}, epoch {about['epoch'].mean():g}, "
                        f"train {100 * about['train_error_augmented'].mean():.2f}%, "
                        f"test {100 * about['test_error'].mean():.2f}%" + (f", n = {n}" if n > 1 else "")
                    )
                    series.append(Series(label, sigmas, list(100 * mean), error=list(100 * error)))
                when = "at the end of training" if part == 1 else f"after {100 * part:.0f}% of the training"
                charts.append(
                    Chart(
                        f"{self.name}-{row}-{round(100 * part):03d}",
                        f"Local energy {when}: {row}",
                        "σ",
                        "δE train (%)",
                        series,
                        caption=self.caption(
                            "Increase of the training error under multiplicative noise of strength σ, over the "
                            "training images with the augmentation of the training. The band is one standard error. In "
                            "the legend: epoch, unperturbed train and test error."
                        ),
                    )
                )
        return charts

    def comparison(self) -> Comparison:
        """Final training losses and test errors against the paper's, and whether the profiles lie below SGD's."""
        networks, profiles = self.table("networks"), self.table("profiles")
        rows = []
        for row in [] if networks is None else networks.unique("row"):
            assert networks is not None and profiles is not None
            ends = networks.where(row=row, part=1.0)
            sgd = profiles.where(row=row, part=1.0, algorithm="sgd")
            for algorithm in ends.unique("algorithm"):
                about = ends.where(algorithm=algorithm)
                points = profiles.where(row=row, part=1.0, algorithm=algorithm)
                paper_loss = self.paper_losses.get((row, algorithm))
                rows.append(
                    [
                        row,
                        NAMES.get(algorithm, algorithm),
                        "-" if paper_loss is None else f"{paper_loss:g}",
                        f"{about['train_loss'].mean():.2g}",
                        paper_error(preset(row, algorithm)),
                        percent(about["test_error"]),
                        percent(about["train_error_augmented"]),
                        self._at(points, AT_SIGMA),
                        "-" if algorithm == "sgd" or not len(sgd) else self._below(points, sgd),
                        len(about),
                    ]
                )
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
        )

    def _at(self, points: Table, sigma: float) -> str:
        sigmas, mean, error = self.curve(points)
        if not sigmas:
            return "-"
        k = int(np.abs(np.array(sigmas) - sigma).argmin())
        if not math.isclose(sigmas[k], sigma):
            return "-"
        return f"{100 * mean[k]:.2f} ± {100 * error[k]:.2f}"

    def _below(self, points: Table, sgd: Table) -> str:
        ours = dict(zip(points.unique("sigma"), zip(*self.curve(points)[1:], strict=True), strict=True))
        theirs = dict(zip(sgd.unique("sigma"), zip(*self.curve(sgd)[1:], strict=True), strict=True))
        common = [sigma for sigma in ours if sigma > 0 and sigma in theirs]
        below = [sigma for sigma in common if ours[sigma][0] < theirs[sigma][0]]
        clear = [s for s in below if theirs[s][0] - ours[s][0] > 2 * math.hypot(ours[s][1], theirs[s][1])]
        return f"{len(below)} ({len(clear)}) of {len(common)}"

    def deviations(self) -> list[str]:
        """Also networks that could not be measured because they were not kept."""
        return [*super().deviations(), *self._absent]

    # ---- cost

    def cost(self) -> str:
        """Trainings and measurements."""
        missing = [(cell, epoch) for cell in self.cells() for epoch in self.epochs_of(cell)]
        missing = [
            (cell, epoch) for cell, epoch in missing if not self._file(Run(self.runs / cell.name, {}), epoch).exists()
        ]
        operations = 0.0
        for cell, _ in missing:
            images = min(IMAGES[cell.experiment.dataset], self.limit_data or 10**9)
            operations += 2 * images * len(self.sigmas) * forward_operations(cell.experiment)
        return (
            f"{super().cost()} Then {len(missing)} local-energy profiles of {len(self.sigmas)} points: about "
            f"{operations / CPU_SPEED / 3600:.1f} hours on two cores if two passes over the training images are enough."
        )


class Evolution(ProfileExperiment):
    """Local-energy profiles along the training: Figures 3 and 5.

    Args:
        folder: Where everything goes.
        quick: The reduced form.
        moments: Parts of the training at which networks are measured; None for 10, 30, 60, 80 and 100 per cent.
        **more: See :class:`ProfileExperiment`.
    """

    def __init__(self, folder: Path, quick: bool = False, moments: Sequence[float] | None = None, **more: Any) -> None:
        super().__init__(folder, quick, **more)
        self.chosen_parts = tuple(moments) if moments is not None else (QUICK_MOMENTS if quick else MOMENTS)
        if any(not 0 < part <= 1 for part in self.chosen_parts):
            raise ValueError(f"moments must be parts of the training, above 0 and up to 1, got {self.chosen_parts}")

    def parts(self, row: str) -> tuple[float, ...]:
        """The chosen ones, in every row."""
        return self.chosen_parts

    def epochs_of(self, cell: Cell) -> list[int | None]:
        """Those at the chosen parts; the end of the training is the final network."""
        last = cell.experiment.epochs
        return [None if epoch == last else epoch for epoch in cell.moments(self.chosen_parts)]

    def part(self, cell: Cell, epoch: int) -> float:
        """The chosen part that this epoch stands for, the same for all algorithms."""
        return min(self.chosen_parts, key=lambda part: abs(max(1, round(part * cell.experiment.epochs)) - epoch))
