"""What a report is made from: every run, experiment and measurement found under the given paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wideflat.commands.energy_groups import energy_charts
from wideflat.commands.run_groups import RunGroup, curves, grouped, is_committee, sentence, table
from wideflat.committee import Solutions
from wideflat.energy.profile import LocalEnergy
from wideflat.entropy import LocalEntropy
from wideflat.experiments import ITEMS
from wideflat.experiments import item as find_item
from wideflat.experiments.experiment import Comparison, Experiment
from wideflat.experiments.statistics import Shown, mean_and_spread, number, share
from wideflat.experiments.table import Table
from wideflat.files import missing, names_in_npz, read_json
from wideflat.report.chart import Chart, Series
from wideflat.report.page import Page
from wideflat.report.terminal import print_table
from wideflat.training.runs import Run
from wideflat.volume.volumes import FreeEntropy

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
    seen: set[Path] = field(default_factory=set, repr=False)
    """Files and folders that were looked at: none is read twice, though it be given twice."""

    @property
    def trainings(self) -> dict[str, Run]:
        """The runs that went through epochs: not those of committee machines."""
        return {label: run for label, run in self.runs.items() if not is_committee(run)}

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
            text = missing(path)
            end = "" if text.endswith("?") else "."
            raise FileNotFoundError(f"{text}{end} Give run directories, results or folders of them")
        _collect(path, _label(path), found)
    if not found:
        more = "".join(f"\n  {name}: {reason}" for name, reason in found.unread.items())
        raise ValueError(f"nothing to report in {', '.join(map(str, paths))}: no run, experiment or measurement{more}")
    return found


def _label(path: Path) -> str:
    """What a path that was given is called: a run and what is in it bear its name, else names begin below a folder."""
    place = path.resolve()
    if path.is_dir():
        return place.name if (path / "config.json").exists() else ""
    return f"{place.parent.name}/{path.name}" if (path.parent / "config.json").exists() else path.name


def _collect(path: Path, label: str, found: Findings) -> None:
    if path.resolve() in found.seen:
        return
    found.seen.add(path.resolve())
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
        _attempt(_read_run, path, label or path.resolve().name, found)
    for inner in sorted(path.iterdir()):
        if not inner.name.startswith(".") and inner.name not in ("checkpoints", "snapshots", "tensorboard", "figures"):
            _collect(inner, f"{label}/{inner.name}" if label else inner.name, found)


def _free(known: Mapping[str, Any], label: str, path: Path) -> str:
    """The label, or the whole path where something of this kind has it already: two folders may hold equal names."""
    return label if label not in known else _unique(str(path.with_suffix("")), set(known))


def _short(label: str, path: Path, usual: str) -> str:
    """A measurement of a run bears the run's name, unless another one, such as local_energy-2, lies beside it."""
    label = label.removesuffix(path.suffix)
    several = any(path.parent.glob(f"{usual}-*{path.suffix}"))
    return label if several else label.removesuffix(f"/{usual}")


def _attempt(reader: Any, path: Path, label: str, found: Findings) -> None:
    try:
        reader(path, label, found)
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        found.unread[str(path)] = str(error)


def _read_run(path: Path, label: str, found: Findings) -> None:
    run = Run.open(path)
    for part in {"experiment", "options", "data"} & run.config.keys():
        run.part(part)  # what it has, it has rightly
    found.runs[_free(found.runs, label, path)] = run


def _read_arrays(path: Path, label: str, found: Findings) -> None:
    names = set(names_in_npz(path))
    if {"deltas", "phi"} <= names:
        label = _short(label, path, "local_entropy")
        found.entropies[_free(found.entropies, label, path)] = LocalEntropy.load(path)
    elif {"weights", "metadata"} <= names:
        label = _short(label, path, "solutions")
        found.solutions[_free(found.solutions, label, path)] = Solutions.load(path)


