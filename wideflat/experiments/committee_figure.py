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

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from tyro.conf import arg

from wideflat.committee import Setting, Solutions, train
from wideflat.data import dress_coat
from wideflat.data.patterns import Patterns
from wideflat.energy.committees import committee_local_energy
from wideflat.entropy import METHODS, LocalEntropy
from wideflat.entropy.measure import DELTAS, local_entropy
from wideflat.experiments import committee_charts
from wideflat.experiments.committee_charts import AT_DISTANCE, AT_SIGMA
from wideflat.experiments.experiment import Comparison, Experiment, Item
from wideflat.experiments.options import MaybeFloats, MaybeInt, Method, Options
from wideflat.experiments.sweep import FolderInUse
from wideflat.experiments.table import Table
from wideflat.experiments.workers import Answer, Workers, report_lost
from wideflat.files import hold
from wideflat.report.chart import Chart

__all__ = ["Case", "CommitteeFigure", "CommitteeOptions", "CommitteeWork", "Group"]

#: Noise strengths of the local energy.
SIGMAS = tuple(np.linspace(0, 1, 21).round(3).tolist())


@dataclasses.dataclass
class CommitteeOptions(Options):
    """Options of the items about the committee machine."""

    restarts: MaybeInt = None
    """Restarts of each setting on each draw, divided over the training subsets; 50 when left out (quick: 6)."""
    subsets: MaybeInt = None
    """How many training subsets are drawn; 3 when left out (quick: 2)."""
    draws: tuple[Literal["balanced", "random"], ...] = ("balanced",)
    """How each of them is drawn."""
    size: int = 500
    """Training patterns of a subset."""
    methods: Annotated[
        tuple[Method, ...] | None, arg(metavar=f"{{{','.join(METHODS)}}} ...", help_behavior_hint="")
    ] = None
    """How the local entropy is computed; bp and ep when left out (quick: bp)."""
    deltas: MaybeFloats = None
    """Variances of the Gaussian at the points of the local-entropy curves; 13 from 0.01 to 3 when left out."""
    sigmas: MaybeFloats = None
    """Noise strengths of the local energy; 0, 0.05, ..., 1 when left out."""


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class Group:
    """Solutions that share their training patterns: a case on a training subset."""

    case: Case
    draw: str
    subset: int

    @property
    def name(self) -> str:
        """Of the piece of work that it is."""
        return f"{self.draw}-{self.subset}-{self.case.label}"

    @property
    def key(self) -> dict[str, object]:
        """What the tables say of it."""
        return {"draw": self.draw, "subset": self.subset, "setting": self.case.label}


_Measured = tuple[Group, Solutions, dict[str, LocalEntropy | None]]


