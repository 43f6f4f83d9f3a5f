"""What a report is made from: every run, experiment and measurement found under the given paths."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wideflat.committee import Solutions
from wideflat.energy.profile import LocalEnergy
from wideflat.entropy import FreeEntropy, LocalEntropy
from wideflat.experiments import ITEMS
from wideflat.experiments import item as find_item
from wideflat.experiments.experiment import Comparison, Experiment
from wideflat.experiments.statistics import Shown, number
from wideflat.experiments.table import Table
from wideflat.files import names_in_npz
from wideflat.report.chart import Chart, Series
from wideflat.report.page import Page
from wideflat.report.terminal import print_table
from wideflat.training.runs import Run

__all__ = ["Findings", "collect", "print_summary", "record", "summary", "write_report"]


#: What JSON calls the columns of the table of runs.
RUN_KEYS = (
    *("run", "preset", "algorithm", "seed", "epochs"),
    *("train_error_percent", "test_error_percent", "paper_percent"),
)


@dataclass
class Findings:
    """Everything found, by kind; ``unread`` names files that look like ours but could not be read, with the reason."""

    experiments: list[Experiment] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)
    energies: dict[str, LocalEnergy] = field(default_factory=dict)
    entropies: dict[str, LocalEntropy] = field(default_factory=dict)
    volumes: dict[str, FreeEntropy] = field(default_factory=dict)
    solutions: dict[str, Solutions] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        kinds = (self.experiments, self.runs, self.energies, self.entropies, self.volumes, self.solutions)
        return any(kinds)


def collect(paths: Sequence[Path]) -> Findings:
    """Look through files and folders, and all folders below them.

    The parts of an experiment (its runs, its solutions) belong to the experiment and are not listed again.
    """
    found = Findings()
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: give run directories, results or folders of them")
        _collect(path, path if path.is_dir() else path.parent, found)
    if not found:
        more = "".join(f"\n  {name}: {reason}" for name, reason in found.unread.items())
        raise ValueError(f"nothing to report in {', '.join(map(str, paths))}: no run, experiment or measurement{more}")
    return found


def _collect(path: Path, root: Path, found: Findings) -> None:
    label = str(path.relative_to(root)) if path != root else root.resolve().name
    if path.is_file():
        reader = {".json": _read_profile, ".npz": _read_arrays}.get(path.suffix)
        if reader is not None:
            _attempt(reader, path, label, found)
        return
    item = _item_of(path)
    if item is not None:
        found.experiments.append(item)
        return
    if (path / "config.json").exists():
        _attempt(_read_run, path, label, found)
    for inner in sorted(path.iterdir()):
        if not inner.name.startswith(".") and inner.name not in ("checkpoints", "snapshots", "tensorboard", "figures"):
            _collect(inner, root, found)


def _attempt(reader: Any, path: Path, label: str, found: Findings) -> None:
    try:
        reader(path, label, found)
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        found.unread[str(path)] = str(error)


def _read_run(path: Path, label: str, found: Findings) -> None:
    found.runs[label] = Run.open(path)


def _read_arrays(path: Path, label: str, found: Findings) -> None:
    names = set(names_in_npz(path))
    label = label.removesuffix(".npz")
    if {"deltas", "phi"} <= names:
        found.entropies[label] = LocalEntropy.load(path)
    elif {"weights", "metadata"} <= names:
        found.solutions[label] = Solutions.load(path)


def _read_profile(path: Path, label: str, found: Findings) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and {"sigmas", "mean"} <= content.keys():
        found.energies[label.removesuffix(".json")] = LocalEnergy.load(path)
    elif isinstance(content, dict) and content.get("kind") == FreeEntropy.KIND:
        found.volumes[label.removesuffix(".json")] = FreeEntropy.load(path)


def _item_of(folder: Path) -> Experiment | None:
    """The experiment whose tables lie in a folder, if any do."""
    for path in sorted(folder.glob("*.csv")):
        if not path.with_suffix(".json").exists():
            continue
        about = Table.load(path).provenance
        if about.get("item") in ITEMS:
            item, chosen = find_item(about["item"]), about.get("options", {})
            # where data and runs were is not known here: of folders the record has the names alone
            known = {field.name for field in dataclasses.fields(item.options)} - {"data", "runs"}
            options = {name: chosen[name] for name in known if name in chosen}
            return item.open(folder, quick=bool(about.get("label")), **options)
    return None


def write_report(found: Findings, path: Path, title: str = "wideflat report") -> None:
    """Write one self-contained page of everything found."""
    page = Page(title, _subtitle(found))
    if found.unread:
        page.paragraph("Not read: " + "; ".join(f"{name} ({why})" for name, why in found.unread.items()), "warning")
    if found.runs:
        columns, rows = summary(found.runs)
        page.section("Summary")
        page.table(columns, rows, caption="Runs: paper against measured")
        page.section("Learning curves")
        page.charts(*_learning_curves(found.runs))
    _add_experiments(page, found.experiments)
    _add_measurements(page, found)
    if found.runs:
        page.section("Configurations")
        for label, run in found.runs.items():
            page.details(f"Configuration of {label}", run.config)
            for start in run.metrics("environment")[-1:]:
                page.details(f"Where {label} was trained", start)
    page.write(path)


def _add_experiments(page: Page, items: Sequence[Experiment]) -> None:
    taken: set[str] = set()
    for item in items:
        charts = item.charts()
        for chart in charts:
            chart.name = _unique(f"{item.name}-{chart.name}", taken)
            if item.label:
                chart.title = f"[QUICK] {chart.title}"
        item.add_to(page, charts)


def _add_measurements(page: Page, found: Findings) -> None:
    if found.energies:
        page.section("Local energy")
        page.charts(_energy_chart(found.energies))
        for label, profile in found.energies.items():
            page.details(f"Conventions of {label}", profile.conventions)
    if found.entropies:
        page.section("Local entropy")
        page.charts(_entropy_chart(found.entropies))
    if found.volumes:
        _add_volumes(page, found.volumes)
    if found.solutions:
        page.section("Test errors of committee machines")
        series = [Series(label, [], 100 * np.array(s.test_error)) for label, s in found.solutions.items()]
        page.charts(Chart("committee-test-error", "Test error", "", "test error (%)", series, kind="distribution"))


def _add_volumes(page: Page, volumes: dict[str, FreeEntropy]) -> None:
    """Free entropies: their table, what speaks against them, and lambda over beta."""
    page.section("Free entropy")
    tables = {label: found.table() for label, found in volumes.items()}
    columns = next(header for header, _ in tables.values())
    rows = [[label, *row] for label, (_, lines) in tables.items() for row in lines]
    page.table(["network", *columns], rows, caption="log Z with a stated error; compare equal conventions only")
    for label, found in volumes.items():
        page.paragraph(f"{label}: {'; '.join(found.notes())}", kind="quiet")
    series = [
        Series(f"{label}, σ = {sigma:g}", llc.betas, llc.value, error=llc.stderr)
        for label, found in volumes.items()
        for sigma, llc in zip(found.sigmas, found.llc, strict=True)
    ]
    caption = "Minus the area under a curve over log β, and of the part before its first point, is log Z."
    page.charts(Chart("free-entropy", "λ over β", "β", "λ(β)", series, caption=caption, x_scale="log"))


def summary(runs: dict[str, Run]) -> tuple[list[str], list[list[object]]]:
    """Columns and rows of the table of runs: what, how far, errors, the paper's error."""
    columns = ["run", "preset", "algorithm", "seed", "epochs", "train error %", "test error %", "paper %"]
    rows: list[list[object]] = []
    for label, run in runs.items():
        about = run.config.get("experiment", {})
        result = run.result()
        last = result or (run.metrics() or [{}])[-1]
        rows.append(
            [
                label,
                about.get("name", "–"),
                about.get("algorithm", "–"),
                run.config.get("options", {}).get("seed", "–"),
                Shown(
                    f"{last.get('epoch', 0)}/{about.get('epochs', '?')}" + ("" if result else " (unfinished)"),
                    value=last.get("epoch", 0),
                    of=about.get("epochs"),
                ),
                _percent(last.get("train_error")),
                _percent(last.get("test_error")),
                _paper(about.get("paper_error"), about.get("paper_spread")),
            ]
        )
    return columns, rows


