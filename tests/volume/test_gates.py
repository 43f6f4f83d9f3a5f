"""Gates of the specification that are not in the other files, and closed forms that no threshold was chosen on."""

import math

import closed_forms as forms
import more_closed_forms as more
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wideflat
from wideflat.volume.walks import Effort, Walk


def walked(energy, seed):
    return Walk(energy, 1.0, energy.beta, Effort(seed=seed), energy.solutions).run()


@pytest.mark.parametrize("name", list(more.MORE))
def test_ten_other_closed_forms(name):
    """Three instances each: at most one refused, none beyond four stated errors."""
    accepted = 0
    for seed in range(3):
        energy = more.MORE[name](np.random.default_rng([seed, len(name)]))
        found = walked(energy, seed)
        accepted += found.converged
        if found.converged:
            assert abs(found.log_z - energy.exact) < 4 * found.stderr, (seed, found.log_z, energy.exact, found.stderr)
    assert accepted >= 2


def test_narrow_wells_at_the_weights_of_any_depth_width_and_size_are_refused():
    for seed in range(6):
        rng = np.random.default_rng([seed, 21])
        size, width = int(rng.integers(10, 30)), rng.uniform(0.15, 0.3)
        # the well alone: depth - size log(1/width) nats more than the bowl, so that neither side forgets it
        depth = size * math.log(1 / width) * rng.uniform(3, 5)
        energy = forms.narrow_well(rng, depth, width, size, bowl=rng.uniform(1, 4))
        assert not walked(energy, seed).converged, (seed, size, depth, width)


def test_funnels_and_heavy_tails_of_any_strength_are_right_or_refused():
    accepted = 0
    for seed in range(4):
        rng = np.random.default_rng([seed, 22])
        for energy in (
            forms.funnel(rng, rng.uniform(1, 6), rng.uniform(0, 45), int(rng.integers(5, 40))),
            forms.heavy_tail(rng, rng.uniform(1, 8), int(rng.integers(2, 30))),
        ):
            found = walked(energy, seed)
            accepted += found.converged
            assert not found.converged or abs(found.log_z - energy.exact) < 4 * found.stderr
    assert accepted >= 5


def little_network(seed=0, n=40):
    torch.manual_seed(seed)
    y = torch.randint(3, (n,))
    x = 1.5 * torch.randn(3, 6)[y] + 0.7 * torch.randn(n, 6)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), (x, y)


def test_the_loop_over_sigma_and_beta_closes():
    """log Z(sigma_2) - log Z(sigma_1), each over beta, is the integral of N (r - 1)/2 over log sigma^2."""
    model, data = little_network()
    ends = np.array([0.2, 0.6])
    nodes, weights = np.polynomial.legendre.leggauss(4)
    length = 2 * math.log(ends[1] / ends[0])
    sigmas = np.exp(0.5 * (2 * math.log(ends[0]) + length * (nodes + 1) / 2))
    around = wideflat.free_entropy(model, data, sigmas, samples=30, progress=False)
    corners = wideflat.free_entropy(model, data, ends, samples=30, seed=1, progress=False)
    half = 0.5 * around.conventions["perturbed"] * 0.5 * length * weights
    turned = sum(w * (p.ratio - 1) for w, p in zip(half, around.points, strict=True))
    error = math.sqrt(sum((w * p.ratio_stderr) ** 2 for w, p in zip(half, around.points, strict=True)))
    difference = corners.log_z[1] - corners.log_z[0]
    assert abs(difference) > 0.8
    assert abs(turned - difference) < 4 * math.sqrt(error**2 + (corners.stderr**2).sum()) < 2 * abs(difference)


def test_a_wide_network_is_a_gaussian_process():
    """Its outputs under noise are Gaussian: E exp(-c |f - y|^2/2) follows from their mean and covariance."""
    torch.manual_seed(3)
    width, count, sigma, c = 500, 4, 0.5, 3.0
    model = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1, bias=False))
    x, y = torch.randn(count, 3), torch.randn(count, 1)
    draws = []
    with torch.no_grad():
        for _ in range(40):
            noisy = [1 + sigma * torch.randn(100, *p.shape) for p in model.parameters()]
            a, b, v = (p * noise for p, noise in zip(model.parameters(), noisy, strict=True))
            draws.append((torch.einsum("sij,nj->sni", a, x) + b[:, None]).relu() @ v[:, 0, :, None])
        f, start = torch.cat(draws)[..., 0].double().numpy(), (model(x) - y).square().sum().item()
    apart, C = f.mean(0) - y[:, 0].numpy(), np.cov(f.T)
    exact = -0.5 * np.linalg.slogdet(np.eye(count) + c * C)[1] + 0.5 * c * start
    exact -= 0.5 * apart @ np.linalg.solve(C + np.eye(count) / c, apart)
    squares = lambda outputs, targets: 0.5 * c * (outputs - targets).square().sum(1)  # noqa: E731
    found = wideflat.free_entropy(model, (x, y), sigma, measure=squares, samples=30, progress=False)
    assert found.converged[0], found.reasons
    assert abs(found.log_z[0] - exact) < 4 * found.stderr[0] + 0.05 < 2


@pytest.mark.slow
def test_short_runs_of_an_mlp_against_a_longer_one():
    """64-32-32-10, 3,466 weights, n = 300, sigma = 0.3: within four errors of eight times the samples."""
    torch.manual_seed(0)
    y = torch.randint(10, (300,))
    x = torch.randn(10, 64)[y] + torch.randn(300, 64)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    long = wideflat.free_entropy(model, (x, y), 0.3, samples=144, burn=36, seed=9, progress=False)
    assert long.converged[0], long.reasons
    for seed in range(3):
        short = wideflat.free_entropy(model, (x, y), 0.3, seed=seed, progress=False)
        apart = abs(short.log_z[0] - long.log_z[0])
        assert not short.converged[0] or apart < 4 * math.hypot(short.stderr[0], long.stderr[0])
