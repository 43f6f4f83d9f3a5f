"""Local-energy profiles for a report: those that may be compared share an axis, seeds of one setting share a curve."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from wideflat.commands.run_groups import RunGroup
from wideflat.energy.profile import LocalEnergy
from wideflat.report.chart import Chart, Series

__all__ = ["comparable", "energy_charts"]


def energy_charts(energies: Mapping[str, LocalEnergy], groups: Sequence[RunGroup]) -> list[Chart]:
    """A figure for each set of profiles that may be compared.

    Args:
        energies: By the file they were found in, without its ending.
        groups: Runs that differ by their seed: profiles in the folders of a group are averaged.
    """
    sets = comparable(energies)
    charts = []
    for number, names in enumerate(sets, 1):
        first = energies[names[0]]
        unit = "points of error" if first.conventions.get("metric", "error") == "error" else "of the metric"
        scale = 100 if unit == "points of error" else 1
        apart = "" if len(sets) == 1 else f" Figure {number} of {len(sets)}: others were measured on other data, in "
        apart += "" if len(sets) == 1 else "another way, or at another error of the network, and cannot be compared."
        curves = _curves({name: energies[name] for name in names}, groups)
        charts.append(
            Chart(
                "local-energy" if len(sets) == 1 else f"local-energy-{number}",
                f"Local energy, E(w) = {_baseline([energies[name] for name in names], scale)}",
                "perturbation σ",
                f"δE ({unit})",
                [_series(label, profiles, scale) for label, profiles in curves.items()],
                caption=_caption(list(curves.values())) + apart,
                error_label="standard deviation over seeds, or standard error",
            )
        )
    return charts


def comparable(energies: Mapping[str, LocalEnergy]) -> list[list[str]]:
    """Names of profiles that `LocalEnergy.compare` lets stand beside the first of their set."""
    sets: list[list[str]] = []
    for name, profile in energies.items():
        for mine in sets:
            try:
                profile.compare(energies[mine[0]])
            except ValueError:
                continue
            mine.append(name)
            break
        else:
            sets.append([name])
    return sets


def _curves(energies: Mapping[str, LocalEnergy], groups: Sequence[RunGroup]) -> dict[str, list[LocalEnergy]]:
    """The profiles of the runs of a group together, others by themselves.

    A run that was measured twice is no second seed: a further file makes a curve of its own, with the file of that name
    of the other seeds.
    """
    found: dict[str, list[LocalEnergy]] = {}
    for name, profile in energies.items():
        folder, _, file = name.rpartition("/")
        group = next((group.label for group in groups if {folder, name} & group.runs.keys()), None)
        usual = file == "local_energy" or any(name in each.runs for each in groups)
        label = name if group is None else group if usual else f"{group}, {file}"
        found.setdefault(label, []).append(profile)
    return found


def _series(label: str, profiles: Sequence[LocalEnergy], scale: float) -> Series:
    if len(profiles) == 1:
        (one,) = profiles
        return Series(label, one.sigmas, scale * one.mean, error=scale * one.stderr, n=_solutions(one))
    sigmas = sorted(set.intersection(*({float(sigma) for sigma in each.sigmas} for each in profiles)))
    values = scale * np.array([[_at(each, sigma) for sigma in sigmas] for each in profiles])
    return Series(label, sigmas, values.mean(0), error=values.std(0, ddof=1), n=len(profiles))


def _caption(curves: Sequence[Sequence[LocalEnergy]]) -> str:
    """What the bands are, of the kinds of curves that are there."""
    kinds = {
        "the standard deviation over n seeds": any(len(curve) > 1 for curve in curves),
        "the standard error over n solutions": any(len(curve) == 1 and _solutions(curve[0]) > 1 for curve in curves),
        "the standard error over the noise": any(len(curve) == 1 and _solutions(curve[0]) == 1 for curve in curves),
    }
    return f"Mean, and {' or '.join(kind for kind, there in kinds.items() if there)}. Lower is flatter."


def _solutions(profile: LocalEnergy) -> int:
    """Of how many networks a profile is the mean: of several only for committee machines, whose profile says so."""
    over = re.fullmatch(r"over (\d+) solutions", str(profile.conventions.get("stderr", "")))
    return int(over[1]) if over else 1


def _baseline(profiles: Sequence[LocalEnergy], scale: float) -> str:
    """E(w) of those that share a figure, from the smallest to the largest."""
    values = [profile.baseline for profile in profiles]
    ends = dict.fromkeys(f"{scale * each:.3g}" for each in (min(values), max(values)))
    return " to ".join(ends) + (" %" if scale == 100 else "")


def _at(profile: LocalEnergy, sigma: float) -> float:
    return float(profile.mean[np.flatnonzero(profile.sigmas == sigma)[0]])
