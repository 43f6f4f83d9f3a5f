"""Free entropy against local energy and test error: do they rank trained networks alike?

The paper measures the flatness of deep networks by the local energy (Eq. 4), a mean over noise, and calls their local
entropy an open problem. Here both are measured around the same networks, with the same noise on the same training
images (a random subset, without augmentation), beside the test error:

.. code-block:: text

    log Z = log E exp(-sum_i [l_i(w + sigma |w| xi) - l_i(w)])       wideflat.free_entropy
    dE    = E [error(w + sigma |w| xi)] - error(w)                    wideflat.local_energy
    <V>_0/n, the same of the loss                                     the slope of -log Z at beta = 0

The networks are trained here, cells of Table 1, or given as a folder of runs (``models``).

Tables:

* ``networks.csv``: one row a network, its errors and both measures with theirs.
* ``lambda.csv``: one row a temperature, lambda(beta) with its error; minus the area over log beta is log Z.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wideflat.energy.measure import local_energy
from wideflat.energy.profile import LocalEnergy
from wideflat.experiments.cells import NAMES, CellOptions, Cells, Choice
from wideflat.experiments.experiment import Comparison, Experiment, Item
from wideflat.experiments.given_networks import runs_of_one_architecture
from wideflat.experiments.options import MaybeInt, MaybePath
from wideflat.experiments.statistics import Shown, number, percent, spearman
from wideflat.experiments.table import Table
from wideflat.experiments.trainings import Cell, Plan, Trainings
from wideflat.experiments.workers import Answer, Workers
from wideflat.report.chart import Chart, Series
from wideflat.training.flatness import kept, plain_images, read_profile
from wideflat.training.runs import Run
from wideflat.volume.free_entropy import free_entropy
from wideflat.volume.volumes import FreeEntropy

__all__ = ["ITEM", "VolumeFigure", "VolumeOptions", "Volumes", "agreement"]

CHOICE = Choice.of(("cifar10-smallconvnet",))

NETWORKS = [
    *("network", "algorithm", "seed", "sigma", "examples", "loss", "train_error", "test_error"),
    *("log_z", "stderr", "dof", "low", "high", "lower", "upper", "gap", "llc", "llc_stderr", "converged", "flags"),
    *("loss_energy", "loss_energy_stderr", "delta_e", "delta_e_stderr", "gradients", "minutes"),
]
LAMBDA = ["network", "algorithm", "beta", "llc", "stderr"]

#: What log Z is held against: column, its error, and its name in words.
OTHERS = (
    ("test_error", None, "test error"),
    ("delta_e", "delta_e_stderr", "local energy of the error"),
    ("loss_energy", "loss_energy_stderr", "local energy of the loss"),
)


@dataclasses.dataclass
class VolumeOptions(CellOptions):
    """Free entropy of trained networks against their local energy and their test error.

    Examples:
      wideflat reproduce volume --quick
      wideflat reproduce volume --data ~/data
      wideflat reproduce volume --models runs/ --subset 500 --sigma 0.3
    """

    models: MaybePath = None
    """A folder of finished runs of `wideflat train` to measure instead of training some."""
    sigma: float = 0.5
    """Strength of the noise, relative to each weight."""
    subset: MaybeInt = None
    """Training images, drawn at random, the same for all networks; 1000 when left out (quick: 60)."""
    chains: MaybeInt = None
    """In each of the two directions; 2 when left out."""
    samples: MaybeInt = None
    """Trajectories kept at each temperature; 18 when left out (quick: 8)."""


@dataclasses.dataclass(frozen=True)
class Volumes:
    """How each network is measured, and where that is kept.

    Args:
        folder: Of the item.
        sigma: Strength of the noise.
        subset: Images.
        chains: In each direction.
        samples: Trajectories kept a temperature.
        passes: Over the images, of the local energy.
        seed: Of the noise, the chains and the subset.
        device: Where to compute.
    """

    folder: Path
    sigma: float
    subset: int
    chains: int
    samples: int
    passes: int
    seed: int
    device: str

    def entropy_file(self, name: str) -> Path:
        """Where the free entropy of a run is kept."""
        return self.folder / "volumes" / f"{name}.json"

    def energy_file(self, name: str) -> Path:
        """Where its local energy is."""
        return self.folder / "profiles" / f"{name}.json"

    def measured(self, name: str) -> bool:
        """Whether both are there."""
        return self.entropy_file(name).exists() and self.energy_file(name).exists()

    def measure(self, run: Run, images: tuple[Tensor, Tensor]) -> None:
        """What is not there yet: both, around the network of a run, on some of its training images."""
        inputs, targets = images
        generator = torch.Generator().manual_seed(self.seed)
        index = torch.randperm(len(targets), generator=generator)[: self.subset].sort().values
        data = inputs[index], targets[index]
        model = run.load_model(None, self.device)
        settings: dict[str, Any] = {"noise": "batch", "max_passes": self.passes, "seed": self.seed}
        request = {"sigma": self.sigma, "subset": len(index), **settings}
        path = self.energy_file(run.path.name)
        kept(path, request, lambda: local_energy(model, data, [self.sigma], **settings))
        self._free_entropy(run.path.name, model, data)

    def _free_entropy(self, name: str, model: torch.nn.Module, data: tuple[Tensor, Tensor]) -> None:
        path, settings = self.entropy_file(name), {"chains": self.chains, "samples": self.samples, "seed": self.seed}
        request = {"sigma": self.sigma, "subset": len(data[1]), **settings}
        there = read_volume(path)
        if there is not None and there.conventions.get("request") == request:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished.pt")
        found = free_entropy(model, data, self.sigma, checkpoint=unfinished, **settings)  # type: ignore[arg-type]
        found.conventions["request"] = request
        found.save(path)
        unfinished.unlink(missing_ok=True)


def read_volume(path: Path) -> FreeEntropy | None:
    """The free entropy in a file; None if it is not there, or damaged: it is measured again then."""
    if path.exists():
        with contextlib.suppress(ValueError):
            return FreeEntropy.load(path)
    return None


class _GivenRuns:
    """The work where runs are given: measure them, one after the other."""

    def __init__(self, experiment: VolumeFigure, folder: Path) -> None:
        self.experiment, self.folder = experiment, folder

    def cost(self) -> str:
        """Nothing is trained."""
        return f"the finished runs of one architecture in {self.folder}; {self.experiment.words()}"

    def compute(self, experiment: Experiment, workers: Workers | None = None) -> None:
        """Measure what is not measured yet; the tables are written after each."""
        for run in self.runs():
            about = run.part("data")
            trainings = self.experiment.trainings
            data = trainings.whole_images(about["name"], trainings.allow_altered or bool(about["altered"]))
            self.experiment.volumes.measure(run, plain_images(run, data.subset(about["train"], about["test"])))
            self.experiment.write_tables()

    def compute_piece(self, name: str) -> Answer:
        """They are not measured in pieces."""
        raise ValueError(f"{self.folder}: given networks are not measured in pieces, got {name!r}")

    def runs(self) -> list[Run]:
        """Those that are measured."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} is not a folder of runs")
        return [run for _, run in runs_of_one_architecture(self.folder)]


