"""Figures 1 and 6: local entropy, local energy and test error of committee machines trained in several settings.

Every solution is measured three times: the normalised local entropy Phi(w, d) around it, the local energy
dE(w, sigma), and its test error. The figure shows whether the three agree on which setting is best.

Tables:

* ``restarts.csv``: one row a solution: how its training ended, its errors, Phi at one distance, dE at one sigma.
* ``entropy.csv``: one row a point of a local-entropy curve, with the status of its computation; only of solutions
  without training errors.
* ``energy.csv``: one row a point of a local-energy profile (exact, no sampling: the votes are independent).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wideflat.committee import Setting, Solutions, train
from wideflat.data import dress_coat
from wideflat.data.patterns import Patterns
from wideflat.energy.measure import committee_local_energy
from wideflat.entropy import LocalEntropy
from wideflat.entropy.measure import DELTAS, local_entropy
from wideflat.experiments.correlation import spearman
from wideflat.experiments.experiment import Comparison
from wideflat.experiments.pieces import Answer, PieceExperiment, Workers
from wideflat.experiments.sweep import FolderInUse
from wideflat.experiments.table import Table
from wideflat.files import hold
from wideflat.report.chart import Chart, Series

__all__ = ["Case", "CommitteeFigure"]

#: Where solutions are compared by a single number: d/D for Phi, sigma for dE. sigma^2/2 is the d/D of the same noise.
AT_DISTANCE = 0.125
AT_SIGMA = 0.5

METHODS = {"bp": "belief propagation", "ep": "expectation propagation", "tap": "TAP", "sample": "sampling"}


@dataclass(frozen=True)
class Case:
    """One curve of the figure.

    Args:
        label: Its name in tables and legends.
        setting: How its solutions are trained.
        restarts: How many there are on each training subset.
    """

    label: str
    setting: Setting
    restarts: int


@dataclass(frozen=True)
class Group:
    """Solutions that share their training patterns: a case on a training subset."""

    case: Case
    draw: str
    subset: int

    @property
    def name(self) -> str:
        return f"{self.draw}-{self.subset}-{self.case.label}"

    @property
    def key(self) -> dict[str, object]:
        return {"draw": self.draw, "subset": self.subset, "setting": self.case.label}


_Measured = tuple[Group, Solutions, dict[str, LocalEntropy | None]]


class CommitteeFigure(PieceExperiment):
    """The experiment behind Figures 1 and 6.

    A training of many restarts is spread over the cores by itself, so on one machine everything is computed in this
    process, unless a number of workers is asked for. On a cluster each setting on each subset is a job.

    Args:
        folder: Where everything goes.
        quick: The reduced form.
        data: Not used: the patterns are embedded.
        seed: Added to the seeds of the training subsets.
        subsets: How many training subsets are drawn.
        draws: How each is drawn: ``"balanced"``, ``"random"`` or both.
        size: How many training patterns a subset has.
        deltas: Variances of the prior of the local entropy.
        sigmas: Noise strengths of the local energy.
        methods: How the local entropy is computed.
    """

    cases: list[Case]
    #: Labels of the cases that the others are compared with.
    references: tuple[str, ...] = ()

    def __init__(
        self,
        folder: Path,
        quick: bool = False,
        data: Path | None = None,
        seed: int = 0,
        subsets: int = 3,
        draws: Sequence[str] = ("balanced",),
        size: int = 500,
        deltas: Sequence[float] = DELTAS,
        sigmas: Sequence[float] = tuple(np.linspace(0, 1, 21).round(3).tolist()),
        methods: Sequence[str] = ("bp", "ep"),
    ) -> None:
        super().__init__(folder, quick, data, seed)
        self.subsets, self.draws, self.size = subsets, tuple(draws), size
        self.deltas, self.sigmas, self.methods = tuple(deltas), tuple(sigmas), tuple(methods)

    def cost(self) -> str:
        """In words."""
        count = sum(case.restarts for case in self.cases) * self.subsets * len(self.draws)
        return f"{count} trainings of a committee machine and their local entropy"

    # ---- compute

    def groups(self) -> Iterator[Group]:
        """All cases on all training subsets, one case after the other: the last may take much longer than the rest."""
        for case in self.cases:
            for draw in self.draws:
                for subset in range(self.subsets):
                    yield Group(case, draw, subset)

    def distribute(self, workers: Workers, options: Mapping[str, Any]) -> None:
        """Let other processes compute the pieces, where that is better."""
        if workers.engine != "local" or workers.count is not None:
            super().distribute(workers, options)

    def compute(self) -> None:
        """Train and measure each group, write the tables after each: what is there can always be drawn."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            if not hold(lock):
                raise FolderInUse(f"another process is computing {self.folder}: wait for it, or give another --out")
            lost: set[str] = set()
            if self.workers is not None:
                missing = [group.name for group in self.groups() if self._measured(group) is None]
                answers = self.ask_workers(missing, self._write_what_is_there)
                lost = {name for name, answer in answers.items() if answer.state == "failed"}
            done: list[_Measured] = []
            for group in self.groups():
                if group.name not in lost:
                    done.append(self._do(group))
                    self._write_tables(done)
        self.report_lost()

    def do_piece(self, name: str) -> Answer:
        """Train and measure the group of this name."""
        for group in self.groups():
            if group.name == name:
                self._do(group)
                return Answer("done")
        raise ValueError(f"{self.name} has no setting {name!r}")

    def _do(self, group: Group) -> _Measured:
        solutions = self._train(group)
        return group, solutions, {method: self._entropy(group, solutions, method) for method in self.methods}

    def _measured(self, group: Group) -> _Measured | None:
        """A group that is trained and measured; None if anything of it is missing."""
        solutions = self._trained(group)
        if solutions is None or _missing(group, solutions):
            return None
        curves = {method: self._curves(group, solutions, method) for method in self.methods}
        if any(solutions.solved) and any(curve is None for curve in curves.values()):
            return None
        return group, solutions, curves

    def _write_what_is_there(self) -> None:
        self._write_tables([measured for group in self.groups() if (measured := self._measured(group)) is not None])

    def _path(self, group: Group, ending: str) -> Path:
        return self.folder / "solutions" / f"{group.draw}-{group.subset}" / f"{group.case.label}{ending}"

    def _patterns(self, group: Group) -> Patterns:
        return dress_coat.load(self.size, group.draw, self.seed + group.subset)

    def _trained(self, group: Group) -> Solutions | None:
        """The solutions of a group that are there; an error if they are solutions of something else."""
        path = self._path(group, ".npz")
        if not path.exists():
            return None
        solutions = Solutions.load(path)
        wanted, found = group.case.setting.identity(), solutions.setting.identity()
        differs = [
            f"{name} = {found[name]} instead of {wanted[name]}" for name in wanted if found[name] != wanted[name]
        ]
        if not torch.equal(solutions.inputs, self._patterns(group).inputs):
            differs.append("other training patterns")
        if differs:
            raise ValueError(f"{path} was trained with {', '.join(differs)}; give another --out")
        return solutions

    def _train(self, group: Group) -> Solutions:
        there = self._trained(group)
        missing = _missing(group, there)
        if there is not None and not missing:
            return there
        path = self._path(group, ".npz")
        patterns = self._patterns(group)
        checkpoint = self._path(group, ".checkpoint")
        solutions = train(
            group.case.setting,
            patterns.inputs,
            patterns.targets,
            seeds=missing,
            test_inputs=patterns.test_inputs,
            test_targets=patterns.test_targets,
            checkpoint=checkpoint,
            source=patterns.source,
        )
        solutions.name = group.case.label
        if there is not None:
            solutions = there.joined(solutions)
        solutions.save(path)
        checkpoint.unlink(missing_ok=True)
        return solutions

    def _entropy(self, group: Group, solutions: Solutions, method: str) -> LocalEntropy | None:
        """Curves of the solutions without training errors, in their order; None if there is no such solution.

        Belief propagation counts configurations without errors. Around a reference that has some this is another
        quantity, so such references are left out.
        """
        if not any(solutions.solved):
            return None
        curves = self._curves(group, solutions, method)
        if curves is not None:
            return curves
        solved = solutions.subset([r for r in range(len(solutions)) if solutions.solved[r]])
        curves = local_entropy(
            solved.weights, solved.inputs, solved.targets, deltas=self.deltas, method=method, progress=True
        )
        curves.save(self._path(group, f"-{method}.npz"))
        return curves

    def _curves(self, group: Group, solutions: Solutions, method: str) -> LocalEntropy | None:
        """The curves of these solutions, if they are there."""
        path = self._path(group, f"-{method}.npz")
        if not path.exists():
            return None
        curves = LocalEntropy.load(path)
        fit = len(curves.phi) == sum(solutions.solved) and curves.deltas.tolist() == list(self.deltas)
        return curves if fit else None

    def _write_tables(self, done: Sequence[_Measured]) -> None:
        about = self.provenance(size=self.size, settings={g.case.label: g.case.setting.identity() for g, _, _ in done})
        restarts = Table(
            ["draw", "subset", "setting", "seed", "epochs", "stop", "reached", "errors_before", "train_errors"]
            + ["polish_movement", "test_error", "balanced_test_error", "unit_overlap", "energy"]
            + [f"phi_{method}" for method in self.methods],
            provenance={**about, "phi at d/D": AT_DISTANCE, "energy at sigma": AT_SIGMA},
        )
        entropy = Table(
            ["draw", "subset", "setting", "seed", "method", "delta", "distance", "phi", "log_z", "converged"],
            provenance=about,
        )
        energy = Table(["draw", "subset", "setting", "seed", "sigma", "energy"], provenance=about)
        for group, solutions, curves in done:
            profiles = committee_local_energy(
                solutions.weights, solutions.inputs, solutions.targets, [*self.sigmas, AT_SIGMA]
            )
            overlap = _unit_overlap(solutions.weights)
            for r, seed in enumerate(solutions.seeds):
                key = {**group.key, "seed": seed}
                for sigma, value in zip(self.sigmas, profiles[r], strict=False):
                    energy.add(**key, sigma=sigma, energy=value)
                phis = {}
                position = sum(solutions.solved[:r])
                for method, curve in curves.items():
                    if curve is None or not solutions.solved[r]:
                        continue
                    for t, delta in enumerate(self.deltas):
                        entropy.add(
                            **key,
                            method=method,
                            delta=delta,
                            distance=curve.relative_distance[position, t],
                            phi=curve.phi[position, t],
                            log_z=curve.log_z[position, t],
                            converged=curve.converged[position, t],
                        )
                    phis[f"phi_{method}"] = curve.at(AT_DISTANCE)[position]
                restarts.add(
                    **key,
                    **phis,
                    epochs=solutions.epochs[r],
                    stop=solutions.stop[r],
                    reached=solutions.reached[r],
                    errors_before=solutions.errors_before[r],
                    train_errors=solutions.train_errors[r],
                    polish_movement=solutions.polish_movement[r],
                    test_error=solutions.test_error[r],
                    balanced_test_error=solutions.balanced_test_error[r],
                    unit_overlap=overlap[r],
                    energy=profiles[r, -1],
                )
        for name, table in (("entropy", entropy), ("energy", energy), ("restarts", restarts)):
            table.save(self.folder / f"{name}.csv")

    # ---- draw

    def charts(self) -> list[Chart]:
        """For each draw: local entropy by each method, local energy, test error, balanced test error."""
        restarts, entropy, energy = (self.table(name) for name in ("restarts", "entropy", "energy"))
        if restarts is None or entropy is None or energy is None:
            return []
        charts = []
        for draw in restarts.unique("draw"):
            few = draw if len(restarts.unique("draw")) > 1 else ""
            ending = f", {draw} draw" if few else ""
            mine = restarts.where(draw=draw)
            settings = mine.unique("setting")
            for method in entropy.unique("method"):
                curves = entropy.where(draw=draw, method=method)
                charts.append(
                    Chart(
                        f"entropy-{method}-{draw}",
                        f"Local entropy by {METHODS[method]}{ending}",
                        "distance d/D",
                        "Φ(w, d)",
                        [_mean_curve(curves.where(setting=setting), setting) for setting in settings],
                        caption="Mean and standard deviation over solutions without training errors; points that did "
                        "not converge are left out. Higher is flatter.",
                    )
                )
            charts.append(
                Chart(
                    f"energy-{draw}",
                    f"Local energy{ending}",
                    "perturbation σ",
                    "δE, training error",
                    [_mean_profile(energy.where(draw=draw, setting=setting), setting) for setting in settings],
                    caption="Mean and standard deviation over restarts; the expectation over the noise is exact. "
                    "Lower is flatter.",
                )
            )
            for column, title in (("test_error", "Test error"), ("balanced_test_error", "Balanced test error")):
                series = [Series(name, [], 100 * mine.where(setting=name)[column]) for name in settings]
                charts.append(
                    Chart(
                        f"{column.replace('_', '-')}-{draw}",
                        f"{title}{ending}",
                        "",
                        f"{title.lower()} (%)",
                        series,
                        kind="distribution",
                        caption="Every restart, and their mean and standard deviation.",
                    )
                )
        return charts

    def comparison(self) -> Comparison:
        """Settings by flatness and test error, their order under each measure, rank correlations of the measures."""
        restarts = self.table("restarts")
        methods = self.methods if restarts is None else _methods(restarts)
        columns = ["draw", "setting", "n", "solved", "with polish", "test error %", "balanced %"]
        columns += [f"Φ·10³ at d/D {AT_DISTANCE:g} ({method})" for method in methods]
        columns += [f"δE % at σ {AT_SIGMA:g}", "epochs"]
        if restarts is None:
            return Comparison(columns, [], ["Nothing has been computed yet."])
        rows, differences, remarks = [], [], []
        for draw in restarts.unique("draw"):
            mine = restarts.where(draw=draw)
            for setting in mine.unique("setting"):
                part = mine.where(setting=setting)
                rows.append(
                    [
                        draw,
                        setting,
                        len(part),
                        _share(part["errors_before"] == 0),
                        _share(part["train_errors"] == 0),
                        _mean_and_spread(100 * part["test_error"]),
                        _mean_and_spread(100 * part["balanced_test_error"]),
                        *(_mean_and_spread(1e3 * part[f"phi_{method}"], digits=3) for method in methods),
                        _mean_and_spread(100 * part["energy"], digits=3),
                        f"{part['epochs'].mean():.0f}",
                    ]
                )
            differences += [[draw, *row] for row in self._differences(mine, methods)]
            remarks += self.findings(mine, draw)
        changes = Comparison(
            [
                *("draw", "against", "setting", "test error, points"),
                *(f"Φ·10³ ({method})" for method in methods),
                "δE, points",
            ],
            differences,
            title="Differences of the means within training subsets ± standard error",
        )
        return Comparison(columns, rows, remarks, more=[changes] if differences else [])

    def _differences(self, restarts: Table, methods: Sequence[str]) -> Iterator[list[str]]:
        """Rows of the settings against each reference."""
        measures = [("test_error", 100.0), *((f"phi_{method}", 1e3) for method in methods), ("energy", 100.0)]
        for reference in self.references:
            for name in restarts.unique("setting"):
                if name in self.references:
                    continue
                found = [_difference(restarts, name, reference, column, factor) for column, factor in measures]
                if any(found):
                    yield [reference, name, *(f"{x[0]:+.2f} ± {x[1]:.2f}" if x else "–" for x in found)]

    def findings(self, restarts: Table, draw: str) -> list[str]:
        """In words: the order of the settings under each measure, and how the measures correlate over all solutions."""
        methods = _methods(restarts)
        best_first = {
            "test error": ("test_error", 1),
            "balanced test error": ("balanced_test_error", 1),
            **{f"local entropy ({method})": (f"phi_{method}", -1) for method in methods},
            "local energy": ("energy", 1),
        }
        sentences = []
        for measure, (column, sign) in best_first.items():
            means = {
                name: np.nanmean(restarts.where(setting=name)[column]) if _any(restarts, name, column) else np.nan
                for name in restarts.unique("setting")
            }
            order = sorted((name for name in means if np.isfinite(means[name])), key=lambda name: sign * means[name])
            sentences.append(f"{draw.capitalize()} draw, best first by {measure}: {', '.join(order)}.")
        pairs = [
            *((f"phi_{method}", "energy", f"local entropy ({method}) and local energy") for method in methods),
            *((f"phi_{method}", "test_error", f"local entropy ({method}) and test error") for method in methods),
            ("energy", "test_error", "local energy and test error"),
        ]
        correlations = []
        for first, second, words in pairs:
            found = spearman(restarts[first], restarts[second])
            correlations.append(f"{words} {found.r:+.2f} (n = {found.n})")
        sentences.append(f"{draw.capitalize()} draw, rank correlation over all solutions: {'; '.join(correlations)}.")
        return sentences


