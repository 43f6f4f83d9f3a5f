"""Figure 7: correlation of local energy with test error over networks of one architecture.

The paper took 14 networks of the PGDL competition, VGG-like with 3 blocks of width 512 and one dense layer of 128,
trained on CIFAR-10 with different dropout, batch size and weight decay. Here they are either

* trained by us: the same architecture (or a narrower one, ``widths``) on CIFAR-10 (or a part of it, ``limit_data``),
  one network for every combination of dropout, batch size and weight decay, each until its training loss without
  dropout is below ``target_loss``, so that networks of equal training loss are compared; or
* given, in the folder ``models``: networks in PGDL's published format (:mod:`wideflat.experiments.pgdl`), or runs of
  ``wideflat train``.

``networks.csv`` has one row a network: how it was trained, its errors, and dE at one sigma.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.data import ImageData
from wideflat.energy.measure import local_energy
from wideflat.energy.profile import LocalEnergy
from wideflat.experiments.correlation import Correlation, pearson, spearman
from wideflat.experiments.experiment import Comparison
from wideflat.experiments.pgdl import find_models, load_images, of_one_architecture, task_folder
from wideflat.experiments.profiles import kept, profile_of_run
from wideflat.experiments.table import Table
from wideflat.experiments.trainings import Cell, TrainingExperiment, training_cost
from wideflat.presets import DATASETS, Preset
from wideflat.report.chart import Chart, Series
from wideflat.schedules import Schedule
from wideflat.training.runs import Run
from wideflat.training.training import Options, Training

__all__ = ["Fig7", "Network"]

#: What the paper prints.
PAPER = Correlation(r=0.90, p=1e-4, n=14)
#: Networks whose training error is above this are drawn, but left out of the correlation.
NEARLY_ZERO = 0.01


@dataclasses.dataclass
class Network:
    """One point of the figure.

    Attributes:
        name: Of its run or folder.
        dropout: What it was trained with, where that is known; the same for the others.
        batch_size: See there.
        weight_decay: See there.
        epochs: How long it was trained.
        train_error: Without noise, on the images that dE is measured on.
        train_loss: The same for the cross-entropy.
        test_error: On the test set.
        profile: Its local energy.
    """

    name: str
    profile: LocalEnergy
    train_error: float
    test_error: float
    train_loss: float | None = None
    dropout: float | None = None
    batch_size: float | None = None
    weight_decay: float | None = None
    epochs: int | None = None


class Fig7(TrainingExperiment):
    """Flatness against test error over networks of one architecture.

    Args:
        folder: Where everything goes.
        quick: The reduced form.
        models: A folder of networks to measure instead of training some: a task of PGDL, or runs.
        sigma: Strength of the noise.
        realisations: Perturbations of each network (passes over the data): 64 as in the paper, or 4 of the other kinds.
        noise: ``"pass"``: one perturbation for the whole data set, so that the spread over perturbations is known, as
            in the paper; ``"batch"`` or ``"example"``: the same mean with less computation, and its standard error.
        dropouts: Dropout probabilities of the grid.
        batch_sizes: Batch sizes of the grid.
        weight_decays: L2 penalties of the grid.
        seeds: Networks of each combination.
        widths: Channels of the three blocks.
        dataset: What they are trained on.
        lr: Learning rate, of all of them; momentum is 0.9.
        epochs: The most that each is trained for; the learning rate drops by 5 at 1/4, 1/2 and 3/4 of it.
        target_loss: Each training ends when its training loss, in eval mode, is below this.
        limit_data: Train and measure on the first so many images. The test set stays whole.
        **more: See :class:`wideflat.experiments.trainings.TrainingExperiment`.
    """

    name = "fig7"
    title = "Figure 7: flatness and test error of networks of one architecture"
    claim = (
        "Over 14 networks of one VGG-like architecture from the PGDL competition, trained on CIFAR-10 with different "
        "dropout, batch size and weight decay, the paper finds that the local energy at σ = 0.5 correlates with the "
        "test error: r(12) = 0.90, p = 1e-4."
    )
    quick_means = (
        "8 VGG-like networks of width 16, trained for at most {epochs} epochs on {images} Dress-vs-Coat images "
        "(28x28, two classes); {realisations} perturbations"
    )

    def __init__(
        self,
        folder: Path,
        quick: bool = False,
        models: Path | None = None,
        sigma: float = 0.5,
        realisations: int | None = None,
        noise: str = "pass",
        dropouts: Sequence[float] | None = None,
        batch_sizes: Sequence[int] | None = None,
        weight_decays: Sequence[float] | None = None,
        seeds: int = 1,
        widths: Sequence[int] | None = None,
        dataset: str | None = None,
        lr: float | None = None,
        epochs: int | None = None,
        target_loss: float = 0.01,
        limit_data: int | None = None,
        **more: Any,
    ) -> None:
        super().__init__(folder, quick, limit_data=limit_data or (300 if quick else None), **more)
        self.models = None if models is None else Path(models)
        self.sigma = sigma
        self.noise = noise
        self.realisations = realisations or (8 if quick else 64 if noise == "pass" else 4)
        if self.realisations < 2:
            raise ValueError(f"realisations must be >= 2: one perturbation has no spread, got {self.realisations}")
        self.dropouts = tuple(dropouts) if dropouts else ((0.0, 0.5) if quick else (0.0, 0.25, 0.5))
        self.batch_sizes = tuple(batch_sizes) if batch_sizes else ((6, 12) if quick else (8, 32, 512))
        self.weight_decays = tuple(weight_decays) if weight_decays else ((0.0, 0.003) if quick else (0.0, 0.001))
        self.seeds = seeds
        self.widths = tuple(widths) if widths else ((16, 16, 16) if quick else (512, 512, 512))
        self.dataset = dataset or ("dress-coat" if quick else "cifar10")
        self.lr = lr or (0.01 if quick else 0.001)
        self.epochs = epochs or (40 if quick else 1200)
        self.target_loss = target_loss
        self.quick_means = self.quick_means.format(
            epochs=self.epochs, images=self.limit_data, realisations=self.realisations
        )

    # ---- what is trained

    def cells(self) -> list[Cell]:
        """Every combination; none where networks are given."""
        if self.models is not None:
            return []
        return [
            Cell(self.experiment(dropout, batch_size, weight_decay), self.seed + number)
            for number in range(self.seeds)
            for dropout, batch_size, weight_decay in itertools.product(
                self.dropouts, self.batch_sizes, self.weight_decays
            )
        ]

    def experiment(self, dropout: float, batch_size: int, weight_decay: float) -> Preset:
        """One combination. Rates and schedule are those of PGDL's Task 1, by its public description."""
        num_classes, size = DATASETS[self.dataset]
        own = () if self.dataset not in ("fashion-mnist", "dress-coat") else (("image_size", size), ("in_channels", 1))
        return Preset(
            name=f"vgg-dropout-{dropout:g}-batch-{batch_size}-decay-{weight_decay:g}",
            algorithm="sgd",
            dataset=self.dataset,
            model="vgg3x512",
            model_arguments=(("dropout", dropout), ("widths", self.widths), *own),
            num_classes=num_classes,
            image_size=size,
            padding=0,
            augmentation="none",
            epochs=self.epochs,
            batch_size=batch_size,
            lr=self.lr,
            schedule=Schedule(self.epochs, drops=tuple(self.epochs * k / 4 for k in (1, 2, 3)), drop_factor=0.2),
            nesterov=False,
            weight_decay=weight_decay,
        )

    def options_of(self, cell: Cell) -> Options:
        """The test set is looked at once, at the end."""
        return Options(seed=cell.seed, evaluate_every=self.epochs)

    def images(self, experiment: Preset) -> ImageData:
        """The first training images and all test images."""
        data = super().images(experiment)
        return data if self.limit_data is None else data.subset(min(self.limit_data, len(data.train)))

    def more_of(self, cell: Cell) -> dict[str, Any]:
        """Train until the network fits its data."""

        def look(training: Training, row: dict[str, Any]) -> None:
            if row["train_error"] < 0.3:  # in vain before that
                fit = training.evaluate("train")
                row |= {"fit_error": fit.errors[0], "fit_loss": fit.losses[0]}

        def fitted(row: dict[str, Any]) -> bool:
            return row.get("fit_loss", math.inf) <= self.target_loss

        return {"on_epoch": look, "until": fitted}

    def measure(self, cell: Cell, run: Run) -> None:
        """The local energy of a trained network."""
        self._profile_of_run(run, self.images(cell.experiment))

    def measured(self, cell: Cell, run: Run) -> bool:
        """Whether it is there."""
        return self._file(run.path.name).exists()

    def _settings(self) -> dict[str, Any]:
        return {"noise": self.noise, "max_passes": self.realisations, "seed": self.seed}

    def _profile_of_run(self, run: Run, data: ImageData) -> LocalEnergy:
        path = self._file(run.path.name)
        return profile_of_run(run, data, path, [self.sigma], device=self.device, **self._settings())

    def _file(self, name: str) -> Path:
        return self.folder / "profiles" / f"{name}.json"

    # ---- what is given

    def compute(self) -> None:
        """Train and measure, or measure what is given."""
        if self.models is None:
            super().compute()
            return
        if not self.models.is_dir():
            raise FileNotFoundError(f"{self.models} is not a folder of networks")
        task = task_folder(self.models)
        self._measure_given(self._pgdl(task) if task is not None else self._given_runs(self.models))

    def _measure_given(self, makers: list[Callable[[], Network]]) -> None:
        networks: list[Network] = []
        for make in makers:
            networks.append(make())
            self._write(networks)

    def _pgdl(self, task: Path) -> list[Callable[[], Network]]:
        """Networks of one architecture of a task, measured on the images that were published with them."""
        models = of_one_architecture(find_models(task))
        train = load_images(task, "train", self.limit_data)
        if train is None:
            raise FileNotFoundError(
                f"{task} has no training images (dataset_1/train/shard_*.tfrecord): the networks of PGDL are measured "
                "on the images published with them, which are prepared as in their training"
            )
        test = None if all("test_acc" in model.metrics for model in models) else load_images(task, "test")
        if test is None and not all("test_acc" in model.metrics for model in models):
            raise FileNotFoundError(f"{task} has neither model_configs.json with test accuracies nor test images")

        def maker(model: Any) -> Callable[[], Network]:
            def make() -> Network:
                network = model.load().to(self.device)
                request = {"network": model.name, "images": len(train[0]), "sigma": self.sigma, **self._settings()}
                profile = kept(
                    self._file(model.name),
                    request,
                    lambda: local_energy(network, train, [self.sigma], **self._settings()),
                )
                accuracy = model.metrics.get("test_acc")
                error = _error(network, *test) if accuracy is None and test is not None else 1 - accuracy
                hparams = {name.lower(): value for name, value in model.hparams.items()}
                return Network(
                    model.name,
                    profile,
                    profile.baseline,
                    error,
                    dropout=_number(hparams, "dropout"),
                    batch_size=_number(hparams, "batch"),
                    weight_decay=_number(hparams, "decay", "regular", "l2"),
                )

            return make

        return [maker(model) for model in models]

    def _given_runs(self, folder: Path) -> list[Callable[[], Network]]:
        """Finished runs of one architecture on one data set."""
        runs = []
        for path in sorted(folder.glob("*/config.json")):
            with contextlib.suppress(FileNotFoundError, ValueError, RuntimeError, KeyError):
                run = Run.open(path.parent)
                if run.result() is not None:
                    runs.append((Preset.from_dict(run.config["experiment"]), run))
        if not runs:
            raise FileNotFoundError(
                f"{folder} holds neither networks of PGDL (model_*/config.json and weights.hdf5) nor finished runs of "
                "wideflat train"
            )
        most = Counter(_architecture(experiment) for experiment, _ in runs).most_common(1)[0][0]
        chosen = [(experiment, run) for experiment, run in runs if _architecture(experiment) == most]

        def maker(experiment: Preset, run: Run) -> Callable[[], Network]:
            def make() -> Network:
                about = run.config["data"]
                self.allow_altered = self.allow_altered or about["altered"]
                data = TrainingExperiment.images(self, experiment).subset(about["train"], about["test"])
                return self._network(experiment, run, self._profile_of_run(run, data))

            return make

        return [maker(experiment, run) for experiment, run in chosen]

    def _network(self, experiment: Preset, run: Run, profile: LocalEnergy) -> Network:
        result = run.result()
        assert result is not None
        return Network(
            run.path.name,
            profile,
            result["train_error"],
            result["test_error"],
            result["train_loss"],
            dropout=dict(experiment.model_arguments).get("dropout"),
            batch_size=experiment.batch_size,
            weight_decay=experiment.weight_decay,
            epochs=result["epoch"],
        )

    # ---- the table

    def write_tables(self) -> None:
        """Of what was trained and measured so far."""
        names = {cell.name for cell in self.cells()}
        networks = []
        for cell, run in self.trained():
            path = self._file(run.path.name)
            if cell.name in names and run.result() is not None and path.exists():
                with contextlib.suppress(ValueError):  # a damaged file is measured again by compute
                    networks.append(self._network(cell.experiment, run, LocalEnergy.load(path)))
        self._write(networks)

    def _write(self, networks: Sequence[Network]) -> None:
        table = Table(
            [
                *("network", "dropout", "batch_size", "weight_decay", "epochs", "train_error", "train_loss"),
                *("test_error", "sigma", "delta_e", "spread", "stderr", "realisations"),
            ],
            provenance=self.provenance(
                units="errors are fractions; spread is the standard deviation over perturbations of the whole data set",
                source="trained here" if self.models is None else f"networks given: {self.models.name}",
                noise=self.noise,
                widths=list(self.widths),
                target_loss=self.target_loss,
                conventions={k: v for n in networks for k, v in n.profile.conventions.items() if k != "request"},
            ),
        )
        for network in networks:
            profile = network.profile
            table.add(
                network=network.name,
                dropout=network.dropout,
                batch_size=network.batch_size,
                weight_decay=network.weight_decay,
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

    def _fitted(self, table: Table) -> Table:
        """The networks with nearly zero training error."""
        index = table.columns.index("train_error")
        return Table(table.columns, [row for row in table.rows if row[index] <= NEARLY_ZERO], table.provenance)

    def charts(self) -> list[Chart]:
        """Local energy against test error, one colour a dropout probability."""
        table = self.table("networks")
        if table is None or not len(table):
            return []
        fitted = self._fitted(table)
        series = []
        for dropout in sorted(fitted.unique("dropout"), key=lambda value: (value is None, value)):
            label = "networks" if dropout is None else f"dropout {dropout:g}"
            series.append(self._points(label, fitted.where(dropout=dropout)))
        rest = Table(table.columns, [row for row in table.rows if row not in fitted.rows])
        if len(rest):
            series.append(self._points(f"training error above {100 * NEARLY_ZERO:g}%, left out", rest))
        found = pearson(100 * fitted["test_error"], fitted["delta_e"])
        bars = "standard deviation over perturbations" if self._has_spread(table) else "standard error"
        sigma = table["sigma"][0]
        return [
            Chart(
                "fig7",
                f"Local energy at σ = {sigma:g} against test error",
                "test error (%)",
                f"δE train at σ = {sigma:g} (%)",
                series,
                kind="points",
                caption=self.caption(f"One point a network; bars: {bars}. Pearson: {found}."),
            )
        ]

    def _points(self, label: str, part: Table) -> Series:
        bars = part["spread"] if self._has_spread(part) else part["stderr"]
        return Series(label, list(100 * part["test_error"]), list(100 * part["delta_e"]), error=list(100 * bars))

    @staticmethod
    def _has_spread(table: Table) -> bool:
        return bool(np.isfinite(table["spread"]).all())

    def comparison(self) -> Comparison:
        """Pearson's r, its p-value and n."""
        table = self.table("networks") or Table(["train_error", "test_error", "delta_e", "sigma"])
        fitted = self._fitted(table)
        x, y = fitted["test_error"], fitted["delta_e"]
        r, rank, whole = pearson(x, y), spearman(x, y), pearson(table["test_error"], table["delta_e"])
        low, high = r.interval()
        spread = f"{100 * x.min():.1f} to {100 * x.max():.1f}" if len(x) else "-"
        sigmas = ", ".join(f"{sigma:g}" for sigma in table.unique("sigma")) or "-"
        return Comparison(
            ["quantity", "paper", "measured"],
            [
                ["Pearson's r", f"{PAPER.r:.2f}", f"{r.r:.2f}"],
                ["its 95% interval", "-", f"{low:.2f} to {high:.2f}"],
                ["p-value", f"{PAPER.p:.0e}", f"{r.p:.1g}"],
                ["n", PAPER.n, r.n],
                ["Spearman's rank correlation", "-", f"{rank.r:.2f} (p = {rank.p:.1g})"],
                ["r with all networks", "-", f"{whole.r:.2f} (n = {whole.n})"],
                ["σ", "0.5", sigmas],
                ["test errors (%)", "-", spread],
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
        """Also another architecture than the paper's."""
        said = super().deviations()
        if not self.quick and self.models is None:
            if self.widths != (512, 512, 512):
                said.insert(0, f"The blocks have {', '.join(map(str, self.widths))} channels instead of 512 each.")
            said.append("The networks are trained here and are not those of the competition.")
        return said

    def cost(self) -> str:
        """Trainings and measurements."""
        if self.models is not None:
            return f"the networks in {self.models}, {self.realisations} passes over the training images each."
        left = [cell for cell in self.cells() if not (self.runs / cell.name / "model.json").exists()]
        return (
            f"{training_cost(left, self.limit_data)} That is if every network needs all of its {self.epochs} epochs; "
            f"each ends when its training loss is below {self.target_loss:g}. Then {len(self.cells())} measurements of "
            f"{self.realisations} passes."
        )


def _architecture(experiment: Preset) -> tuple[Any, ...]:
    own = tuple(item for item in experiment.model_arguments if item[0] != "dropout")
    return experiment.dataset, experiment.model, own


def _number(hparams: dict[str, Any], *words: str) -> float | None:
    """The first numeric hyper-parameter whose name contains one of the words."""
    for name, value in hparams.items():
        if any(word in name for word in words) and isinstance(value, (int, float)):
            return float(value)
    return None


def _error(network: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    device = next(network.parameters()).device
    with torch.inference_mode():
        wrong = sum(
            int((network(x.to(device)).argmax(1).cpu() != y).sum())
            for x, y in zip(inputs.split(500), targets.split(500), strict=True)
        )
    return wrong / len(targets)