class VolumeFigure(Experiment):
    """Log Z of networks against their local energy and their test error."""

    def __init__(self, item: Item, folder: Path, options: VolumeOptions, quick: bool = False) -> None:
        super().__init__(item, folder, options, quick)
        self.cells = Cells(options, CHOICE, self.folder, quick)
        self.trainings: Trainings = self.cells.trainings
        self.volumes = Volumes(
            self.folder,
            options.sigma,
            options.subset or (60 if quick else 1000),
            options.chains or 2,
            options.samples or (8 if quick else 18),
            passes=4 if quick else 40,
            seed=options.seed,
            device=self.trainings.device,
        )
        self.numbers = {**self.cells.numbers(), "subset": self.volumes.subset}
        self.given = None if options.models is None else _GivenRuns(self, Path(options.models))
        plan = Plan(
            self.trainings, self.cells.all, self.write_tables, self.measure, self._measured, words=self._after_training
        )
        self.work = self.given or plan

    def measure(self, cell: Cell, run: Run) -> None:
        """Both measures of a run, where they are not there yet."""
        self.volumes.measure(run, plain_images(run, self.trainings.images(cell.preset)))

    def _measured(self, cell: Cell, run: Run) -> bool:
        return self.volumes.measured(run.path.name)

    def _after_training(self) -> str:
        return f"Then {self.words()}"

    def words(self) -> str:
        """What the measurement of a network takes."""
        return (
            f"the free entropy of each on {self.volumes.subset} images, {self.volumes.chains} chains a side: for a "
            "SmallConvNet and 1,000 images ten minutes to an hour of a core, more for a sharper network."
        )

    # ---- tables

    def _runs(self) -> Iterator[tuple[str, int, Run]]:
        """Algorithm, seed and run of what was trained to its end."""
        if self.given is None:
            for cell, run in self.cells.finished():
                yield cell.preset.algorithm, cell.seed, run
        else:
            for run in self.given.runs():
                yield run.part("experiment")["algorithm"], run.part("options")["seed"], run

    def write_tables(self) -> None:
        """What has been measured so far."""
        about = self.provenance(**self.cells.provenance(), volumes=dataclasses.asdict(self.volumes) | {"folder": ""})
        units = "errors are fractions; loss_energy is a mean loss; log_z in nats; low and high: its 95 % interval"
        networks, lambdas = Table(NETWORKS, provenance={**about, "units": units}), Table(LAMBDA, provenance=about)
        for algorithm, seed, run in self._runs():
            name = run.path.name
            found, profile = read_volume(self.volumes.entropy_file(name)), read_profile(self.volumes.energy_file(name))
            if found is not None and found.points and profile is not None:
                result = run.result()
                assert result is not None
                key = {"network": name, "algorithm": algorithm}
                errors = {kind: result[kind] for kind in ("train_error", "test_error")}
                networks.add(**key, seed=seed, **errors, **_numbers(found, profile))
                llc = found.llc[0]
                for beta, value, error in zip(llc.betas, llc.value, llc.stderr, strict=True):
                    lambdas.add(**key, beta=beta, llc=value, stderr=error)
        networks.save(self.folder / "networks.csv")
        lambdas.save(self.folder / "lambda.csv")

    # ---- drawing

    def charts(self) -> list[Chart]:
        """Log Z against test error and against local energy, and lambda over beta."""
        networks, lambdas = self.table("networks") or Table(NETWORKS), self.table("lambda") or Table(LAMBDA)
        if not len(networks):
            return []
        sigma = networks["sigma"][0]
        about = (
            f"One point a network; σ = {sigma:g} relative to each weight, {networks['examples'][0]:.0f} training "
            "images. Bars: standard errors. A larger log Z is a larger volume of good weights."
        )
        charts = []
        for column, error, words in OTHERS[:2]:
            series = [_cloud(label, part, column, error) for label, part in _groups(networks)]
            title = f"Free entropy against {words}"
            name = f"volume-{words.replace(' ', '-')}"
            charts.append(Chart(name, title, f"{words} (%)", "log Z", series, kind="points", caption=about))
        curves = [
            Series(f"{NAMES.get(row['algorithm'], row['algorithm'])}, seed {row['seed']}", *_curve(lambdas, row))
            for row in networks
        ]
        caption = "Minus the area under a curve is log Z, but for the part before its first point."
        axes = ("β", "λ(β) = β⟨V⟩")
        charts.append(Chart("volume-lambda", "Where log Z comes from", *axes, curves, caption=caption, x_scale="log"))
        return charts

    def comparison(self) -> Comparison:
        """Every network, and how far the measures agree on their order."""
        networks = self.table("networks") or Table(NETWORKS)
        order = sorted(networks, key=lambda row: -row["log_z"])
        columns = [
            "network",
            "log Z",
            "95 % interval",
            "δE (%)",
            "⟨V⟩₀/n",
            "λ(1)",
            "loss",
            "test error (%)",
            "converged",
        ]
        return Comparison(
            columns,
            [_line(row) for row in order],
            [
                "Sorted by log Z, the largest volume first. δE and ⟨V⟩₀/n: local energy of the error and of the loss, "
                "on the same images with the same σ. Loss: mean over them at the weights; of two networks the one with "
                "the higher loss has more room to fall.",
                "A test error of 10,000 images is itself uncertain by about 0.4 points.",
                *self.cells.deviations(),
            ],
            title="Measured (the paper has no such numbers)",
            more=[agreement(networks)] if len(networks) > 1 else [],
            keys=["network", "log_z", "interval", "delta_e", "loss_energy", "llc", "loss", "test_error", "converged"],
        )


