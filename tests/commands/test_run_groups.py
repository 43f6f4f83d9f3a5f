import dataclasses

import numpy as np
import pytest
from torch import nn

from wideflat import cli
from wideflat.commands.energy_groups import comparable, energy_charts
from wideflat.commands.findings import collect
from wideflat.commands.run_groups import curves, grouped, sentence, table
from wideflat.energy.profile import LocalEnergy
from wideflat.report.palette import ALGORITHMS
from wideflat.training.runs import Run

FINAL = {"sgd": 0.20, "rsgd": 0.18, "esgd": 0.15, "ema": 0.20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve runs: four algorithms, three seeds each, a learning rate that drops; and their local energies."""
    folder = tmp_path_factory.mktemp("twelve")
    for algorithm, error in FINAL.items():
        for seed in range(3):
            write(folder / f"small-{algorithm}-seed{seed}", algorithm, seed, error + 0.002 * (seed - 1))
    return folder


def write(path, algorithm, seed, error, epochs=300, train=50_000, name="cifar10-smallconvnet", passes=300):
    about = {"name": name, "algorithm": algorithm, "epochs": epochs, "dataset": "cifar10", "model": "smallconvnet"}
    about |= {"paper_error": 16.5, "paper_spread": 0.2, "batch_size": 128}
    data = {"name": "cifar10", "train": train, "test": 10_000}
    run = Run.create(path, {"experiment": about, "options": {"seed": seed, "limit_data": None}, "data": data})
    with run.locked():
        for epoch in range(1, 11):
            row = {
                "epoch": 30 * epoch,
                "lr": 0.1 if epoch < 6 else 0.01,
                "train_loss": 2 / epoch,
                "train_error": 0.5 / epoch,
            }
            run.append("metrics", {**row, "test_error": error + 0.5 / epoch, "passes": passes * epoch / 10})
        result = {"epoch": epochs, "train_error": 0.01, "test_error": error}
        run.save_model(nn.Linear(1, 1), result)
    sigmas = np.linspace(0, 0.5, 6)
    conventions = {"metric": "error", "architecture": "SmallConvNet", "data": "a"}
    profile = LocalEnergy(sigmas, error * sigmas**2, 0.001 + 0 * sigmas, baseline=0.01, conventions=conventions)
    profile.save(path / "local_energy.json")


def runs(folder):
    return {path.parent.name: Run.open(path.parent) for path in sorted(folder.glob("*/config.json"))}


def test_seeds_are_one_group_with_one_colour_everywhere(folder):
    groups = grouped(runs(folder))
    assert sorted(group.label for group in groups) == sorted(FINAL) and all(len(group.runs) == 3 for group in groups)
    charts = curves(groups)
    assert [chart.kind for chart in charts if chart.name == "runs-lr"] == ["step"]
    for chart in charts:
        for series, look in zip(chart.series, chart.looks(), strict=True):
            assert look.color == ALGORITHMS[series.label] and series.legend == f"{series.label} (n = 3)"
    error = next(series for series in charts[0].series if series.label == "esgd")
    assert error.y[-1] == pytest.approx(100 * (0.15 + 0.05)) and error.error[-1] == pytest.approx(0.2)


def test_the_sentence_and_the_differences_follow_the_errors(folder):
    groups = grouped(runs(folder))
    text = sentence(groups)
    assert text.startswith("On cifar10-smallconvnet esgd (5.0 ± 0.5 points less)")
    assert "fewer test errors than SGD" in text and "no difference in test error shows between ema and SGD." in text
    columns, rows = table(groups)
    found = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    assert found["esgd"]["test error %"] == "15.00 ± 0.20" and found["sgd"]["test error against SGD, points"] == "–"
    contrast = found["esgd"]["test error against SGD, points"]
    assert contrast.numbers["value"] == pytest.approx(-5) and contrast.numbers["high"] < -4


def test_the_sentence_says_the_opposite_when_the_data_do(tmp_path):
    for seed in range(3):
        for name, error in (("sgd", 0.10), ("esgd", 0.15), ("ema", 0.10 + 0.01 * seed)):
            write(tmp_path / f"{name}{seed}", name, seed, error + 0.002 * seed)
    write(tmp_path / "sam0", "sam", 0, 0.3)
    assert sentence(grouped(runs(tmp_path))) == (
        "On cifar10-smallconvnet esgd (5.0 ± 0.5 points more) makes more test errors than SGD, no difference in test "
        "error shows between ema and SGD, there are too few trainings to say about sam against SGD."
    )


def test_the_sentence_says_where_the_trainings_were_not_equally_long(folder, tmp_path):
    assert "passes" not in sentence(grouped(runs(folder)))
    for seed in range(3):
        write(tmp_path / f"sgd{seed}", "sgd", seed, 0.20 + 0.002 * seed, epochs=15, passes=15)
        write(tmp_path / f"esgd{seed}", "esgd", seed, 0.10 + 0.002 * seed, epochs=15, passes=75)
    groups = grouped(runs(tmp_path))
    assert sentence(groups) == (
        "On cifar10-smallconvnet esgd (10.0 ± 0.5 points less) makes fewer test errors than SGD, after 15 (sgd) and 75 "
        "(esgd) passes over the data."
    )
    columns, rows = table(groups)
    assert {row[0]: row[columns.index("passes")] for row in rows} == {"sgd": "15", "esgd": "75"}


def test_the_paper_stands_only_beside_what_is_fair(folder, tmp_path):
    from wideflat.presets import preset

    epochs = preset("cifar10-smallconvnet", "sgd").epochs
    write(tmp_path / "fair", "sgd", 0, 0.17, epochs=epochs)
    write(tmp_path / "short", "sgd", 0, 0.17, epochs=6)
    write(tmp_path / "few", "sgd", 0, 0.17, epochs=epochs, train=2000)
    write(tmp_path / "other", "sgd", 0, 0.17, epochs=epochs, name="quick-dress-coat")
    fair = {label: grouped({label: run})[0].fair() for label, run in runs(tmp_path).items()}
    assert fair == {"fair": True, "short": False, "few": False, "other": False}
    columns, rows = table(grouped(runs(tmp_path)))
    assert [row[columns.index("paper %")] != "–" for row in rows].count(True) == 1


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


def test_a_report_over_twelve_runs_begins_with_what_came_out(folder, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert cli.main(["report", str(folder), "--out", str(page)]) == 0
    text, out = page.read_text(), capsys.readouterr().out
    assert "<h1>On cifar10-smallconvnet esgd (5.0\N{NO-BREAK SPACE}±" in text
    assert "esgd (n = 3)" in text and len(text) < 6e6
    assert "On cifar10-smallconvnet esgd (5.0 ±" in out


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


def test_runs_that_are_given_one_by_one_keep_their_names(tmp_path):
    for place, seed in (("one/a", 0), ("one/b", 1), ("two/a", 2)):
        write(tmp_path / place, "sgd", seed, 0.2)
    given = [tmp_path / "one" / "a", tmp_path / "one" / "b" / "local_energy.json"]
    assert set(collect(given).energies) == {"a", "b"}
    several = collect([*given, tmp_path / "two" / "a", tmp_path / "one"])
    assert len(several.runs) == len(several.energies) == 3  # equal names, and b twice: nothing is lost, nothing doubled
    assert set(several.energies) == {"a", "b", str(tmp_path / "two" / "a" / "local_energy")}
