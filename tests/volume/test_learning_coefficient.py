import math

import numpy as np
import pytest
import torch
from torch import nn

import wideflat
from wideflat.volume.learning_coefficient import lanczos_quadrature


def squares(outputs, targets):
    return 0.5 * (outputs - targets).square().sum(1)


def test_linear_regression():
    """V is quadratic, so that both are exact: lambda = sum of beta h/(1 + beta h)/2 at the minimum."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1, bias=False).double(), torch.randn(50, 8, dtype=torch.float64)
    data = x, model(x).detach()
    sigma, beta = 0.7, 1 / math.log(50)
    h = beta * sigma**2 * torch.linalg.eigvalsh(x.T @ x)
    exact = (0.5 * h / (1 + h)).sum().item()
    found = wideflat.llc(model, data, sigma, measure=squares, samples=40, progress=False)
    assert found.beta == pytest.approx(beta) and found.converged, found.entropy.reasons
    assert abs(found.value - exact) < 4 * found.stderr < 2
    assert found.laplace == pytest.approx(exact, abs=4 * found.laplace_stderr + 1e-6)
    assert "Laplace's guess" in str(found)


def test_a_quartic_valley_is_no_regular_minimum():
    """V = n (a b)^2/2: the exact value is below 1/2 for each of the two weights; Laplace sees no curvature at all."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return self.a * self.b * x

    data = torch.ones(400, 1), torch.zeros(400, 1)
    t = np.linspace(-8, 8, 1201)
    V = 200 * np.outer(t, t) ** 2
    beta = 1 / math.log(400)
    weight = np.exp(-0.5 * t[:, None] ** 2 - 0.5 * t**2 - beta * V)
    exact = beta * (weight * V).sum() / weight.sum()
    found = wideflat.llc(Product(), data, 1.0, measure=squares, progress=False)
    assert found.laplace == 0
    assert not found.converged or abs(found.value - exact) < 4 * found.stderr


def test_lanczos_quadrature_of_a_large_operator():
    h = torch.logspace(-3, 2, 500, dtype=torch.float64)
    function = lambda x: x / (1 + x)  # noqa: E731
    value, error = lanczos_quadrature(lambda v: h * v, function, h, 8, 30, torch.Generator().manual_seed(1))
    assert abs(value - function(h).sum().item()) < 4 * error + 0.01


def test_the_error_has_none():
    with pytest.raises(ValueError, match="has no learning coefficient"):
        wideflat.llc(nn.Linear(2, 2), (torch.zeros(3, 2), torch.zeros(3).long()), measure="error")