def agreement(networks: Table) -> Comparison:
    """Of the pairs of networks whose log Z differ by more than two errors, those that another measure orders alike.

    The larger log Z should go with the smaller error and the smaller local energy. Networks that did not converge are
    left out; so are pairs that the other measure does not tell apart by two of its own errors.

    Example:
        >>> table = Table(["log_z", "stderr", "test_error", "delta_e", "delta_e_stderr", "loss_energy",
        ...                "loss_energy_stderr", "converged"])
        >>> table.rows = [[-3.0, 0.5, 0.1, 0.2, 0.01, 0.1, 0.01, True], [-9.0, 0.5, 0.2, 0.1, 0.01, 0.3, 0.01, True]]
        >>> [row[:3] for row in agreement(table).rows]
        [['test error', 1, '1/1'], ['local energy of the error', 1, '0/1'], ['local energy of the loss', 1, '1/1']]
    """
    rows = [row for row in networks if row["converged"]]
    lines: list[list[object]] = []
    for column, error, words in OTHERS:
        alike = []
        for one, two in itertools.combinations(rows, 2):
            ours, theirs = one["log_z"] - two["log_z"], one[column] - two[column]
            limit = 0.0 if error is None else 2 * math.hypot(one[error], two[error])
            if abs(ours) > 2 * math.hypot(one["stderr"], two["stderr"]) and abs(theirs) > limit:
                alike.append((ours > 0) == (theirs < 0))
        rank = spearman([row["log_z"] for row in rows], [-row[column] for row in rows]) if len(rows) > 2 else None
        shown = Shown("-", value=None) if rank is None else Shown(f"{rank.r:.2f}", value=rank.r, n=rank.n)
        lines.append([words, len(alike), Shown(f"{sum(alike)}/{len(alike)}", value=sum(alike)), shown])
    return Comparison(
        ["against", "pairs told apart", "in the same order", "Spearman"],
        lines,
        title="Does the order by log Z agree with others?",
        keys=["against", "pairs", "alike", "spearman"],
    )


