"""Two measurements of one curve made into one."""

import numpy as np
import pytest

from wideflat import LocalEnergy
from wideflat.cards.pooling import pooled


def profile(seed, mean, stderr, evaluations, **more):
    given = {"degrees_of_freedom": [4.0, 4.0], "conventions": {"seed": seed, "metric": "error"}, **more}
    return LocalEnergy([0.1, 0.3], mean, stderr, 0.02, evaluations=evaluations, **given)


def test_each_counts_by_its_evaluations():
    """Sigma by sigma: shares 1/4 and 3/4, then 1/2 each; covariances with the shares of both sigmas."""
    a = profile(0, [0.1, 0.4], [0.04, 0.02], [100, 50], covariance=[[0.04**2, 4e-4], [4e-4, 0.02**2]])
    b = profile(1, [0.3, 0.2], [0.02, 0.02], [300, 50], covariance=[[0.02**2, 2e-4], [2e-4, 0.02**2]])
    both = pooled(a, b)
    assert both.mean == pytest.approx([0.25, 0.3]) and both.evaluations.tolist() == [400, 100]
    assert both.stderr**2 == pytest.approx([(0.04**2 + 9 * 0.02**2) / 16, 0.02**2 / 2])
    assert both.covariance[0, 1] == pytest.approx(4e-4 / 8 + 3 * 2e-4 / 8)
    assert np.diag(both.covariance) == pytest.approx(both.stderr**2)
    assert pooled(b, a).mean == pytest.approx(both.mean)


def test_degrees_of_freedom_are_those_of_welch_and_satterthwaite():
    equal = pooled(profile(0, [0, 0], [1, 1], [9, 9]), profile(1, [0, 0], [1, 1], [9, 9]))
    assert equal.degrees_of_freedom == pytest.approx([8, 8])  # equal variances: the sum
    known = {"degrees_of_freedom": [np.inf, np.inf]}
    one = pooled(profile(0, [0, 0], [1, 1], [9, 9]), profile(1, [0, 0], [1, 1], [9, 9], **known))
    assert one.degrees_of_freedom == pytest.approx([16, 16])  # (1 + 1)^2 / (1/4 + 0)
    without = pooled(profile(0, [0, 0], [0, 0], [9, 9]), profile(1, [0, 0], [0, 0], [9, 9]))
    assert np.isinf(without.degrees_of_freedom).all() and (without.stderr == 0).all()


def test_it_is_complete_where_both_are_and_of_one_network_alone():
    a, b = profile(0, [0, 0], [1, 1], [9, 9]), profile(1, [0, 0], [1, 1], [9, 9])
    assert pooled(a, b).complete
    assert not pooled(a, profile(1, [0, 0], [1, 1], [9, 9], complete=False)).complete
    with pytest.raises(ValueError, match="metric"):
        pooled(a, profile(1, [0, 0], [1, 1], [9, 9], conventions={"seed": 1, "metric": "loss"}))


def test_pooled_profiles_cover_like_one_of_twice_the_length():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        parts = []
        for seed, n in enumerate((5, 15)):
            draws = 1 + 0.3 * rng.standard_normal(n)
            stderr = draws.std(ddof=1) / n**0.5
            parts.append(LocalEnergy([0.1], [draws.mean()], [stderr], 0.0, degrees_of_freedom=[n - 1],
                                     evaluations=[n], conventions={"seed": seed}))  # fmt: skip
        low, high = pooled(*parts).interval(0.95)[0]
        hits += low <= 1 <= high
    assert 0.92 < hits / 400 < 0.985
    with pytest.raises(ValueError, match="same seed"):
        pooled(parts[0], parts[0])
