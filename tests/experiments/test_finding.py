import math

import numpy as np
import pytest
from scipy import stats

from wideflat.experiments.committee_charts import in_one_sentence
from wideflat.experiments.demo import sentence
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
        "Without training errors Entropy-SGD ends in flatter minima than SGD in the deep network (error under noise "
        "-5.0 ± 0.2 points); its test error is lower than SGD's in the deep network (-2.0 ± 0.2) (± 95 %, n = 3)."
    )
    sharper = sentence(planted(+5, +2))
    assert "sharper minima than SGD" in sharper and "is higher than SGD's in the deep network (+2.0 ± 0.2)" in sharper
    nothing = sentence(planted(0, 0))
    assert "is neither flatter nor sharper than SGD in the deep network (error under noise +0.0 ± 0.2 p" in nothing
    assert "test errors cannot be told apart (+0.0 ± 0.2)" in nothing


def test_the_sentence_of_the_demo_is_about_both_networks():
    assert sentence(planted(0, +2), committee(-5, -2)) == (
        "Without training errors Entropy-SGD ends in flatter minima than SGD in the committee machine (error under "
        "noise -5.0 ± 0.2 points), but no difference shows in the deep network (+0.0 ± 0.2); its test error is "
        "lower than SGD's in the committee machine (-2.0 ± 0.2), and is higher than SGD's in the deep "
        "network (+2.0 ± 0.2) (± 95 %, n = 3)."
    )
    both = sentence(planted(+5, 0), committee(+5, 0))
    assert "sharper minima than SGD in the committee machine (error under noise +5.0 ± 0.2 points) and the deep" in both
    assert "test errors cannot be told apart (+0.0 ± 0.2 and +0.0 ± 0.2)" in both
    assert len(both) < 260


def test_the_training_errors_at_which_they_are_compared_are_said():
    assert sentence(planted(-5, -2, trained=1.7)).startswith(
        "At training errors of 1.7 against 0.0 % in the deep network Entropy-SGD ends in flatter minima"
    )
    assert sentence(planted(-5, -2), committee(0, 0, wrong=5)).startswith(
        "At training errors of 1.0 against 1.0 % in the committee machine Entropy-SGD"
    )
    assert sentence(planted(-5, -2), committee(0, 0, wrong=5), patterns=50).startswith("At training errors of 10.0")


def test_a_single_training_is_too_few_to_say():
    table = Table(["algorithm", "train_error", "energy", "test_error"])
    for name, energy in (("SGD", 0.1), ("Entropy-SGD", 0.05)):
        table.add(algorithm=name, train_error=0.0, energy=energy, test_error=0.1)
    assert "is neither flatter nor sharper than SGD in the deep network (error under noise -5.0, too few" in sentence(
        table
    )
    assert sentence(Table(table.columns)) == "Nothing is known yet about Entropy-SGD against SGD."


def test_the_committee_is_compared_within_its_subsets():
    table = Table(["draw", "subset", "setting", "energy", "test_error"])
    for subset, level in ((0, 0.0), (1, 0.5)):  # subsets differ by far more than settings
        for shift in (-0.001, 0.0, 0.001):
            about = {"draw": "balanced", "subset": subset}
            table.add(**about, setting="sgd-fast", energy=0.3 + level + shift, test_error=0.1 + shift)
            table.add(**about, setting="esgd", energy=0.2 + level + shift, test_error=0.1 - shift)
    text = in_one_sentence(table, "sgd-fast")
    assert "is lower than sgd-fast's for esgd (-10 points" in text and text.startswith("Local energy")
    assert "test error cannot be told from sgd-fast's for esgd" in text
    assert in_one_sentence(None, "sgd-fast") == "" and in_one_sentence(table, "nobody") == ""


def test_nothing_to_say_is_nothing_said():
    assert against("SGD", "test error", {"eSGD": None}) == "" and said("", "") == ""
