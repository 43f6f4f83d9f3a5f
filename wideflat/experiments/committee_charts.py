"""Figures 1 and 6 drawn from their tables: charts, comparison of the settings, findings in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from wideflat.entropy.measure import METHODS
from wideflat.experiments.experiment import Comparison
from wideflat.experiments.finding import Contrast, against, said
from wideflat.experiments.statistics import Shown, difference_within, mean_and_spread, share, spearman
from wideflat.experiments.table import Table
from wideflat.report.chart import Chart, Series

__all__ = ["AT_DISTANCE", "AT_SIGMA", "charts", "comparison", "findings", "in_one_sentence"]

#: Where solutions are compared by a single number: d/D for Phi, sigma for dE. sigma^2/2 is the d/D of the same noise.
AT_DISTANCE = 0.125
AT_SIGMA = 0.5


# -------------------------------------------------------------------------------------------------------------- charts


def charts(restarts: Table, entropy: Table, energy: Table) -> list[Chart]:
    """For each draw: local entropy by each method, local energy, test error, balanced test error."""
    drawn = []
    several = len(restarts.unique("draw")) > 1
    for draw in restarts.unique("draw"):
        ending = f", {draw} draw" if several else ""
        mine = restarts.where(draw=draw)
        settings = mine.unique("setting")
        unsolved = _unsolved(mine)
        for method in entropy.unique("method"):
            curves = entropy.where(draw=draw, method=method)
            drawn.append(
                Chart(
                    f"entropy-{method}-{draw}",
                    f"Local entropy by {METHODS[method]}{ending}",
                    "distance d/D",
                    "Φ(w, d) · 10³",
                    [_mean_curve(curves.where(setting=setting), setting) for setting in settings],
                    caption="Mean and standard deviation over solutions without training errors; points that did "
                    f"not converge are left out. Higher is flatter.{f' {unsolved}' if unsolved else ''}",
                    error_label="standard deviation over solutions",
                )
            )
        drawn.append(
            Chart(
                f"energy-{draw}",
                f"Local energy{ending}",
                "perturbation σ",
                "δE (points of training error)",
                [_mean_profile(energy.where(draw=draw, setting=setting), setting) for setting in settings],
                caption="Mean and standard deviation over restarts; the expectation over the noise is exact. "
                "Lower is flatter.",
                error_label="standard deviation over restarts",
            )
        )
        drawn += [_errors(mine, "test_error", draw, ending), _errors(mine, "balanced_test_error", draw, ending)]
    return drawn


def _unsolved(restarts: Table) -> str:
    """In words: the settings of which no solution is without training errors; empty if there are none."""
    names = [
        name for name in restarts.unique("setting") if not (restarts.where(setting=name)["train_errors"] == 0).any()
    ]
    if not names:
        return ""
    return f"No restart of {', '.join(names)} got rid of all training errors, so there is no local entropy of them."


def _errors(restarts: Table, column: str, draw: str, ending: str) -> Chart:
    """Test errors of all restarts, one column a setting."""
    title = column.replace("_", " ").capitalize()
    return Chart(
        f"{column.replace('_', '-')}-{draw}",
        f"{title}{ending}",
        "",
        f"{title.lower()} (%)",
        [Series(name, [], 100 * restarts.where(setting=name)[column]) for name in restarts.unique("setting")],
        kind="distribution",
        caption="Every restart, and their mean and standard deviation.",
    )


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
    values = 1e3 * np.array([np.interp(np.log(grid), np.log(c["distance"]), c["phi"]) for c in curves])
    spread = values.std(0, ddof=1) if len(values) > 1 else None
    return Series(label, grid, values.mean(0), error=spread, n=len(curves))


def _mean_profile(points: Table, label: str) -> Series:
    sigmas = points.unique("sigma")
    values = [100 * points.where(sigma=sigma)["energy"] for sigma in sigmas]
    several = any(len(value) > 1 for value in values)
    spread = [value.std(ddof=1) if len(value) > 1 else np.nan for value in values] if several else None
    return Series(label, sigmas, [value.mean() for value in values], error=spread, n=[len(value) for value in values])


# ---------------------------------------------------------------------------------------------------------- comparison


def comparison(restarts: Table | None, methods: Sequence[str], references: Sequence[str]) -> Comparison:
    """Settings by flatness and test error, their order under each measure, rank correlations of the measures.

    Args:
        restarts: The table; None where nothing is computed yet.
        methods: The methods of the local entropy that are asked for; those of the table count.
        references: Settings that the others are compared with.
    """
    methods = methods if restarts is None else methods_of(restarts)
    columns = ["draw", "setting", "n", "solved", "with polish", "test error %", "balanced %"]
    columns += [f"Φ·10³ at d/D {AT_DISTANCE:g} ({method})" for method in methods]
    columns += [f"δE, points at σ {AT_SIGMA:g}", "epochs"]
    if restarts is None:
        return Comparison(columns, [], ["Nothing has been computed yet."])
    rows, differences, remarks = [], [], []
    for draw in restarts.unique("draw"):
        mine = restarts.where(draw=draw)
        rows += [[draw, *_summary(mine.where(setting=name), name, methods)] for name in mine.unique("setting")]
        differences += [[draw, *row] for row in _differences(mine, methods, references)]
        remarks += findings(mine, draw)
    changes = Comparison(
        [
            *("draw", "against", "setting", "test error, points"),
            *(f"Φ·10³ ({method})" for method in methods),
            "δE, points",
        ],
        differences,
        title="Differences of the means within training subsets ± standard error",
        keys=["draw", "against", "setting", "test_error_points", *_phi_keys(methods), "energy_points"],
    )
    keys = ["draw", "setting", "n", "solved", "solved_with_polish", "test_error_percent", "balanced_test_error_percent"]
    keys += [*_phi_keys(methods), "energy_percent", "epochs"]
    return Comparison(
        columns,
        rows,
        remarks,
        "Measured, mean ± standard deviation over n restarts",
        [changes] if differences else [],
        keys,
    )


def methods_of(restarts: Table) -> list[str]:
    """How the local entropies in the table were computed."""
    return [name.removeprefix("phi_") for name in restarts.columns if name.startswith("phi_")]


def _phi_keys(methods: Sequence[str]) -> list[str]:
    return [f"phi_{method.replace('-', '_')}_times_1000" for method in methods]


def _summary(part: Table, setting: str, methods: Sequence[str]) -> list[object]:
    """One line of the comparison, after the draw."""
    epochs = float(part["epochs"].mean())
    return [
        setting,
        len(part),
        share(part["errors_before"] == 0),
        share(part["train_errors"] == 0),
        mean_and_spread(100 * part["test_error"]),
        mean_and_spread(100 * part["balanced_test_error"]),
        *(mean_and_spread(1e3 * part[f"phi_{method}"], digits=3) for method in methods),
        mean_and_spread(100 * part["energy"], digits=3),
        Shown(f"{epochs:.0f}", value=epochs),
    ]


def _differences(restarts: Table, methods: Sequence[str], references: Sequence[str]) -> Iterator[list[str]]:
    """Rows of the settings against each reference."""
    measures = [("test_error", 100.0), *((f"phi_{method}", 1e3) for method in methods), ("energy", 100.0)]
    for reference in references:
        for name in restarts.unique("setting"):
            if name in references:
                continue
            found = [difference_within(restarts, name, reference, column, factor) for column, factor in measures]
            if any(found):
                yield [reference, name, *map(_with_error, found)]


def _with_error(found: tuple[float, float] | None) -> Shown:
    if found is None:
        return Shown("–", value=None, stderr=None)
    return Shown(f"{found[0]:+.2f} ± {found[1]:.2f}", value=found[0], stderr=found[1])


# ------------------------------------------------------------------------------------------------------------ findings


def in_one_sentence(restarts: Table | None, reference: str) -> str:
    """Who is flatter than the reference and who makes fewer errors on the test images, within training subsets.

    Args:
        restarts: The table; None where nothing is computed yet.
        reference: The setting that the others are compared with.
    """
    if restarts is None or reference not in restarts.unique("setting"):
        return ""
    others = [name for name in restarts.unique("setting") if name != reference]
    clauses = [
        against(reference, words, {name: _contrast(restarts, name, reference, column) for name in others})
        for column, words in (
            ("energy", f"local energy at σ = {AT_SIGMA:g} (lower is flatter)"),
            ("test_error", "test error"),
        )
    ]
    return said(*clauses)


def _contrast(restarts: Table, name: str, reference: str, column: str) -> Contrast | None:
    """In points, with what the training subsets differ by taken out."""
    samples: tuple[list[float], list[float]] = ([], [])
    for draw in restarts.unique("draw"):
        for subset in restarts.where(draw=draw).unique("subset"):
            part = restarts.where(draw=draw, subset=subset)
            both = [100 * part.where(setting=setting)[column] for setting in (name, reference)]
            if all(np.isfinite(values).any() for values in both):
                middle = np.mean([np.nanmean(values) for values in both])
                for sample, values in zip(samples, both, strict=True):
                    sample += list(values - middle)
    return Contrast.of(*samples)


def findings(restarts: Table, draw: str) -> list[str]:
    """In words: the order of the settings under each measure, and how the measures correlate over all solutions."""
    methods = methods_of(restarts)
    best_first = {
        "test error": ("test_error", 1),
        "balanced test error": ("balanced_test_error", 1),
        **{f"local entropy ({method})": (f"phi_{method}", -1) for method in methods},
        "local energy": ("energy", 1),
    }
    sentences = []
    for measure, (column, sign) in best_first.items():
        order = ", ".join(_order(restarts, column, sign))
        sentences.append(f"{draw.capitalize()} draw, best first by {measure}: {order}.")
    pairs = [
        *((f"phi_{method}", "energy", f"local entropy ({method}) and local energy") for method in methods),
        *((f"phi_{method}", "test_error", f"local entropy ({method}) and test error") for method in methods),
        ("energy", "test_error", "local energy and test error"),
    ]
    if unsolved := _unsolved(restarts):
        sentences.append(f"{draw.capitalize()} draw: {unsolved}")
    correlations = []
    for first, second, words in pairs:
        found = spearman(restarts[first], restarts[second])
        correlations.append(f"{words} {found.r:+.2f} (n = {found.n})")
    sentences.append(f"{draw.capitalize()} draw, rank correlation over all solutions: {'; '.join(correlations)}.")
    return sentences


def _order(restarts: Table, column: str, sign: int) -> list[str]:
    """The settings by the means of a column, those without any value left out."""
    means = {}
    for name in restarts.unique("setting"):
        values = restarts.where(setting=name)[column]
        if np.isfinite(values).any():
            means[name] = sign * float(np.nanmean(values))
    return sorted(means, key=lambda name: means[name])