def print_summary(found: Findings) -> None:
    """The same table in the terminal."""
    if found.runs:
        print_table(*summary(found.runs))
    for item in found.experiments:
        item.comparison().print(item.heading)


def record(found: Findings, page: Path) -> dict[str, Any]:
    """The same for JSON, numbers as numbers."""
    columns, rows = summary(found.runs)
    table = Comparison(columns, rows, keys=RUN_KEYS)
    return {
        "runs": table.records(),
        "experiments": [item.record(page) for item in found.experiments],
        "energies": {label: profile.to_dict() for label, profile in found.energies.items()},
        "entropies": list(found.entropies),
        "volumes": {label: volume.to_dict() for label, volume in found.volumes.items()},
        "solutions": {label: solutions.summary() for label, solutions in found.solutions.items()},
        "unread": found.unread,
        "report": str(page),
    }


def _subtitle(found: Findings) -> str:
    parts = [
        (len(found.runs), "run"),
        (len(found.experiments), "experiment"),
        (len(found.energies), "local-energy profile"),
        (len(found.entropies), "local-entropy result"),
        (len(found.volumes), "free-entropy result"),
        (len(found.solutions), "set of solutions"),
    ]
    return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in parts if count)


def _percent(value: float | None) -> Shown:
    return number(None if value is None else 100 * value, ".2f", dash="–")