def _read_profile(path: Path, label: str, found: Findings) -> None:
    content = read_json(path, "JSON document", lambda found: found)
    if isinstance(content, dict) and {"sigmas", "mean"} <= content.keys():
        label = _short(label, path, "local_energy")
        found.energies[_free(found.energies, label, path)] = LocalEnergy.load(path)
    elif isinstance(content, dict) and content.get("kind") == FreeEntropy.KIND:
        label = _short(label, path, "free_entropy")
        found.volumes[_free(found.volumes, label, path)] = FreeEntropy.load(path)


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
    groups = grouped(found.trainings)
    sentences = [sentence(groups), *(item.finding() for item in found.experiments)]
    page = Page(title, _subtitle(found), finding=next((text for text in sentences if text), ""))
    if found.unread:
        page.paragraph("Not read: " + "; ".join(f"{name} ({why})" for name, why in found.unread.items()), "warning")
    if groups:
        page.section("Trainings")
        page.paragraph("Asked: which algorithm ends with the smaller test error, on the same network and data?")
        page.table(
            *table(groups), caption="Mean ± standard deviation over n seeds; differences with their 95 % intervals"
        )
        page.paragraph(
            "The paper's number stands beside a setting only where data and epochs are the paper's and the runs are "
            "finished.",
            kind="quiet",
        )
        page.charts(*curves(groups))
    _add_experiments(page, found.experiments)
    _add_measurements(page, found, groups)
    if found.runs:
        page.section("Every run")
        page.table(*_with_paper_if_any(*summary(found.runs)), caption="Runs")
        for label, run in found.runs.items():
            page.details(f"Configuration of {label}", run.config)
        places = {label: start for label, run in found.runs.items() for start in run.metrics("environment")[-1:]}
        if places:
            page.details("Where they were trained", places)
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


def _committees(runs: dict[str, Run]) -> dict[str, str]:
    """Committee runs by the name of their setting, where it tells them apart."""
    names = {label: str(run.part("experiment").get("name")) for label, run in runs.items() if is_committee(run)}
    return {label: name for label, name in names.items() if list(names.values()).count(name) == 1}


def _add_measurements(page: Page, found: Findings, groups: Sequence[RunGroup]) -> None:
    short = _committees(found.runs)
    if found.energies:
        page.section("Local energy")
        committees = [RunGroup(name, {label: found.runs[label]}) for label, name in short.items()]
        page.charts(*energy_charts(found.energies, [*groups, *committees]))
        conventions = {label: profile.conventions for label, profile in found.energies.items()}
        page.details("Conventions under which the profiles were measured", conventions)
    if found.entropies:
        page.section("Local entropy")
        page.charts(_entropy_chart({short.get(label, label): each for label, each in found.entropies.items()}))
    if found.volumes:
        _add_volumes(page, found.volumes)
    if found.solutions:
        page.section("Committee machines")
        solutions = {short.get(label, label): each for label, each in found.solutions.items()}
        series = [Series(label, [], 100 * np.array(s.test_error)) for label, s in solutions.items()]
        page.table(*_solutions_table(solutions), caption="Mean ± standard deviation over n restarts")
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
        if len(llc.betas) > 1  # a single temperature is no curve
    ]
    if not series:
        return
    caption = "Minus the area under a curve over log β, and of the part before its first point, is log Z."
    page.charts(Chart("free-entropy", "λ over β", "β", "λ(β)", series, caption=caption, x_scale="log"))


def _solutions_table(solutions: dict[str, Solutions]) -> tuple[list[str], list[list[object]]]:
    columns = ["solutions", "n", "solved", "test error %", "balanced %", "epochs"]
    rows: list[list[object]] = []
    for label, each in solutions.items():
        errors, balanced = (100 * np.array(values, float) for values in (each.test_error, each.balanced_test_error))
        epochs = f"{np.mean(each.epochs):.0f}"
        solved = share(np.array(each.solved))
        rows.append([label, len(each), solved, mean_and_spread(errors), mean_and_spread(balanced), epochs])
    return columns, rows


