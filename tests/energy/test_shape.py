"""Skewness and kurtosis of noise, pooled over blocks."""

import numpy as np
import pytest

from wideflat.energy.shape import shape_of


@pytest.mark.parametrize(("blocks", "passes"), [(1, 4000), (200, 20), (1000, 4)])
def test_exponential_noise_whatever_the_blocks(blocks, passes):
    """Skewness 2 and excess kurtosis 6, also from four values a block, whose own means are taken off."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(30):
        table = generator.exponential(size=(passes, blocks, 1)) + 5 * generator.standard_normal(blocks)[:, None]
        found.append([float(part[0]) for part in shape_of(table, np.ones(blocks), np.array([True]))])
    skewness, kurtosis = np.mean(found, 0)
    assert skewness == pytest.approx(2, abs=0.1) and kurtosis == pytest.approx(6, abs=1.0)


def test_two_values_a_block_count_a_spread_of_noise_as_heavy_tails():
    generator = np.random.default_rng(0)
    noise = generator.standard_normal((2, 4000, 1))
    even, uneven = (shape_of(noise * scale, np.ones(4000), np.array([True]))[1][0] for scale in (1, _uneven()))
    assert even < 0.5 < 1.5 < uneven


def _uneven():
    return np.where(np.arange(4000) % 2, 0.2, 1.4)[:, None]


def test_between_blocks_it_is_the_blocks_that_are_the_sample():
    generator = np.random.default_rng(0)
    table = np.full((2, 3000, 1), np.nan)
    table[0, :2900, 0] = generator.exponential(size=2900)
    skewness, kurtosis = shape_of(table, np.ones(3000), np.array([False]))
    assert skewness[0] == pytest.approx(2, abs=0.4) and 3 < kurtosis[0] < 10


def test_nothing_to_tell_is_nothing():
    for table in (np.ones((5, 3, 1)), np.full((2, 3, 1), np.nan), np.ones((1, 3, 1)), np.full((5, 2, 1), np.inf)):
        assert [part.tolist() for part in shape_of(table, np.ones(table.shape[1]), np.array([True]))] == [[0.0], [0.0]]