def _methods(restarts: Table) -> list[str]:
    """How the local entropies in the table were computed."""
    return [name.removeprefix("phi_") for name in restarts.columns if name.startswith("phi_")]


def _difference(table: Table, setting: str, reference: str, column: str, factor: float) -> tuple[float, float] | None:
    """How much larger the values of a setting are than those of another, and the standard error of that.

    Means over the training subsets that have at least two values of both: subsets differ by more than settings do.
    None where there is no such subset.
    """
    differences, variances = [], []
    for subset in table.unique("subset"):
        both = [factor * table.where(setting=name, subset=subset)[column] for name in (setting, reference)]
        both = [values[np.isfinite(values)] for values in both]
        if all(len(values) > 1 for values in both):
            differences.append(both[0].mean() - both[1].mean())
            variances.append(sum(values.var(ddof=1) / len(values) for values in both))
    if not differences:
        return None
    return float(np.mean(differences)), float(np.sqrt(np.sum(variances)) / len(variances))


def _missing(group: Group, there: Solutions | None) -> list[int]:
    """Seeds of the restarts that are not among the solutions."""
    have = set() if there is None else set(there.seeds)
    return [seed for seed in range(group.case.restarts) if seed not in have]


def _any(table: Table, setting: str, column: str) -> bool:
    return bool(np.isfinite(table.where(setting=setting)[column]).any())


