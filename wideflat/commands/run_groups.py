"""Runs for a report: those that differ by their seed are one group, drawn as one curve with a band."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wideflat.data.catalogue import FACTS
from wideflat.experiments.finding import Contrast, listed, said
from wideflat.experiments.statistics import Shown, mean_and_spread
from wideflat.presets import preset
from wideflat.report.chart import Chart, Series
from wideflat.training.runs import Run

__all__ = ["RunGroup", "curves", "grouped", "is_committee", "sentence", "table"]

#: What is drawn along a training: name, title, axis, factor, scale, kind.
_CURVES = (
    ("test_error", "Test error", "test error (%)", 100, "linear", "line"),
    ("train_error", "Training error", "training error (%)", 100, "linear", "line"),
    ("train_loss", "Training loss", "loss", 1, "log", "line"),
    ("distance", "Distance of the replicas from their barycenter", "half the squared distance", 1, "log", "line"),
    ("gamma", "Strength of the coupling", "γ", 1, "log", "line"),
    ("lr", "Learning rate", "η", 1, "log", "step"),
)


@dataclass
class RunGroup:
    """Runs of one configuration with different seeds.

    Args:
        label: Of its curves: the algorithm, and the preset or the folder where that is needed to tell groups apart.
        runs: By the folder they were found in.
    """

    label: str
    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def about(self) -> dict[str, Any]:
        """What was trained."""
        return next(iter(self.runs.values())).config.get("experiment", {})

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the first of them."""
        return next(iter(self.runs.values())).config

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The results of the runs that are finished."""
        return [result for run in self.runs.values() if (result := run.result()) is not None]

    def errors(self, name: str) -> np.ndarray:
        """Errors at the end in percent, of the runs that are finished."""
        return np.array([100 * end[name] for end in self.ends if end.get(name) is not None], dtype=float)

    @property
    def passes(self) -> float | None:
        """Over the data, of all replicas; None where the runs do not say."""
        last = [rows[-1].get("passes") for run in self.runs.values() if (rows := run.metrics())]
        known = [each for each in last if isinstance(each, (int, float))]
        return max(known) if known else None

    def fair(self) -> bool:
        """Whether the paper's number may stand beside it: same data, as many epochs, and finished."""
        about, data = self.about, self.config.get("data", {})
        facts = FACTS.get(str(about.get("dataset")))
        try:
            cell = preset(str(about.get("name")), str(about.get("algorithm")))
        except (KeyError, ValueError):
            return False
        whole = facts is not None and data.get("name") == about.get("dataset") and data.get("train") == facts.train
        limited = self.config.get("options", {}).get("limit_data") is not None
        return bool(self.ends) and whole and not limited and about.get("epochs") == cell.epochs


def is_committee(run: Run) -> bool:
    """Whether a run is of committee machines: its result is a file of solutions, not a table of epochs."""
    return "hidden" in run.config.get("experiment", {})


def grouped(runs: Mapping[str, Run]) -> list[RunGroup]:
    """Runs by their configuration without the seed, in the order in which they were found."""
    found: dict[str, RunGroup] = {}
    for label, run in runs.items():
        config = copy.deepcopy({name: run.config.get(name) for name in ("experiment", "options", "data")})
        for name in ("seed", "evaluate_every"):
            (config["options"] or {}).pop(name, None)
        found.setdefault(json.dumps(config, sort_keys=True, default=str), RunGroup("")).runs[label] = run
    groups = list(found.values())
    _name(groups)
    return groups


def _name(groups: Sequence[RunGroup]) -> None:
    """The shortest labels that tell the groups apart."""
    ways = (
        lambda group: str(group.about.get("algorithm", "run")),
        lambda group: f"{group.about.get('algorithm', 'run')}, {group.about.get('name', '')}",
        lambda group: f"{group.about.get('algorithm', 'run')}, {next(iter(group.runs))}",
    )
    for way in ways:
        labels = [way(group) for group in groups]
        if len(set(labels)) == len(labels) or way is ways[-1]:
            for group, label in zip(groups, labels, strict=True):
                group.label = label
            return


def table(groups: Sequence[RunGroup]) -> tuple[list[str], list[list[object]]]:
    """Columns and rows: every group, its errors, its difference from SGD and, where that is fair, from the paper."""
    paper = any(group.fair() and group.about.get("paper_error") is not None for group in groups)
    columns = ["setting", "preset", "n", "epochs", "passes", "training error %", "test error %"]
    columns += ["test error against SGD, points"]
    columns += ["paper %", "against the paper, points"] if paper else []
    rows = []
    for group in groups:
        errors = group.errors("test_error")
        row: list[object] = [
            group.label,
            group.about.get("name", "–"),
            len(group.runs)
            if len(group.ends) == len(group.runs)
            else f"{len(group.ends)} of {len(group.runs)} finished",
            group.about.get("epochs", "–"),
            "–" if group.passes is None else f"{group.passes:g}",
            mean_and_spread(group.errors("train_error")),
            mean_and_spread(errors),
            _shown(_against_sgd(group, groups)),
        ]
        if paper:
            row += _against_paper(group, errors)
        rows.append(row)
    return columns, rows


