import math

import numpy as np
import pytest
from scipy import stats

from wideflat.experiments import demo
from wideflat.experiments.committee_charts import in_one_sentence
from wideflat.experiments.finding import Contrast, against, said
from wideflat.experiments.table import Table


def test_the_interval_is_welchs():
    first, second = np.array([1.0, 2.5, 2.0, 4.0]), np.array([3.0, 3.5, 9.0])
    found = Contrast.of(first, second)
    expected = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.difference == pytest.approx(first.mean() - second.mean()) and found.n == (4, 3)


def test_one_value_gives_a_difference_and_no_interval():
    found = Contrast.of([1.0], [2.0, 3.0])
    assert found.sign == 0 and math.isnan(found.low) and "too few to say" in str(found)
    assert Contrast.of([], [1.0]) is None and Contrast.of([math.nan], [1.0]) is None
    assert Contrast.of([1.0, 1.0], [2.0, 2.0]).sign == -1


def sentence(*tables, **options):
    return demo.sentence(*tables, **options)[0]


def about(*tables, **options):
    return demo.sentence(*tables, **options)[1]


def planted(energy, error, trained=0.0):
    """Networks whose Entropy-SGD differs from SGD by this much, in points."""
    table = Table(["algorithm", "train_error", "energy", "test_error"])
    for shift in (-0.001, 0.0, 0.001):
        table.add(algorithm="SGD", train_error=0.0, energy=0.10 + shift, test_error=0.08 + shift)
        changed = {"energy": 0.10 + energy / 100 - shift, "test_error": 0.08 + error / 100 + shift}
        table.add(algorithm="Entropy-SGD", train_error=trained / 100, **changed)
    return table


def committee(energy, error, wrong=0):
    """The same of the committee machine."""
    table = Table(["setting", "train_errors", "energy", "test_error"])
    for row in planted(energy, error):
        name = {"SGD": "sgd-fast", "Entropy-SGD": "esgd"}[row["algorithm"]]
        table.add(setting=name, train_errors=wrong, energy=row["energy"], test_error=row["test_error"])
    return table


def test_the_sentence_says_what_the_numbers_say_and_the_opposite_if_they_do():
    assert sentence(planted(-5, -2)) == (
        "In the deep network Entropy-SGD ends in flatter minima than SGD (noise on its weights costs 5.0 ± 0.2 points "
        "of error less) and makes fewer test errors (2.0 ± 0.2 points less)."
    )
    assert sentence(planted(+5, +2)) == (
        "In the deep network Entropy-SGD ends in sharper minima than SGD (noise on its weights costs 5.0 ± 0.2 points "
        "of error more) and makes more test errors (2.0 ± 0.2 points more)."
    )
    assert sentence(planted(0, 0)) == "In the deep network no difference shows between Entropy-SGD and SGD."
    assert sentence(planted(0, -2)) == (
        "In the deep network Entropy-SGD makes fewer test errors than SGD (2.0 ± 0.2 points less), in minima no "
        "clearly flatter."
    )


def test_the_sentence_of_the_demo_is_about_both_networks_the_clear_one_first():
    assert sentence(planted(0, 0), committee(-5, -2)) == (
        "In the committee machine Entropy-SGD ends in flatter minima than SGD (noise on its weights costs 5.0 ± 0.2 "
        "points of error less) and makes fewer test errors (2.0 ± 0.2 points less); in the deep network no difference "
        "shows."
    )
    assert sentence(planted(+5, 0), committee(+3, 0)) == (
        "In the committee machine and the deep network Entropy-SGD ends in sharper minima than SGD (noise on its "
        "weights costs 3.0 ± 0.2 points of error more and 5.0 ± 0.2 more), with no clear difference in test error."
    )
    assert sentence(planted(-5, -2), committee(0, 0)).startswith("In the deep network Entropy-SGD ends in flatter")
    assert sentence(planted(+5, 0), committee(-5, -2)) == (
        "In the committee machine Entropy-SGD ends in flatter minima than SGD (noise on its weights costs 5.0 ± 0.2 "
        "points of error less) and makes fewer test errors (2.0 ± 0.2 points less); in the deep network it ends in "
        "sharper minima (noise on its weights costs 5.0 ± 0.2 points more), with no clear difference in test error."
    )


def test_differences_that_cannot_be_told_are_said_beside_the_sentence():
    assert about(planted(-5, -2)) == "± is the 95 % interval; 3 trainings each; no training errors."
    assert about(planted(0, 0), committee(-5, 0)) == (
        "± is the 95 % interval; 3 trainings each; no training errors. Not told apart: in the deep network noise costs "
        "0.0 ± 0.2 points more, test error 0.0 ± 0.2 points more; in the committee machine test error 0.0 ± 0.2 "
        "points more."
    )


def test_intervals_are_told_as_closely_as_they_are_known():
    assert str(Contrast(-6.49, -12.53, -0.46, (4, 4))) == "-6.5, 95 % interval -12.5 to -0.5, n = 4 each"
    assert str(Contrast(-1.0, -1.97, -0.03, (4, 3))) == "-1.00, 95 % interval -1.97 to -0.03, n = 4 and 3"
    assert str(Contrast(150.0, 100.0, 200.0, (2, 2))) == "+150, 95 % interval +100 to +200, n = 2 each"
    assert str(Contrast(-1.0, -1.0, -1.0, (2, 2))) == "-1.00, 95 % interval -1.00 to -1.00, n = 2 each"


def test_the_training_errors_at_which_they_are_compared_are_said():
    assert about(planted(-5, -2, trained=0.13)).endswith("3 trainings each; training errors at most 0.2 %.")
    assert about(planted(-5, -2, trained=1.7)).endswith(
        "; careful: the training errors are 1.7 against 0.0 % in the deep network."
    )
    careful = "; careful: the training errors are 1.0 against 1.0 % in the committee machine. Not told apart: "
    assert careful in about(planted(-5, -2), committee(0, 0, wrong=5))
    assert "10.0 against 10.0 % in the committee" in about(planted(-5, -2), committee(0, 0, wrong=5), patterns=50)


def test_a_single_training_is_too_few_to_say():
    table = Table(["algorithm", "train_error", "energy", "test_error"])
    for name, energy in (("SGD", 0.1), ("Entropy-SGD", 0.05)):
        table.add(algorithm=name, train_error=0.0, energy=energy, test_error=0.1)
    assert sentence(table) == "In the deep network there are too few trainings to say between Entropy-SGD and SGD."
    assert "noise costs 5.0 points less, of too few trainings to say" in about(table)
    assert sentence(Table(table.columns)) == "Nothing is known yet about Entropy-SGD against SGD."


def test_the_committee_is_compared_within_its_subsets():
    table = Table(["draw", "subset", "setting", "energy", "test_error"])
    for subset, level in ((0, 0.0), (1, 0.5)):  # subsets differ by far more than settings
        for shift in (-0.001, 0.0, 0.001):
            about = {"draw": "balanced", "subset": subset}
            table.add(**about, setting="sgd-fast", energy=0.3 + level + shift, test_error=0.1 + shift)
            table.add(**about, setting="esgd", energy=0.2 + level + shift, test_error=0.1 - shift)
    text = in_one_sentence(table, "sgd-fast")
    assert "is lower than sgd-fast's for esgd (-10.00 points" in text and text.startswith("Local energy")
    assert "test error cannot be told from sgd-fast's for esgd" in text
    assert in_one_sentence(None, "sgd-fast") == "" and in_one_sentence(table, "nobody") == ""


def test_nothing_to_say_is_nothing_said():
    assert against("SGD", "test error", {"eSGD": None}) == "" and said("", "") == ""
