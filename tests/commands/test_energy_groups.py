"""Profiles in a report: seeds share a curve, what cannot be compared has axes of its own."""

import dataclasses

import numpy as np
from twelve_runs import FINAL, runs, write

from wideflat.commands.energy_groups import comparable, energy_charts
from wideflat.commands.findings import collect
from wideflat.commands.run_groups import grouped
from wideflat.energy.profile import LocalEnergy


def test_profiles_of_seeds_are_averaged_and_strangers_get_axes_of_their_own(folder, tmp_path):
    energies = {f"{path.parent.name}/local_energy": LocalEnergy.load(path) for path in sorted(folder.glob("*/local_*"))}
    (chart,) = energy_charts(energies, grouped(runs(folder)))
    assert {series.legend for series in chart.series} == {f"{name} (n = 3)" for name in FINAL}
    assert "points of error" in chart.y_label
    committee = LocalEnergy([0.0, 0.5], [0.0, 0.1], [0.0, 0.01], 0.0, conventions={"stderr": "over 7 solutions"})
    (chart,) = energy_charts({"a": committee, "b": dataclasses.replace(committee, baseline=0.007)}, [])
    assert [series.legend for series in chart.series] == ["a (n = 7)", "b (n = 7)"]
    assert chart.title == "Local energy, E(w) = 0 to 0.7 %"
    assert chart.caption == "Mean, and the standard error over n solutions. Lower is flatter."
    other = LocalEnergy([0.0, 0.5], [0.0, 0.1], [0.0, 0.01], baseline=0.75)
    assert [len(names) for names in comparable({**energies, "other": other})] == [12, 1]
    charts = energy_charts({**energies, "other": other}, [])
    assert len(charts) == 2 and "cannot be compared" in charts[0].caption


def measured_again(folder):
    sigmas = np.linspace(0, 0.5, 6)
    conventions = {"metric": "error", "architecture": "SmallConvNet", "data": "a"}
    LocalEnergy(sigmas, sigmas, 0.01 + 0 * sigmas, baseline=0.01, conventions=conventions).save(
        folder / "local_energy-2.json"
    )


def test_a_run_that_was_measured_twice_is_no_second_seed(tmp_path):
    for seed in range(3):
        write(tmp_path / f"s{seed}", "sgd", seed, 0.2)
    measured_again(tmp_path / "s0")
    measured_again(tmp_path / "s1")
    found = collect([tmp_path])
    assert set(found.energies) == {"s0/local_energy", "s0/local_energy-2", "s1/local_energy", "s1/local_energy-2", "s2"}
    (chart,) = energy_charts(found.energies, grouped(found.trainings))
    assert {series.legend for series in chart.series} == {"sgd (n = 3)", "sgd, local_energy-2 (n = 2)"}
