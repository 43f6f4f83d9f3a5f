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


def planted(energy, error):
    """Networks whose Entropy-SGD differs from SGD by this much, in points."""
    table = Table(["algorithm", "energy", "test_error"])
    for shift in (-0.001, 0.0, 0.001):
        table.add(algorithm="SGD", energy=0.10 + shift, test_error=0.08 + shift)
        table.add(algorithm="Entropy-SGD", energy=0.10 + energy / 100 - shift, test_error=0.08 + error / 100 + shift)
    return table


def test_the_sentence_says_what_the_numbers_say_and_the_opposite_if_they_do():
    flatter = sentence(planted(-5, -2))
    assert "ends in flatter minima than SGD (δE at σ = 0.6: -5 points" in flatter
    assert "and its test error is lower than SGD's (-2 points" in flatter and "n = 3 and 3" in flatter
    sharper = sentence(planted(+5, +2))
    assert "sharper minima" in sharper and "is higher than SGD's (+2 points" in sharper
    mixed = sentence(planted(-5, +2))
    assert "flatter minima" in mixed and ", but its test error is higher" in mixed
    nothing = sentence(planted(0, 0))
    assert "neither flatter nor sharper" in nothing and "cannot be told from SGD's" in nothing
    assert all(text.endswith(").") and ". " not in text for text in (flatter, sharper, mixed, nothing))  # one sentence


def test_the_sentence_of_the_demo_is_about_both_networks():
    restarts = Table(["setting", "energy", "test_error"])
    for shift in (-0.001, 0.0, 0.001):
        restarts.add(setting="sgd-fast", energy=0.10 + shift, test_error=0.08 + shift)
        restarts.add(setting="esgd", energy=0.05 + shift, test_error=0.08 - shift)
    text = sentence(planted(+5, +2), restarts)
    assert text.startswith("Committee machine: Entropy-SGD ends in flatter minima than SGD fast (δE at σ = 0.5: -5")
    assert "; deep network: Entropy-SGD ends in sharper minima than SGD (δE at σ = 0.6: +5" in text


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
