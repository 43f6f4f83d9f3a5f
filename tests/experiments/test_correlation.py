import math

import numpy as np
import pytest
import scipy.special
import scipy.stats

from wideflat.experiments.correlation import Correlation, incomplete_beta, pearson, spearman


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


@pytest.mark.parametrize("a, b", [(0.5, 0.5), (6, 0.5), (0.5, 30), (250, 0.5), (2, 3)])
def test_incomplete_beta_agrees_with_scipy(a: float, b: float) -> None:
    for x in (0.0, 1e-12, 0.01, 0.3, 0.5, 0.9, 0.999999, 1.0):
        assert incomplete_beta(a, b, x) == pytest.approx(scipy.special.betainc(a, b, x), rel=1e-9, abs=1e-300)


def test_the_paper_s_p_value_belongs_to_twelve_points_and_not_fourteen() -> None:
    # r(12) = 0.90 means n = 14, whose p is 1e-5; the printed 1e-4 is what n = 12 rounds to.
    p = {n: incomplete_beta((n - 2) / 2, 0.5, 1 - 0.9**2) for n in (12, 14)}
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
    with pytest.raises(ValueError, match="needs 0 <= x <= 1"):
        incomplete_beta(1, 1, 2)


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
