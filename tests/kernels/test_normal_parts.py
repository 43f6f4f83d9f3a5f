"""The parts of the normal distribution have its moments and lie where it has them."""

import numpy as np
import pytest
import torch
from scipy import stats

from wideflat.kernels.normal_parts import TAIL_BITS, TAIL_LEVELS, TAIL_PARTS, body_means, tail_means


def test_the_table_has_exact_moments_and_normalbody_means():
    table = body_means(torch.float64)
    assert table.mean().abs() < 1e-12
    assert (table.square().mean() - 1).abs() < 1e-12
    assert (table.pow(4).mean() - 3).abs() < 1e-3
    middles = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    assert (table - middles)[100:-100].abs().max() < 1e-3


def tail_moment(power, dtype):
    """The mean of z^power over both tails, from the tables."""
    total = 0.0
    for level, row in enumerate(tail_means(dtype).double()):
        used = row if level == TAIL_LEVELS - 1 else row[TAIL_PARTS:]
        total += float(used.pow(power).sum()) * 2.0 ** (1 - 16 - TAIL_BITS * (level + 1))
    return total


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-12), (torch.float32, 1e-8)])
def test_body_and_tails_together_have_unit_variance(dtype, precision):
    body = body_means(dtype).double()[TAIL_PARTS:-TAIL_PARTS]
    moments = {power: float(body.pow(power).sum()) / 65536 + tail_moment(power, dtype) for power in (0, 2, 4, 6)}
    assert moments[0] == pytest.approx(1, abs=1e-15)
    assert moments[2] == pytest.approx(1, abs=precision)
    assert moments[4] == pytest.approx(3, abs=1e-4)
    assert moments[6] == pytest.approx(15, abs=1e-3)


def test_the_tails_are_cut_where_the_normal_distribution_has_them():
    """The number of each part lies between the part's ends, however far out, but for the 2e-5 of the unit variance."""
    for level, row in enumerate(tail_means(torch.float64).numpy()):
        beyond = np.arange(TAIL_PARTS * 2**TAIL_BITS + 1) * 2.0 ** -(16 + TAIL_BITS * (level + 1))
        ends = stats.norm.isf(beyond)
        numbers = row / (1 - 1.8e-5)
        assert (numbers > ends[1:]).all() and (numbers[1:] < ends[1:-1]).all()
    assert tail_means(torch.float64)[-1, 0] == pytest.approx(9.19, abs=0.01)
