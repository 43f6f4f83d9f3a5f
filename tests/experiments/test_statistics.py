import math

import numpy as np
import pytest
import scipy.special
import scipy.stats

from wideflat.experiments.statistics import (
    Correlation,
    Shown,
    difference_within,
    mean_and_spread,
    number,
    partial,
    pearson,
    spearman,
)
from wideflat.experiments.table import Table


@pytest.mark.parametrize("n", [3, 4, 5, 14, 40, 501])
@pytest.mark.parametrize("slope", [0.0, 0.3, -1.0, 50.0])
def test_pearson_and_spearman_agree_with_scipy(n: int, slope: float) -> None:
    rng = np.random.default_rng(n)
    x = rng.normal(size=n)
    y = slope * x + rng.normal(size=n)
    for ours, theirs in ((pearson(x, y), scipy.stats.pearsonr(x, y)), (spearman(x, y), scipy.stats.spearmanr(x, y))):
        assert ours.n == n
        assert ours.r == pytest.approx(theirs.statistic, abs=1e-12)
        if abs(ours.r) < 1 - 1e-12:  # at r = 1 all of p is rounding
            assert ours.p == pytest.approx(theirs.pvalue, rel=1e-9, abs=1e-290)


def test_ties_share_their_rank() -> None:
    x, y = [1, 2, 2, 3, 3, 3, 7], [5, 5, 1, 2, 2, 9, 9]
    assert spearman(x, y).r == pytest.approx(scipy.stats.spearmanr(x, y).statistic)


def test_the_paper_s_p_value_belongs_to_twelve_points_and_not_fourteen() -> None:
    # r(12) = 0.90 means n = 14, whose p is 1e-5; the printed 1e-4 is what n = 12 rounds to.
    p = {n: Correlation.of(0.9, n).p for n in (12, 14)}
    assert f"{p[14]:.0e}" == "1e-05"
    assert f"{p[12]:.0e}" == "7e-05"


def test_points_that_cannot_be_correlated() -> None:
    assert math.isnan(pearson([1, 2, 3], [4, 4, 4]).r)
    assert math.isnan(pearson([1], [2]).p)
    assert pearson([1, 2, math.nan, 3], [1, 2, 3, math.nan]).n == 2
    assert pearson([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]).r == pytest.approx(1)
    assert pearson([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]).p == pytest.approx(0, abs=1e-7)
    with pytest.raises(ValueError, match="same length"):
        pearson([1, 2], [1, 2, 3])
    assert Correlation.of(-1.0, 5).p == 0 and math.isnan(Correlation.of(math.nan, 5).p)


def test_interval_of_fisher() -> None:
    ours = Correlation(0.6, 0.0, 30).interval(0.9)
    rng = np.random.default_rng(0)
    x = rng.normal(size=30)
    result = scipy.stats.pearsonr(x, x + rng.normal(size=30))
    theirs = result.confidence_interval(0.9)
    assert Correlation(result.statistic, 0, 30).interval(0.9) == pytest.approx((theirs.low, theirs.high))
    assert ours[0] < 0.6 < ours[1]
    assert Correlation(1.0, 0.0, 9).interval() == (1.0, 1.0)
    assert Correlation(0.5, 0.6, 3).interval() == (-1.0, 1.0)


def test_intervals_of_ranks_cover() -> None:
    """3,000 samples of a normal pair whose rank correlation is (6/pi) asin(r/2)."""
    rng, inside, r = np.random.default_rng(7), 0, 0.8
    truth = 6 / math.pi * math.asin(r / 2)
    for _ in range(3000):
        x, e = rng.normal(size=(2, 24))
        low, high = spearman(x, r * x + math.sqrt(1 - r * r) * e).interval()
        inside += low < truth < high
    assert 0.935 < inside / 3000 < 0.975  # with the interval of Pearson's r it is 0.91


def test_partial_correlation_is_that_of_the_inverse_covariance() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(4, 30))
    values[0] += values[2] - 2 * values[3]
    values[1] += 3 * values[2]
    inverse = np.linalg.inv(np.cov(values))
    found = partial(*values)
    assert found.r == pytest.approx(-inverse[0, 1] / math.sqrt(inverse[0, 0] * inverse[1, 1]))
    assert found.n == 28 and found.p == Correlation.of(found.r, 28).p
    assert abs(pearson(values[0], values[1]).r) > abs(found.r)


def test_partial_correlation_where_nothing_is_left() -> None:
    x, z = np.random.default_rng(0).normal(size=(2, 9))
    assert math.isnan(partial(x, 1 - 3 * z, z).r) and math.isnan(partial(x, np.ones(9), z).r)
    assert partial(x, x + z, np.ones(9)) == Correlation.of(pearson(x, x + z).r, 9)
    assert math.isnan(partial([], [], []).r)
    assert partial([*x, math.nan], [*z, 0.0], [*(x * z), 0.0]).n == 8


def test_p_values_keep_their_digits_where_they_are_small() -> None:
    """p = I_x((n - 2)/2, 1/2) at x = 1 - r^2, the regularised incomplete beta function."""
    for n in (5, 14, 500):
        for r in (1e-6, 0.5, -0.99, 1 - 1e-9):
            expected = scipy.special.betainc((n - 2) / 2, 0.5, (1 - r) * (1 + r))
            assert Correlation.of(r, n).p == pytest.approx(expected, rel=1e-9)


def test_entries_print_as_text_and_say_their_numbers() -> None:
    entry = mean_and_spread(np.array([1.0, 2.0, np.nan]), digits=1)
    assert entry == "1.5 ± 0.7" and entry.record("error") == {"error": 1.5, "error_spread": pytest.approx(0.5**0.5)}
    assert mean_and_spread(np.array([3.0])).record("error") == {"error": 3.0, "error_spread": None}
    assert number(math.nan) == "-" and number(math.nan).record("loss") == {"loss": None}
    assert Shown("nan", value=math.nan).record("r") == {"r": None}  # JSON has no NaN


def test_differences_are_taken_within_subsets():
    """Subset 1 has twice the errors of subset 0 in both settings; missing values and lonely subsets do not count."""
    table = Table(["setting", "subset", "test_error"])
    values = {
        ("a", 0): [1.0, 3.0],
        ("b", 0): [2.0, 4.0],
        ("a", 1): [11.0, 13.0, np.nan],
        ("b", 1): [14.0, 16.0],
        ("a", 2): [99.0],
        ("b", 2): [0.0, 0.0],
    }
    for (setting, subset), errors in values.items():
        for error in errors:
            table.add(setting=setting, subset=subset, test_error=error)
    difference, error = difference_within(table, "a", "b", "test_error", 10)
    assert difference == pytest.approx(10 * (-1 - 3) / 2)
    assert error == pytest.approx(10 * np.sqrt(4 * 2 / 2) / 2)  # every variance is 2, of two values
    assert difference_within(table, "a", "missing", "test_error", 10) is None