def _paper(error: float | None, spread: float | None) -> Shown:
    if error is None:
        return Shown("–", value=None, spread=None)
    return Shown(f"{error:g}" + (f" ± {spread:g}" if spread is not None else ""), value=error, spread=spread)


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}-{number}", number + 1
    taken.add(candidate)
    return candidate


def _learning_curves(runs: dict[str, Run]) -> list[Chart]:
    """Errors, loss, and where there are replicas their distance and gamma, against passes over the data."""
    kinds = [
        ("test_error", "Test error", "test error (%)", 100, "linear"),
        ("train_error", "Training error", "training error (%)", 100, "linear"),
        ("train_loss", "Training loss", "loss", 1, "log"),
        ("distance", "Distance of the replicas from their barycenter", "half the squared distance", 1, "log"),
        ("gamma", "Strength of the coupling", "γ", 1, "log"),
        ("lr", "Learning rate", "η", 1, "log"),
    ]
    charts = []
    for key, title, label, scale, axis in kinds:
        curves = [_learning_curve(name, run, key, scale, axis == "log") for name, run in runs.items()]
        series = [curve for curve in curves if curve is not None]
        if series:
            charts.append(
                Chart(f"runs-{key.replace('_', '-')}", title, "passes over the data", label, series, y_scale=axis)
            )
    return charts


def _learning_curve(name: str, run: Run, key: str, scale: float, positive: bool) -> Series | None:
    """One quantity of a run along its training; None where there is nothing to draw."""
    rows = [row for row in run.metrics() if isinstance(row.get(key), (int, float))]
    y = [scale * row[key] if row[key] > 0 or not positive else math.nan for row in rows]
    if all(map(math.isnan, y)):
        return None
    return Series(name, [row.get("passes", row["epoch"]) for row in rows], y)


def _energy_chart(energies: dict[str, LocalEnergy]) -> Chart:
    series = [Series(label, p.sigmas, 100 * p.mean, error=100 * p.stderr) for label, p in energies.items()]
    return Chart(
        "local-energy",
        "Local energy",
        "perturbation σ",
        "δE (% of the metric)",
        series,
        caption="Mean and standard error over the noise. Compare only profiles measured under the same conventions.",
    )


def _entropy_chart(entropies: dict[str, LocalEntropy]) -> Chart:
    series = []
    for label, curve in entropies.items():
        distance, phi, converged = (
            np.atleast_2d(np.asarray(a)) for a in (curve.relative_distance, curve.phi, curve.converged)
        )
        for r in range(len(distance)):
            keep = converged[r].astype(bool)
            name = label if len(distance) == 1 else f"{label} {r}"
            series.append(Series(name, distance[r][keep], phi[r][keep]))
    return Chart(
        "local-entropy",
        "Local entropy",
        "distance d/D",
        "Φ(w, d)",
        series,
        caption="Points that did not converge are left out.",
    )