class CommitteeWork:
    """Trains and measures committee machines: the work of Figures 1 and 6.

    A training of many restarts is spread over the cores by itself, so on one machine everything is computed in this
    process, unless a number of workers is asked for. On a cluster each setting on each subset is a job.

    Args:
        folder: Where everything goes.
        options: What was chosen.
        quick: Whether the rest is that of the reduced form.
        provenance: Says where the numbers of a table come from.
    """

    def __init__(
        self, folder: Path, options: CommitteeOptions, quick: bool, provenance: Callable[..., dict[str, Any]]
    ) -> None:
        self.folder, self.seed, self.size, self.provenance = folder, options.seed, options.size, provenance
        self.cases: list[Case] = []
        self.subsets = options.subsets or (2 if quick else 3)
        self.draws = tuple(options.draws)
        self.methods: tuple[str, ...] = tuple(options.methods or (("bp",) if quick else ("bp", "ep")))
        self.deltas = tuple(options.deltas or DELTAS)
        self.sigmas = tuple(options.sigmas or SIGMAS)

    def cost(self) -> str:
        """In words."""
        count = sum(case.restarts for case in self.cases) * self.subsets * len(self.draws)
        return f"{count} trainings of a committee machine and their local entropy"

    def groups(self) -> Iterator[Group]:
        """All cases on all training subsets, one case after the other: the last may take much longer than the rest."""
        for case in self.cases:
            for draw in self.draws:
                for subset in range(self.subsets):
                    yield Group(case, draw, subset)

    def compute(self, experiment: Experiment, workers: Workers | None = None) -> None:
        """Train and measure each group, write the tables after each: what is there can always be drawn."""
        self.folder.mkdir(parents=True, exist_ok=True)
        answers: dict[str, Answer] = {}
        with open(self.folder / "lock", "w") as lock:
            if not hold(lock):
                raise FolderInUse(f"another process is computing {self.folder}: wait for it, or give another --out")
            if workers is not None and (workers.engine != "local" or workers.count is not None):
                missing = [group.name for group in self.groups() if self.measured(group) is None]
                answers = workers.compute(experiment, missing, self._write_what_is_there)
            lost = {name for name, answer in answers.items() if answer.state == "failed"}
            done: list[_Measured] = []
            for group in self.groups():
                if group.name not in lost:
                    done.append(self._do(group))
                    self._write_tables(done)
        report_lost(experiment.name, answers)

    def compute_piece(self, name: str) -> Answer:
        """Train and measure the group of this name."""
        for group in self.groups():
            if group.name == name:
                self._do(group)
                return Answer("done")
        raise ValueError(f"there is no setting {name!r}; there are {', '.join(group.name for group in self.groups())}")

    def measured(self, group: Group) -> _Measured | None:
        """A group that is trained and measured; None if anything of it is missing."""
        solutions = self._trained(group)
        if solutions is None or _missing(group, solutions):
            return None
        curves = {method: self._curves(group, solutions, method) for method in self.methods}
        if any(solutions.solved) and any(curve is None for curve in curves.values()):
            return None
        return group, solutions, curves

    def _do(self, group: Group) -> _Measured:
        solutions = self._train(group)
        return group, solutions, {method: self._entropy(group, solutions, method) for method in self.methods}

    # ---- solutions and curves, in files

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

    # ---- tables

    def _write_what_is_there(self) -> None:
        self._write_tables([measured for group in self.groups() if (measured := self.measured(group)) is not None])

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
            phis = self._add_entropies(entropy, group, solutions, curves)
            energies = self._add_energies(energy, group, solutions)
            overlap = _unit_overlap(solutions.weights)
            for r, seed in enumerate(solutions.seeds):
                restarts.add(
                    **group.key,
                    seed=seed,
                    **phis[r],
                    epochs=solutions.epochs[r],
                    stop=solutions.stop[r],
                    reached=solutions.reached[r],
                    errors_before=solutions.errors_before[r],
                    train_errors=solutions.train_errors[r],
                    polish_movement=solutions.polish_movement[r],
                    test_error=solutions.test_error[r],
                    balanced_test_error=solutions.balanced_test_error[r],
                    unit_overlap=overlap[r],
                    energy=energies[r],
                )
        for name, table in (("entropy", entropy), ("energy", energy), ("restarts", restarts)):
            table.save(self.folder / f"{name}.csv")

    def _add_entropies(
        self, table: Table, group: Group, solutions: Solutions, curves: dict[str, LocalEntropy | None]
    ) -> list[dict[str, object]]:
        """The points of the curves of all solutions without errors; returns Phi at one distance, by solution."""
        phis: list[dict[str, object]] = [{} for _ in solutions.seeds]
        solved = [r for r in range(len(solutions)) if solutions.solved[r]]  # the curves are of these, in their order
        for position, r in enumerate(solved):
            for method, curve in curves.items():
                if curve is None:
                    continue
                for t, delta in enumerate(self.deltas):
                    table.add(
                        **group.key,
                        seed=solutions.seeds[r],
                        method=method,
                        delta=delta,
                        distance=curve.relative_distance[position, t],
                        phi=curve.phi[position, t],
                        log_z=curve.log_z[position, t],
                        converged=curve.converged[position, t],
                    )
                phis[r][f"phi_{method}"] = curve.at(AT_DISTANCE)[position]
        return phis

    def _add_energies(self, table: Table, group: Group, solutions: Solutions) -> list[float]:
        """The points of the profiles; returns dE at one strength of the noise, by solution."""
        sigmas = [*self.sigmas, AT_SIGMA]
        profiles = committee_local_energy(solutions.weights, solutions.inputs, solutions.targets, sigmas)
        for seed, profile in zip(solutions.seeds, profiles, strict=True):
            for sigma, value in zip(self.sigmas, profile[:-1], strict=True):
                table.add(**group.key, seed=seed, sigma=sigma, energy=value)
        return [float(profile[-1]) for profile in profiles]


def _missing(group: Group, there: Solutions | None) -> list[int]:
    """Seeds of the restarts that are not among the solutions."""
    have = set() if there is None else set(there.seeds)
    return [seed for seed in range(group.case.restarts) if seed not in have]


def _unit_overlap(weights: torch.Tensor) -> np.ndarray:
    """Mean cosine between different hidden units of each solution."""
    gram = weights.double() @ weights.double().mT
    hidden = weights.shape[1]
    off = gram.sum((1, 2)) - gram.diagonal(dim1=1, dim2=2).sum(1)
    return (off / max(hidden * (hidden - 1), 1)).numpy()


class CommitteeFigure(Experiment):
    """Figures 1 and 6.

    Args:
        item: Which.
        folder: Where everything goes.
        options: What was chosen.
        quick: The reduced form.
        cases: Makes the curves of the figure of (options, quick, number of training subsets).
        references: Labels of the cases that the others are compared with.
    """

    def __init__(
        self,
        item: Item,
        folder: Path,
        options: CommitteeOptions,
        quick: bool = False,
        *,
        cases: Callable[[Any, bool, int], list[Case]],
        references: tuple[str, ...] = (),
    ) -> None:
        super().__init__(item, folder, options, quick)
        self.references = references
        self.work: CommitteeWork = CommitteeWork(self.folder, options, quick, self.provenance)
        self.work.cases = cases(options, quick, self.work.subsets)

    @property
    def cases(self) -> list[Case]:
        """The curves of the figure."""
        return self.work.cases

    def charts(self) -> list[Chart]:
        """For each draw: local entropy by each method, local energy, test error, balanced test error."""
        restarts, entropy, energy = (self.table(name) for name in ("restarts", "entropy", "energy"))
        if restarts is None or entropy is None or energy is None:
            return []
        return committee_charts.charts(restarts, entropy, energy)

    def comparison(self) -> Comparison:
        """Settings by flatness and test error, their order under each measure, rank correlations of the measures."""
        return committee_charts.comparison(self.table("restarts"), self.work.methods, self.references)

    def finding(self) -> str:
        """Who is flatter than the first reference, who makes fewer errors on the test images."""
        settings = [case.label for case in self.cases]
        reference = next((name for name in self.references if name in settings), settings[0])
        return committee_charts.in_one_sentence(self.table("restarts"), reference)
