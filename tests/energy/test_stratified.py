"""The estimator over blocks: means, error bars, degrees of freedom, Student's t."""

import numpy as np
import pytest
from scipy import stats

from wideflat.energy.stratified import stratified, student_quantile


@pytest.mark.parametrize("freedom", [1, 1.5, 2, 2.7, 3, 4.5, 10, 50, 1e4])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_student_quantile_is_that_of_scipy(freedom, confidence):
    expected = stats.t.ppf(0.5 + confidence / 2, freedom)
    tolerance = 2e-3 if freedom == int(freedom) or freedom > 3 else 0.03
    assert student_quantile(confidence, freedom) == pytest.approx(expected, rel=tolerance)


def test_student_quantile_without_freedom_is_infinite():
    assert student_quantile(0.95, float("nan")) == float("inf")


def test_within_blocks_the_variance_between_data_does_not_count():
    generator = np.random.default_rng(0)
    blocks, passes = 50, 40
    data = 10 * generator.standard_normal(blocks)
    table = data[None, :, None] + generator.standard_normal((passes, blocks, 1))
    estimate = stratified(table, np.full(blocks, 7.0))
    assert estimate.mean[0] == pytest.approx(data.mean(), abs=4 / np.sqrt(passes * blocks))
    assert np.sqrt(estimate.covariance[0, 0]) == pytest.approx(1 / np.sqrt(passes * blocks), rel=0.1)
    assert estimate.degrees_of_freedom[0] == pytest.approx(blocks * (passes - 1), rel=0.15)


def test_one_pass_bounds_the_variance_by_that_between_blocks():
    generator = np.random.default_rng(1)
    blocks = 2000
    table = (3 * generator.standard_normal(blocks) + generator.standard_normal(blocks))[None, :, None]
    estimate = stratified(table, np.ones(blocks))
    assert estimate.covariance[0, 0] * blocks == pytest.approx(3**2 + 1, rel=0.1)
    assert estimate.degrees_of_freedom[0] == blocks - 1


def test_blocks_seen_once_take_the_variance_of_the_others():
    generator = np.random.default_rng(2)
    blocks = 1000
    table = 5 * generator.standard_normal(blocks)[None, :, None] + generator.standard_normal((2, blocks, 1))
    table[1, 300:] = np.nan
    estimate = stratified(table, np.ones(blocks))
    expected = (300 / 2 + 700) / blocks**2
    assert estimate.covariance[0, 0] == pytest.approx(expected, rel=0.2)
    assert 200 < estimate.degrees_of_freedom[0] < 400


def test_unequal_blocks_are_weighted_by_their_size():
    table = np.array([[[1.0], [4.0]], [[1.0], [4.0]]])
    assert stratified(table, np.array([3.0, 1.0])).mean[0] == pytest.approx(1.75)


def test_covariance_of_columns_that_share_noise():
    generator = np.random.default_rng(3)
    z = generator.standard_normal((400, 5, 1))
    table = np.concatenate([z, 2 * z + 0.1 * generator.standard_normal(z.shape)], axis=2)
    covariance = stratified(table, np.ones(5)).covariance
    assert covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1]) > 0.99
    assert covariance[1, 1] == pytest.approx(4 * covariance[0, 0], rel=0.1)


def test_nothing_evaluated_is_nan_and_one_block_once_has_no_error_bar():
    table = np.array([[[np.nan, 1.0]]])
    estimate = stratified(table, np.ones(1))
    assert np.isnan(estimate.mean[0]) and estimate.mean[1] == 1.0
    assert np.isnan(estimate.covariance[1, 1])


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("blocks", [1, 4, 30])
def test_intervals_cover(passes, blocks):
    """95% intervals by Satterthwaite cover in 90-99% of cases, with blocks of very different noise."""
    generator = np.random.default_rng(4)
    scale = np.linspace(0.5, 2, blocks)
    cover = []
    for _ in range(1500):
        table = (scale * generator.standard_normal((passes, blocks)))[:, :, None]
        estimate = stratified(table, np.ones(blocks))
        half = student_quantile(0.95, estimate.degrees_of_freedom[0]) * np.sqrt(estimate.covariance[0, 0])
        cover.append(abs(estimate.mean[0]) <= half)
    assert 0.90 <= np.mean(cover) <= 0.99
