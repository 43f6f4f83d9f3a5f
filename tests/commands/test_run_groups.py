import pytest
from twelve_runs import FINAL, runs, write

from wideflat.commands.findings import collect
from wideflat.commands.run_groups import curves, grouped, sentence, table
from wideflat.report.palette import ALGORITHMS


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


def test_runs_that_are_given_one_by_one_keep_their_names(tmp_path):
    for place, seed in (("one/a", 0), ("one/b", 1), ("two/a", 2)):
        write(tmp_path / place, "sgd", seed, 0.2)
    given = [tmp_path / "one" / "a", tmp_path / "one" / "b" / "local_energy.json"]
    assert set(collect(given).energies) == {"a", "b"}
    several = collect([*given, tmp_path / "two" / "a", tmp_path / "one"])
    assert len(several.runs) == len(several.energies) == 3  # equal names, and b twice: nothing is lost, nothing doubled
    assert set(several.energies) == {"a", "b", str(tmp_path / "two" / "a" / "local_energy")}
