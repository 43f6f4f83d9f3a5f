"""Figure 1: its settings, restarts and gradient scale."""

import pytest

from wideflat.experiments.fig1 import ITEM as FIG1


def test_restarts_are_divided_over_the_subsets(tmp_path):
    figure = FIG1.open(tmp_path, restarts=50, slow_restarts=15, subsets=3, align=True)
    assert {case.label: case.restarts for case in figure.cases} == {
        "sgd-fast": 17,
        "sgd-slow": 17,
        "rsgd-fast": 17,
        "rsgd-slow": 5,
        "esgd": 17,
    }
    assert [case.label for case in figure.cases if case.setting.align] == ["rsgd-fast", "rsgd-slow"]


def test_the_gradient_scale_is_that_of_all_settings(tmp_path):
    assert {case.setting.gradient_scale for case in FIG1.open(tmp_path).cases} == {100.0}
    assert {case.setting.gradient_scale for case in FIG1.open(tmp_path, gradient_scale=30.0).cases} == {30.0}


def test_settings_are_chosen_and_the_longest_comes_last(tmp_path):
    assert [case.label for case in FIG1.open(tmp_path).cases][-1] == "rsgd-slow"
    assert [case.label for case in FIG1.open(tmp_path, settings=("esgd", "sgd-fast")).cases] == ["esgd", "sgd-fast"]
    with pytest.raises(ValueError, match="got adam"):
        FIG1.open(tmp_path, settings=("adam",))
