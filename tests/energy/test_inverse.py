"""The sigma at which a profile has grown by a given amount."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import LocalEnergy, local_energy


def profile(sigmas, mean, stderr, **more):
    return LocalEnergy(sigmas=sigmas, mean=mean, stderr=stderr, baseline=0.0, **more)


def test_a_quadratic_is_inverted_exactly():
    s = np.array([0.1, 0.3, 0.5])
    exact = profile(s, 2 * s**2, np.zeros(3))
    for amount in (0.001, 0.02, 0.1, 0.4):
        found = exact.sigma_at(amount)
        assert found.sigma == pytest.approx(math.sqrt(amount / 2))
        assert (found.lower, found.upper) == (pytest.approx(found.sigma), pytest.approx(found.sigma))
    assert exact.sigma_at(0.5).sigma == pytest.approx(0.5)


def test_the_interval_is_where_the_band_has_the_amount():
    """Against a search over a fine grid."""
    rng = np.random.default_rng(0)
    s = np.array([0.1, 0.2, 0.4, 0.6])
    mean = np.array([0.01, 0.05, 0.2, 0.5])
    root = 0.02 * rng.standard_normal((4, 4))
    covariance = root @ root.T
    found = profile(s, mean, np.sqrt(np.diag(covariance)), covariance=covariance).sigma_at(0.12, 0.9)
    grid = np.linspace(0.0, 0.6, 60_001)[1:]
    nodes = np.concatenate([[0], s]) ** 2
    basis = np.stack([np.interp(grid**2, nodes, np.eye(5)[k]) for k in range(1, 5)], 1)
    inside = np.abs(basis @ mean - 0.12) <= 1.6449 * np.sqrt(np.einsum("gs,st,gt->g", basis, covariance, basis))
    assert found.lower == pytest.approx(grid[inside].min(), abs=1e-4)
    assert found.upper == pytest.approx(grid[inside].max(), abs=1e-4)
    assert found.lower < found.sigma < found.upper
    assert "[" in str(found)


def test_a_profile_that_does_not_get_so_far():
    found = profile([0.1, 0.2], [0.01, 0.02], [0.001, 0.001]).sigma_at(0.5)
    assert math.isinf(found.sigma) and math.isinf(found.upper) and found.lower == pytest.approx(0.2)
    nearly = profile([0.1, 0.2], [0.01, 0.02], [0.001, 0.003]).sigma_at(0.021)
    assert math.isinf(nearly.sigma) and 0.1 < nearly.lower < 0.2
    one = profile([0.1], [0.01], [0.001], degrees_of_freedom=[0.0]).sigma_at(0.005)  # a bar without a meaning
    assert (one.lower, one.upper) == (0.0, math.inf)


@pytest.mark.parametrize(
    ("mean", "amount", "message"),
    [
        ([0.1, 0.2], 0.0, "amount must be a finite number > 0, got 0"),
        ([0.1, 0.2], math.nan, "amount must be a finite number > 0"),
        ([math.nan, math.nan], 0.1, "no point with sigma > 0"),
        ([0.1, math.inf], 0.5, "has overflown at 0.4: measure at sigmas in between"),
    ],
)
def test_bad_input(mean, amount, message):
    with pytest.raises(ValueError, match=message):
        profile([0.2, 0.4], mean, [0.01, 0.01]).sigma_at(amount)
    with pytest.raises(ValueError, match="confidence"):
        profile([0.2], [0.1], [0.0]).sigma_at(0.1, confidence=2.0)


def test_coverage_over_repetitions():
    """(w x - y)^2 grows by sigma^2 sum w^2 x^2: a quadratic, so the interpolation is exact."""
    g = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(torch.randn(1, 4, generator=g))
    x = torch.randn(32, 4, generator=g)
    data = x, torch.zeros(32)

    def square(outputs, targets):
        return (outputs[:, 0] - targets) ** 2

    slope = float((x**2 @ model.weight[0].detach() ** 2).mean())
    truth = 0.3
    hits = 0
    for seed in range(100):
        found = local_energy(model, data, [0.2, 0.45], metric=square, noise="example", max_passes=40, seed=seed,
                             progress=False).sigma_at(slope * truth**2)  # fmt: skip
        hits += found.lower <= truth <= found.upper
    assert 88 <= hits <= 100