def sentence(groups: Sequence[RunGroup]) -> str:
    """Who makes fewer test errors than SGD, of the same preset and data; and how long each was trained."""
    clauses = []
    for reference in groups:
        if reference.about.get("algorithm") == "sgd":
            others = [group for group in groups if group is not reference and _alike(group, reference)]
            rivals = {
                group.label: Contrast.of(group.errors("test_error"), reference.errors("test_error")) for group in others
            }
            told = _told(rivals)
            clauses.append(f"on {_where(reference)} {told}{_lengths(reference, others)}" if told else "")
    return said(*clauses)


def _where(group: RunGroup) -> str:
    """The preset; of a network or data of one's own, these."""
    model, data = str(group.about.get("model", "")), str((group.config.get("data") or {}).get("name", ""))
    own = [model] * (":" in model) + [data.partition(":")[2]] * data.startswith(("npz:", "folder:"))
    return " and ".join(own) or str(group.about.get("name", ""))


def _told(rivals: Mapping[str, Contrast | None]) -> str:
    """Who makes fewer errors than SGD, who more, of whom it cannot be told."""
    known = {name: contrast for name, contrast in rivals.items() if contrast is not None}
    words, than = [], " than SGD"
    for sign, way in ((-1, "fewer"), (1, "more")):
        mine = [f"{name} ({contrast.brief(' points')})" for name, contrast in known.items() if contrast.told == sign]
        if mine:
            words.append(f"{listed(mine)} make{'s' * (len(mine) == 1)} {way} test errors{than}")
            than = ""
    even = [name for name, contrast in known.items() if contrast.told == 0]
    if even:
        words.append(f"no difference in test error shows between {listed([*even, 'SGD'])}")
    few = [name for name, contrast in known.items() if contrast.told is None]
    if few:
        words.append(f"there are too few trainings to say about {listed(few)} against SGD")
    return ", ".join(words)


def _lengths(reference: RunGroup, others: Sequence[RunGroup]) -> str:
    """How many passes over the data each had, where they had not the same number: a comparison should say so."""
    passes = {group.label: group.passes for group in (reference, *others)}
    if None in passes.values() or len(set(passes.values())) == 1:
        return ""
    return f", after {listed([f'{count:g} ({label})' for label, count in passes.items()])} passes over the data"


def _alike(group: RunGroup, other: RunGroup) -> bool:
    """Whether two groups trained the same network on the same data."""
    same = all(group.about.get(name) == other.about.get(name) for name in ("name", "dataset", "model", "batch_size"))
    limits = [each.config.get("options", {}).get("limit_data") for each in (group, other)]
    return same and limits[0] == limits[1] and group.config.get("data") == other.config.get("data")


def _against_sgd(group: RunGroup, groups: Sequence[RunGroup]) -> Contrast | None:
    if group.about.get("algorithm") == "sgd":
        return None
    for other in groups:
        if other.about.get("algorithm") == "sgd" and _alike(group, other):
            return Contrast.of(group.errors("test_error"), other.errors("test_error"))
    return None


def _against_paper(group: RunGroup, errors: np.ndarray) -> list[object]:
    """The paper's number and the difference from it; dashes where the comparison would not be fair."""
    error, spread = group.about.get("paper_error"), group.about.get("paper_spread")
    if error is None or not group.fair():
        return ["–", "–"]
    text = f"{error:g}" + (f" ± {spread:g}" if spread is not None else "")
    # The paper does not say of how many runs its spread is: the interval is that of ours.
    return [Shown(text, value=error, spread=spread), _shown(Contrast.of(errors, [error, error]))]


def _shown(contrast: Contrast | None) -> Shown:
    return Shown("–", value=None) if contrast is None else contrast.shown()


def curves(groups: Sequence[RunGroup]) -> list[Chart]:
    """Errors, loss, distance, gamma and rate against passes over the data: means over seeds with bands."""
    charts = []
    for key, title, label, factor, scale, kind in _CURVES:
        series = [curve for group in groups if (curve := _mean(group, key, factor)) is not None]
        if series:
            several = any(len(group.runs) > 1 for group in groups)
            charts.append(
                Chart(
                    f"runs-{key.replace('_', '-')}",
                    title,
                    "passes over the data",
                    label,
                    series,
                    kind="step" if kind == "step" else "line",
                    caption="Mean and standard deviation over n seeds." if several else "",
                    error_label="standard deviation over seeds",
                    y_scale=scale,
                )
            )
    return charts


def _mean(group: RunGroup, key: str, factor: float) -> Series | None:
    """One quantity along the trainings of a group; None where there is nothing to draw."""
    at: dict[float, list[float]] = {}
    for run in group.runs.values():
        for row in run.metrics():
            if isinstance(row.get(key), (int, float)) and math.isfinite(row[key]):
                at.setdefault(row.get("passes", row["epoch"]), []).append(factor * row[key])
    if not at or (factor == 1 and not any(value > 0 for values in at.values() for value in values)):
        return None
    passes = sorted(at)
    values = [np.array(at[each]) for each in passes]
    several = any(len(value) > 1 for value in values)
    spread = [value.std(ddof=1) if len(value) > 1 else math.nan for value in values] if several else None
    return Series(group.label, passes, [value.mean() for value in values], error=spread, n=[len(v) for v in values])
