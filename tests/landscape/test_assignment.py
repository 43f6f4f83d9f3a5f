"""Linear assignment against SciPy's."""

import numpy as np
import pytest

from wideflat.landscape.assignment import assignment


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_it_finds_the_largest_sum(size):
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(size)
    for k in range(10):
        gain = rng.standard_normal((size, size)) if k % 2 else rng.integers(-3, 4, (size, size)).astype(float)
        found = assignment(gain)
        rows, columns = optimize.linear_sum_assignment(gain, maximize=True)
        assert sorted(found) == list(range(size))
        assert gain[np.arange(size), found].sum() == pytest.approx(gain[rows, columns].sum())


def test_bad_input():
    for wrong in (np.ones((2, 3)), np.array([[np.nan]])):
        with pytest.raises(ValueError, match="square matrix of finite numbers"):
            assignment(wrong)
