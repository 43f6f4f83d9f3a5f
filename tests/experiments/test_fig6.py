"""Figure 6: one case for each dropout, its restarts divided over the subsets."""

from wideflat.experiments.fig6 import ITEM as FIG6


def test_a_case_for_each_dropout(tmp_path):
    assert [case.setting.dropout for case in FIG6.open(tmp_path, dropouts=(0.0, 0.5)).cases] == [0.0, 0.5]
    assert [case.setting.dropout for case in FIG6.open(tmp_path, quick=True).cases] == [0.0, 0.2, 0.4]


def test_restarts_are_divided_over_the_subsets(tmp_path):
    figure = FIG6.open(tmp_path, restarts=7, subsets=2, dropouts=(0.0, 0.1))
    assert [(case.label, case.restarts) for case in figure.cases] == [("dropout-0", 4), ("dropout-0.1", 4)]
