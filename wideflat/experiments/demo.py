"""The demo: a deep network by SGD and by Entropy-SGD, how flat each ends; and a committee machine with its entropy.

::

    FOLDER/
      networks.csv, profiles.csv   of the deep network: one row a training, one row a point of a local-energy profile
      committee/                   Figure 1 of the paper in small
      report.html                  the page

Everything is computed from images that come with the package. What is in the tables is not computed again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.data import dress_coat
from wideflat.energy import local_energy
from wideflat.entropy_sgd import EntropySGD
from wideflat.environment import environment
from wideflat.experiments.committee_charts import AT_DISTANCE
from wideflat.experiments.committee_charts import AT_SIGMA as AT_COMMITTEE
from wideflat.experiments.experiment import Experiment
from wideflat.experiments.fig1 import ITEM
from wideflat.experiments.finding import Contrast, finding, listed, not_told_apart
from wideflat.experiments.statistics import mean_and_spread
from wideflat.experiments.table import Table
from wideflat.models import smallconvnet
from wideflat.progress import Progress
from wideflat.report.chart import Chart, Series
from wideflat.report.page import Page
from wideflat.volume.free_entropy import free_entropy

__all__ = ["ONE_LINE", "Demo", "sentence"]

#: The one line that differs, as it is run here and printed as advice.
ONE_LINE = {
    "SGD": "opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)",
    "Entropy-SGD": "opt = wideflat.EntropySGD(model.parameters(), lr=0.5, inner_lr=0.02)",
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, nesterov=True),
    "Entropy-SGD": lambda params: EntropySGD(params, lr=0.5, inner_lr=0.02),
}

#: So few, and so many mini-batches, that both optimizers learn all of them: flatness is compared at one training error.
IMAGES, BATCH = 300, 50
SIGMAS = (0.0, 0.2, 0.4, 0.6, 0.8)
#: Of the local energy: its error is then far below the spread of seeds.
PASSES = 24
#: Where networks are compared by one number.
AT_SIGMA, AT_VOLUME = 0.6, 0.5
#: Percent of training errors below which a network has learned its images.
LEARNED = 1.0
#: Training patterns of the committee machine.
PATTERNS = 500
#: The settings of the committee machine, as the demo calls them.
COMMITTEE = {"sgd-fast": "SGD", "rsgd-fast": "Replicated-SGD", "esgd": "Entropy-SGD"}
#: Images of the free entropy: its price grows with their number to the power 1.5.
VOLUME_IMAGES = 50

_NETWORKS = ["algorithm", "seed", "steps", "train_error", "test_error", "energy", "log_z", "log_z_stderr", "converged"]
_PROFILES = ["algorithm", "seed", "sigma", "energy", "stderr"]
PURPOSE = (
    "wideflat trains neural networks so that they end in wide flat minima, and measures how flat a minimum is. A "
    "minimum is flat if the network hardly gets worse when noise is put on its weights."
)
QUESTION = (
    "Do Entropy-SGD and Replicated-SGD end in wider, flatter minima than SGD, and do flatter minima make fewer errors "
    "on images that they have not seen?"
)


class Demo:
    """The demo in a folder.

    Args:
        folder: Where everything goes.
        seeds: Trainings of the deep network by each optimizer.
        restarts: Trainings of the committee machine in each setting.
        steps: Mini-batches of a training of the deep network.
        say: Is told, at each step, which it is of how many.
    """

    def __init__(
        self, folder: Path, seeds: int = 3, restarts: int = 3, steps: int = 400, say: Callable[[str], None] = print
    ) -> None:
        self.folder, self.seeds, self.steps, self.say = folder, seeds, steps, say
        # On the training subset of seed 0 some settings keep an image wrong, and have no local entropy; not on this.
        self.committee: Experiment = ITEM.open(
            folder / "committee", True, restarts=restarts, seed=1, subsets=1, settings=tuple(COMMITTEE), size=PATTERNS
        )

    # ---- computing

    def compute(self) -> None:
        """All steps; what is in the tables is left as it is."""
        work = list(self._missing())
        count = len(work) + 1
        for number, (algorithm, seed) in enumerate(work, 1):
            self.say(f"step {number} of {count}: a deep network by {algorithm}, training {seed + 1} of {self.seeds}")
            self._train_and_measure(algorithm, seed)
        self.say(f"step {count} of {count}: a committee machine by three optimizers, its local entropy")
        self.committee.compute()

    def _missing(self) -> Iterator[tuple[str, int]]:
        there = {(row["algorithm"], row["seed"], row["steps"]) for row in self.networks}
        for seed in range(self.seeds):
            for algorithm in OPTIMIZERS:
                if (algorithm, seed, self.steps) not in there:
                    yield algorithm, seed

    def _train_and_measure(self, algorithm: str, seed: int) -> None:
        data = _images(seed)
        with Progress(f"{algorithm}, {self.steps} mini-batches", total=self.steps) as progress:
            model = train(algorithm, seed, self.steps, data, progress)
        x, y, test_x, test_y = data
        profile = local_energy(model, (x, y), SIGMAS, max_passes=PASSES, seed=seed, progress=False)
        volume = free_entropy(model, (x, y), [AT_VOLUME], subset=VOLUME_IMAGES, seed=seed, progress=False)
        errors = [(model(a).argmax(1) != b).float().mean().item() for a, b in ((x, y), (test_x, test_y))]
        networks, profiles = self.networks, self.profiles
        points = list(zip(profile.sigmas, profile.mean, profile.stderr, strict=True))
        networks.add(
            algorithm=algorithm,
            seed=seed,
            steps=self.steps,
            train_error=errors[0],
            test_error=errors[1],
            energy=next(float(mean) for sigma, mean, _ in points if sigma == AT_SIGMA),
            log_z=float(volume.log_z[0]),
            log_z_stderr=float(volume.stderr[0]),
            converged=bool(volume.converged[0]),
        )
        for sigma, mean, stderr in points:
            profiles.add(algorithm=algorithm, seed=seed, sigma=float(sigma), energy=float(mean), stderr=float(stderr))
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {key: value for key, value in environment().items() if key not in ("host", "pid")}
        for name, table in (("profiles", profiles), ("networks", networks)):
            table.provenance = {**about, "images": IMAGES, "free entropy of images": VOLUME_IMAGES, **ONE_LINE}
            table.save(self.folder / f"{name}.csv")

    @property
    def networks(self) -> Table:
        """The trainings of the deep network."""
        return self._table("networks", _NETWORKS)

    @property
    def profiles(self) -> Table:
        """Their local energies."""
        return self._table("profiles", _PROFILES)

    def _table(self, name: str, columns: list[str]) -> Table:
        path = self.folder / f"{name}.csv"
        return Table.load(path) if path.exists() else Table(columns)

    # ---- drawing

    def finding(self) -> tuple[str, str]:
        """What came out, in one sentence; and what its numbers are."""
        return sentence(self.networks, self.committee.table("restarts"))

    def rows(self) -> tuple[list[str], list[list[object]]]:
        """The deep network by optimizer: errors and flatness."""
        columns = ["optimizer", "n", "training error %", "test error %", f"δE, points at σ = {AT_SIGMA:g}"]
        columns.append(f"log Z at σ = {AT_VOLUME:g}")
        rows: list[list[object]] = []
        for name in self.networks.unique("algorithm"):
            part = self.networks.where(algorithm=name)
            errors = [mean_and_spread(100 * part[column]) for column in ("train_error", "test_error", "energy")]
            rows.append([name, len(part), *errors, mean_and_spread(part.where(converged=True)["log_z"])])
        return columns, rows

    @property
    def has_committee(self) -> bool:
        """Whether the last step has come to results."""
        return self.committee.table("restarts") is not None

    def committee_rows(self) -> tuple[list[str], list[list[object]]]:
        """The committee machine by algorithm, in the same words as the deep network."""
        restarts = self.committee.table("restarts")
        assert restarts is not None
        columns = ["optimizer", "n", "training error %", "test error %", f"δE, points at σ = {AT_COMMITTEE:g}"]
        columns.append(f"Φ · 10³ at d/D = {AT_DISTANCE:g}")
        rows: list[list[object]] = []
        for setting in restarts.unique("setting"):
            part = restarts.where(setting=setting)
            errors = (part["train_errors"] / PATTERNS, part["test_error"], part["energy"])
            shown = [mean_and_spread(100 * values) for values in errors]
            rows.append([COMMITTEE[setting], len(part), *shown, mean_and_spread(1e3 * part["phi_bp"])])
        return columns, rows

    def write_report(self) -> Path:
        """The page, of what is there."""
        text, about = self.finding()
        page = Page(
            "wideflat demo: dresses against coats of Fashion-MNIST, images that come with the package",
            about,
            finding=text,
        )
        page.section("What was asked")
        page.paragraph(PURPOSE)
        page.paragraph(QUESTION)
        page.section("A deep network, one line different")
        page.code("\n".join(f"{line}    # {name}" for name, line in ONE_LINE.items()))
        page.paragraph(
            f"SmallConvNet (427,072 weights) on {IMAGES} images of dresses and coats, {self.steps} mini-batches of "
            f"{BATCH}, so that both learn them; every seed has other images and other weights, the same for both."
        )
        page.table(*self.rows(), caption="Mean ± standard deviation over n trainings; log Z is the free entropy")
        page.charts(*self._charts())
        if self.has_committee:
            page.section("A committee machine, and the volume around its solutions")
            page.paragraph(
                f"Nine hidden units that vote, on {PATTERNS} images of the same kind: the network of the paper's "
                "Figure 1, small enough for the local entropy, which counts the solutions around a solution. "
                "The command wideflat reproduce fig1 computes the whole figure."
            )
            page.table(*self.committee_rows(), caption="Mean ± standard deviation over n trainings")
            page.charts(*self._committee_charts())
            for name in ("restarts", "entropy", "energy"):
                table = self.committee.table(name)
                page.details(f"Where {name}.csv comes from", table.provenance if table else {})
        path = self.folder / "report.html"
        page.write(path)
        return path

    def _committee_charts(self) -> list[Chart]:
        """Flatness by both measures and the test error, named as in the rest of the page."""
        charts = {chart.name: chart for chart in self.committee.charts()}
        chosen = [charts[name] for name in ("energy-balanced", "entropy-bp-balanced", "test-error-balanced")]
        for chart in chosen:
            chart.name = f"committee-{chart.name}"
            chart.title = f"{chart.title} of the committee machine"
            chart.series = [dataclasses.replace(series, label=COMMITTEE[series.label]) for series in chart.series]
        return chosen

    def _charts(self) -> list[Chart]:
        names, profiles = self.networks.unique("algorithm"), self.profiles
        energies = [_mean_profile(name, profiles.where(algorithm=name)) for name in names]
        good = self.networks.where(converged=True)
        volumes = [Series(name, [], good.where(algorithm=name)["log_z"]) for name in names]
        errors = [Series(name, [], 100 * self.networks.where(algorithm=name)["test_error"]) for name in names]
        return [
            Chart(
                "deep-energy",
                "Local energy of the deep network",
                "perturbation σ",
                "δE (points of training error)",
                energies,
                caption="Mean and standard deviation over trainings. Lower is flatter.",
                error_label="standard deviation over trainings",
            ),
            Chart(
                "deep-volume",
                f"Free entropy of the deep network at σ = {AT_VOLUME:g}",
                "",
                "log Z",
                volumes,
                kind="distribution",
                caption=f"Of {VOLUME_IMAGES} of the images; every training, and their mean and standard deviation. "
                "Higher: more room around the minimum. Values that did not converge are left out.",
            ),
            Chart(
                "deep-test-error",
                "Test error of the deep network",
                "",
                "test error (%)",
                errors,
                kind="distribution",
                caption="Every training, and their mean and standard deviation.",
            ),
        ]


def train(
    algorithm: str, seed: int, steps: int, data: tuple[Tensor, ...], progress: Progress | None = None
) -> nn.Module:
    """SmallConvNet by one of the two optimizers, at its center and in eval mode."""
    x, y = data[:2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = smallconvnet(2, 28, 1)
    opt = OPTIMIZERS[algorithm](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    draw, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(len(x), generator=draw)
        batch, order = order[:BATCH], order[BATCH:]
        opt.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        opt.step()
        schedule.step()
        if progress is not None:
            progress.advance(loss=loss.item())
    if isinstance(opt, EntropySGD):
        opt.flush()
    return model.eval().requires_grad_(False)


def sentence(networks: Table, restarts: Table | None = None, patterns: int = PATTERNS) -> tuple[str, str]:
    """Entropy-SGD against SGD: which is flatter, which has the lower test error; and of how many trainings, how far.

    Args:
        networks: Columns ``algorithm``, ``train_error``, ``energy`` and ``test_error``, in fractions.
        restarts: The last two of the committee machine, by ``setting``, and the number of its ``train_errors``.
        patterns: Of how many.
    """
    cases, trained = {}, {}
    if restarts is not None:
        cases["the committee machine"] = [restarts.where(setting=name) for name in ("esgd", "sgd-fast")]
        trained["the committee machine"] = [part["train_errors"] / patterns for part in cases["the committee machine"]]
    cases["the deep network"] = deep = [networks.where(algorithm=name) for name in ("Entropy-SGD", "SGD")]
    trained["the deep network"] = [part["train_error"] for part in deep]
    energy, error = (
        {where: Contrast.of(*(100 * part[column] for part in parts)) for where, parts in cases.items()}
        for column in ("energy", "test_error")
    )
    text = finding("Entropy-SGD", "SGD", energy, error)
    return text, f"{_of_how_many(cases, _at(trained))} {not_told_apart({'noise': energy, 'test error': error})}".strip()


def _of_how_many(cases: Mapping[str, Sequence[Table]], at: str) -> str:
    counts = sorted({len(part) for parts in cases.values() for part in parts})
    each = f"{listed(list(map(str, counts)))} training{'s' * (counts[-1] > 1)} each"
    return f"± is the 95 % interval; {each}{at}." if counts[-1] else ""


def _at(trained: Mapping[str, Sequence[np.ndarray]]) -> str:
    """The training errors at which the two are compared: apart where a network has not learned its images."""
    levels = {where: [100 * float(np.mean(part)) for part in parts if len(part)] for where, parts in trained.items()}
    pairs = {where: means for where, means in levels.items() if len(means) == 2}
    worst = max((max(means) for means in pairs.values()), default=0.0)
    if worst < LEARNED:
        return f"; training errors at most {math.ceil(10 * worst) / 10:.1f} %" if worst else "; no training errors"
    said = [f"{a:.1f} against {b:.1f} % in {where}" for where, (a, b) in pairs.items() if max(a, b) >= LEARNED]
    return f"; careful: the training errors are {listed(said)}"


def _images(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    patterns = dress_coat.load(IMAGES, seed=seed)
    x, test_x = (inputs.view(-1, 1, 28, 28) for inputs in (patterns.inputs, patterns.test_inputs))
    return x, (patterns.targets > 0).long(), test_x, (patterns.test_targets > 0).long()


def _mean_profile(label: str, points: Table) -> Series:
    sigmas = points.unique("sigma")
    values = [100 * points.where(sigma=sigma)["energy"] for sigma in sigmas]
    n = len(points.unique("seed"))
    spread = [value.std(ddof=1) for value in values] if n > 1 else None
    return Series(label, sigmas, [value.mean() for value in values], error=spread, n=n)