def _numbers(found: FreeEntropy, profile: LocalEnergy) -> dict[str, Any]:
    """The columns of a network that come from its two measurements."""
    point, (energy, energy_error) = found.points[0], found.local_energy
    low, high = point.interval(0.95)
    same = ("sigma", "log_z", "stderr", "dof", "lower", "upper", "gap", "gradients")
    return {
        **{name: getattr(point, name) for name in same},
        "low": low,
        "high": high,
        "examples": found.conventions["examples"],
        "loss": found.conventions["at_w"],
        "llc": point.llc[-1],
        "llc_stderr": point.llc_stderr[-1],
        "converged": point.converged,
        "flags": " ".join(point.flags) or None,
        "loss_energy": energy[0],
        "loss_energy_stderr": energy_error[0],
        "delta_e": profile.mean[-1],
        "delta_e_stderr": profile.stderr[-1],
        "minutes": point.seconds / 60,
    }


def _groups(networks: Table) -> list[tuple[str, Table]]:
    """The converged networks of each algorithm, then the others."""
    good = networks.where(converged=True)
    groups = [(NAMES.get(name, name), good.where(algorithm=name)) for name in good.unique("algorithm")]
    rest = networks.where(converged=False)
    return [*groups, ("not converged: no value", rest)] if len(rest) else groups


def _cloud(label: str, part: Table, column: str, error: str | None) -> Series:
    spread = None if error is None else list(100 * part[error])
    return Series(label, list(100 * part[column]), list(part["log_z"]), error=list(part["stderr"]), x_error=spread)


def _curve(lambdas: Table, row: dict[str, Any]) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    part = lambdas.where(network=row["network"])
    return list(part["beta"]), list(part["llc"]), list(part["stderr"])


def _line(row: dict[str, Any]) -> list[object]:
    """One network of the comparison."""
    with_error = lambda value, error, style: Shown(  # noqa: E731
        f"{value:{style}} ± {error:{style}}", value=value, stderr=error
    )
    return [
        row["network"],
        with_error(row["log_z"], row["stderr"], ".2f"),
        Shown(f"{row['low']:.2f} to {row['high']:.2f}", low=row["low"], high=row["high"]),
        with_error(100 * row["delta_e"], 100 * row["delta_e_stderr"], ".2f"),
        with_error(row["loss_energy"], row["loss_energy_stderr"], ".3g"),
        with_error(row["llc"], row["llc_stderr"], ".3g"),
        number(row["loss"], ".3g"),
        percent(torch.tensor([row["test_error"]]).numpy()),
        "yes" if row["converged"] else f"no: {row['flags']}",
    ]


ITEM = Item(
    name="volume",
    title="Free entropy against local energy and test error",
    claim=(
        "The paper says that to compute the local entropy of a deep network is an open problem, and measures the local "
        "energy in its place. Here log Z, the logarithm of the volume of good weights around a network, is computed by "
        "thermodynamic integration with a stated error, and held against the local energy and the test error of the "
        "same networks."
    ),
    quick_means=(
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with SmallConvNet, measured on "
        "{subset} of them"
    ),
    options=VolumeOptions,
    make=VolumeFigure,
)