def _share(flags: np.ndarray) -> str:
    return f"{int(flags.sum())}/{len(flags)}"


def _mean_and_spread(values: np.ndarray, digits: int = 2) -> str:
    values = values[np.isfinite(values)]
    if not len(values):
        return "–"
    spread = f" ± {values.std(ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{spread}"


def _unit_overlap(weights: torch.Tensor) -> np.ndarray:
    """Mean cosine between different hidden units of each solution."""
    gram = weights.double() @ weights.double().mT
    hidden = weights.shape[1]
    off = gram.sum((1, 2)) - gram.diagonal(dim1=1, dim2=2).sum(1)
    return (off / max(hidden * (hidden - 1), 1)).numpy()


def _mean_curve(points: Table, label: str) -> Series:
    """Mean and spread of local-entropy curves over solutions, on a grid of distances that all of them reach."""
    points = points.where(converged=True)
    keys = dict.fromkeys(zip(points["subset"], points["seed"], strict=True))
    curves = [points.where(subset=subset, seed=seed) for subset, seed in keys]
    curves = [curve for curve in curves if len(curve) > 1]
    if not curves:
        return Series(label, [], [])
    low = max(curve["distance"].min() for curve in curves)
    high = min(curve["distance"].max() for curve in curves)
    if not low < high:
        return Series(label, [], [])
    grid = np.geomspace(low, high, 25)
    values = np.array([np.interp(np.log(grid), np.log(c["distance"]), c["phi"]) for c in curves])
    return Series(label, grid, values.mean(0), error=values.std(0, ddof=1) if len(values) > 1 else None)


def _mean_profile(points: Table, label: str) -> Series:
    sigmas = points.unique("sigma")
    values = [points.where(sigma=sigma)["energy"] for sigma in sigmas]
    spread = [value.std(ddof=1) if len(value) > 1 else 0.0 for value in values]
    return Series(label, sigmas, [value.mean() for value in values], error=spread)