def summary(runs: dict[str, Run]) -> tuple[list[str], list[list[object]]]:
    """Columns and rows of the table of runs: what, how far, errors, and the paper's error where that is fair."""
    columns = ["run", "preset", "algorithm", "seed", "epochs", "train error %", "test error %", "paper %"]
    rows = [_committee_row(label, run) if is_committee(run) else _row(label, run) for label, run in runs.items()]
    return columns, rows


def _with_paper_if_any(columns: list[str], rows: list[list[object]]) -> tuple[list[str], list[list[object]]]:
    """Without the last column, the paper's number, where no run may be compared with it."""
    if any(row[-1] != "–" for row in rows):
        return columns, rows
    return columns[:-1], [row[:-1] for row in rows]


def _row(label: str, run: Run) -> list[object]:
    about = run.config.get("experiment", {})
    result = run.result()
    last = result or (run.metrics() or [{}])[-1]
    fair = RunGroup("", {label: run}).fair()
    return [
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
        _paper(about.get("paper_error"), about.get("paper_spread")) if fair else _paper(None, None),
    ]


def _committee_row(label: str, run: Run) -> list[object]:
    """A run of committee machines: restarts instead of epochs, errors over all of them."""
    about, options = run.config.get("experiment", {}), run.config.get("options", {})
    path = run.path / "solutions.npz"
    head = [label, about.get("name", "–"), about.get("algorithm", "–"), options.get("seed", "–")]
    if not path.exists():
        return [*head, Shown("unfinished", value=None, of=None), _percent(None), _percent(None), _paper(None, None)]
    solutions = Solutions.load(path)
    errors = [np.mean(solutions.train_errors) / len(solutions.inputs), np.mean(solutions.test_error)]
    epochs = Shown(f"{len(solutions)} restarts", value=float(np.mean(solutions.epochs)), of=None)
    return [*head, epochs, *(_percent(float(error)) for error in errors), _paper(None, None)]


def print_summary(found: Findings) -> None:
    """The same in the terminal; what came out is said last."""
    groups = grouped(found.trainings)
    if found.runs:
        print_table(*_with_paper_if_any(*summary(found.runs)))
    if any(len(group.runs) > 1 for group in groups):
        print_table(*table(groups), title="Mean ± standard deviation over seeds")
    for item in found.experiments:
        item.comparison().print(item.heading)
    for text in (sentence(groups), *(item.finding() for item in found.experiments)):
        if text:
            print(text)


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
    ]
    told = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in parts if count]
    if found.solutions:
        told.append(f"{len(found.solutions)} set{'s' if len(found.solutions) > 1 else ''} of solutions")
    return ", ".join(told)


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


def _entropy_chart(entropies: dict[str, LocalEntropy]) -> Chart:
    series = [
        _entropy_series(label, curve.relative_distance, curve.phi, curve.converged)
        for label, curve in entropies.items()
    ]
    return Chart(
        "local-entropy",
        "Local entropy",
        "distance d/D",
        "Φ(w, d) · 10³",
        series,
        caption="Mean and standard deviation over n solutions. Points that did not converge are left out. Higher is "
        "flatter.",
        error_label="standard deviation over solutions",
    )


def _entropy_series(label: str, *curves: Any) -> Series:
    """One curve of all solutions of a file, of those that converged at each distance: d/D, Phi and whether it did."""
    distance, phi, converged = (np.atleast_2d(np.asarray(each)) for each in curves)
    n = converged.sum(0)
    there = n > 0
    mean, x = (np.where(converged, a, 0).sum(0)[there] / n[there] for a in (1e3 * phi, distance))
    squares = np.where(converged[:, there], 1e3 * phi[:, there] - mean, 0) ** 2
    spread = np.sqrt(squares.sum(0) / np.maximum(n[there] - 1, 1))
    return Series(label, x, mean, error=spread if len(phi) > 1 else None, n=[int(count) for count in n[there]])
