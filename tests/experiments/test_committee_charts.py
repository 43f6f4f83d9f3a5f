"""Figures 1 and 6 drawn from their tables: charts, comparison, what is missing is said."""

import re

import numpy as np

from wideflat.committee import SETTINGS
from wideflat.experiments.committee_figure import Case


def test_charts_are_drawn_from_the_tables(computed):
    charts = {chart.name: chart for chart in computed.charts()}
    assert list(charts) == [
        "entropy-bp-balanced",
        "energy-balanced",
        "test-error-balanced",
        "balanced-test-error-balanced",
    ]
    curve = charts["entropy-bp-balanced"].series[0]
    assert curve.label == "plain" and np.isfinite(curve.y).all() and np.all(np.diff(curve.y) < 0)
    assert len(charts["test-error-balanced"].series[1].y) == 4


def test_comparison_ranks_and_correlates(computed):
    comparison = computed.comparison()
    assert [row[1] for row in comparison.rows] == ["plain", "dropout"]
    assert any("best first by local energy" in remark for remark in comparison.remarks)
    assert any("(n = 10)" in remark for remark in comparison.remarks)
    computed.references = ("plain",)
    (changes,) = computed.comparison().more
    assert [row[:3] for row in changes.rows] == [["balanced", "plain", "dropout"]]
    assert all(re.fullmatch(r"[+-]\d+\.\d\d ± \d+\.\d\d", entry) for entry in changes.rows[0][3:])
    page = computed.write_report().read_text()
    assert changes.title in page and changes.rows[0][3] in page


def test_a_curve_that_is_missing_is_explained_under_the_figure(tmp_path, small):
    figure = small(tmp_path, methods=("bp",))
    solved, fast = figure.cases[0], SETTINGS["sgd-fast"]
    figure.work.cases = [Case("plain", solved.setting, 2), Case("hopeless", fast.replace(max_epochs=1), 2)]
    figure.compute()
    entropy, energy = figure.charts()[:2]
    assert "No restart of hopeless got rid" in entropy.caption and "No restart" not in energy.caption
    assert "of plain" not in entropy.caption and "hopeless, plain" not in entropy.caption


def test_nothing_computed_yet(tmp_path, small):
    figure = small(tmp_path)
    assert figure.charts() == [] and figure.comparison().rows == []
