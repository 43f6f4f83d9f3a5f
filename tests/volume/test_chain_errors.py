"""Errors of means over chains: autoregressive chains, whose tau is known, and numbers that can be counted by hand."""

import numpy as np
import pytest

from wideflat.volume.chain_errors import autocorrelation_time, split_r_hat, variances


def autoregressive(rho, samples, chains, seed):
    """x' = rho x + noise, started in its stationary law of variance 1: tau is (1 + rho)/(1 - rho)."""
    rng = np.random.default_rng(seed)
    x = np.empty((samples, chains))
    x[0] = rng.normal(size=chains)
    for k in range(1, samples):
        x[k] = rho * x[k - 1] + np.sqrt(1 - rho**2) * rng.normal(size=chains)
    return x


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_the_time_of_an_autoregressive_chain(rho):
    found = autocorrelation_time(autoregressive(rho, 4000, 8, seed=1))
    assert found == pytest.approx((1 + rho) / (1 - rho), rel=0.12)


def test_no_time_is_below_one():
    assert autocorrelation_time(np.array([[1.0], [-1.0]] * 8)) == 1  # chains that swing have less error than stated
    assert autocorrelation_time(np.full((5, 2), 3.0)) == 1


def test_a_chain_that_stays_apart_makes_the_time_long():
    """About the common mean, not each about its own: two chains at -1 and 1 are two numbers, not a hundred."""
    stuck = np.tile([-1.0, 1.0], (50, 1)) + 1e-3 * np.random.default_rng(0).normal(size=(50, 2))
    assert autocorrelation_time(stuck) > 40
    (variance,), (freedom,), _ = variances([stuck])
    assert variance == pytest.approx(1, rel=0.01) and freedom == pytest.approx(
        1, abs=1e-3
    )  # at least two numbers count


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_the_stated_variance_is_that_of_the_mean(rho):
    """Over many repetitions; and t-intervals of the stated degrees of freedom cover 0, the truth."""
    stats = pytest.importorskip("scipy.stats")
    means, stated, cover = [], [], []
    for seed in range(300):
        x = autoregressive(rho, 60, 4, seed)
        (variance,), (freedom,), _ = variances([x])
        means.append(x.mean())
        stated.append(variance)
        cover.append(abs(x.mean()) < stats.t.ppf(0.975, freedom) * variance**0.5)
    assert np.mean(stated) == pytest.approx(np.var(means), rel=0.25)  # the variance of 300 numbers: to 8 %
    assert 0.92 <= np.mean(cover) <= 0.985


def test_no_node_has_a_shorter_time_than_all_together():
    slow, fast = autoregressive(0.9, 400, 4, 0), autoregressive(0.0, 400, 4, 1)
    _, freedom, tau = variances([slow, fast])
    own = [autocorrelation_time(slow), autocorrelation_time(fast)]
    assert tau == pytest.approx([max(t, np.mean(own)) for t in own])
    assert tau[1] > 3 * own[1] and freedom == pytest.approx(1600 / tau - 1)


def test_halves_that_agree_and_halves_that_do_not():
    """Chains cut into (0, 1), (2, 3): within 1/2, between the means 1/2 and 5/2 a variance of 2."""
    assert split_r_hat(np.arange(4.0)[:, None]) == pytest.approx((1 / 2 + 2 / 0.5) ** 0.5)
    assert split_r_hat(autoregressive(0.0, 2000, 4, 0)) == pytest.approx(1, abs=0.01)
    assert split_r_hat(np.tile([0.0, 1.0], (8, 1))) == np.inf  # each stands still, elsewhere
    assert split_r_hat(np.full((8, 2), 5.0)) == 1
    assert np.isnan(split_r_hat(np.zeros((3, 2))))
