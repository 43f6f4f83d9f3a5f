"""Chains: reversible trajectories, a Gaussian sampled exactly, a state that goes on bit for bit."""

import math

import pytest
import torch

from wideflat.volume.gaussian_hmc import Chain, Plan, advance, start, trajectory


class Quadratic:
    """V = sum h xi^2 / 2."""

    def __init__(self, h):
        self.h = torch.tensor(h, dtype=torch.float64)
        self.size, self.dtype, self.device = len(h), torch.float64, torch.device("cpu")

    def value(self, xi):
        return float((self.h * xi**2).sum() / 2)

    def gradient(self, xi):
        return self.value(xi), self.h * xi


def walked(plan, energy):
    chain = start(plan, energy, None, 0.5)
    while not chain.done:
        chain = advance(chain, energy)
    return chain


def test_without_an_energy_a_trajectory_is_a_rotation():
    energy = Quadratic([0.0] * 5)
    chain = start(Plan((1.0,), (1,), (1,), seed=0), energy, None, 0.5)
    p = torch.randn(5, dtype=torch.float64)
    end, error, _ = trajectory(energy, chain, p, 1.0, 0.25, 4)
    torch.testing.assert_close(end.xi, chain.xi * math.cos(1) + p * math.sin(1))
    assert error == pytest.approx(0, abs=1e-14)


def test_the_error_of_a_trajectory_is_that_of_the_whole_hamiltonian_and_small_steps_have_none():
    energy, beta = Quadratic([0.5, 2.0, 8.0]), 1.5
    chain = start(Plan((beta,), (1,), (1,), seed=0), energy, None, 0.5)
    p = torch.tensor([1.0, -0.5, 0.8], dtype=torch.float64)
    errors = []
    for steps in (16, 32, 64):
        end, error, _ = trajectory(energy, chain, p, beta, 1 / steps, steps)
        errors.append(abs(error))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1) and errors[1] / errors[2] == pytest.approx(4, rel=0.1)
    assert end.value == pytest.approx(energy.value(end.xi))


def test_a_gaussian_is_sampled_with_its_variance():
    """<V> at beta is sum h/(1 + beta h) / 2, and the virial is zero, both within four errors of independent samples."""
    h, betas = [0.1, 1.0, 10.0, 3.0], (0.5, 2.0)
    energy = Quadratic(h)
    chain = walked(Plan(betas, (60, 60), (800, 800), seed=1), energy)
    for trace in chain.finished:
        exact = sum(each / (1 + trace.beta * each) for each in h) / 2
        values, virial = torch.tensor(trace.values), torch.tensor(trace.virial)
        assert abs(values.mean() - exact) < 4 * values.std() * (3 / len(values)) ** 0.5
        assert abs(virial.mean()) < 4 * virial.std() * (3 / len(virial)) ** 0.5
        assert 0.5 < sum(trace.accept) / len(trace.accept) < 1 and len(trace.before) == 60
        assert torch.tensor(trace.pull).mean() == pytest.approx(2 * values.mean().item())  # xi . grad V = 2 V here


def test_a_state_that_was_saved_goes_on_bit_for_bit():
    energy, plan = Quadratic([0.3, 1.0, 4.0]), Plan((0.5, 1.0), (5, 5), (6, 6), seed=2)
    whole = walked(plan, energy)
    for stop in (3, 8, 13):
        chain = start(plan, energy, None, 0.5)
        for _ in range(stop):
            chain = advance(chain, energy)
        chain = Chain.restored(chain.saved(), plan, energy)
        while not chain.done:
            chain = advance(chain, energy)
        assert chain.finished == whole.finished and torch.equal(chain.xi, whole.xi)


def test_where_the_energy_is_not_finite_no_chain_goes():
    class Walled(Quadratic):
        def value(self, xi):
            return math.inf if xi[0] > 0.5 else super().value(xi)

    energy = Walled([1.0, 1.0])
    plan = Plan((1.0,), (5,), (100,), seed=0)
    chain = start(plan, energy, torch.zeros(2, dtype=torch.float64), 0.5)
    places = []
    while not chain.done:
        chain = advance(chain, energy)
        places.append(chain.xi[0].item())
    assert max(places) <= 0.5 and min(places) < -0.5 and math.isfinite(sum(chain.finished[0].values))
