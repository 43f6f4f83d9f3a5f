"""Anderson acceleration on maps whose fixed points are known."""

import pytest
import torch

from wideflat.entropy.fixed_point import anderson


def linear(rates, offsets):
    """x' = rate x + offset for each component; the fixed point is offset / (1 - rate)."""
    fixed = offsets / (1 - rates)

    def residual_map(index, state):
        step = rates[index] * state + offsets[index] - state
        return step, step.abs().amax(1)

    return residual_map, fixed


def run(residual_map, start, tolerance=1e-10, most=200, **options):
    counts = torch.zeros(len(start), dtype=torch.long)
    state, residual = anderson(residual_map, start, tolerance, most, counts, **options)
    return state, residual, counts


def test_slow_modes_are_found_in_a_few_evaluations():
    """Rates of 0.999 need 23,000 plain iterations for ten digits; five modes are a space of five dimensions."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.tensor([0.999, 0.99, 0.9, 0.5, -0.5], dtype=torch.float64).repeat(3, 1)
    residual_map, fixed = linear(rates, torch.randn(3, 5, generator=generator, dtype=torch.float64))
    state, residual, counts = run(residual_map, torch.zeros(3, 5, dtype=torch.float64))
    assert (residual < 1e-10).all() and counts.max() < 100
    assert torch.allclose(state, fixed, rtol=1e-6)


def test_maps_that_run_away_are_found_too():
    rates = torch.tensor([[-3.0, 0.5, 2.0]], dtype=torch.float64)
    residual_map, fixed = linear(rates, torch.ones(1, 3, dtype=torch.float64))
    state, residual, _ = run(residual_map, torch.zeros(1, 3, dtype=torch.float64))
    assert residual.item() < 1e-10 and torch.allclose(state, fixed)


def test_a_state_that_has_ended_is_left_alone_and_costs_nothing():
    rates = torch.tensor([[0.0, 0.0], [0.99, 0.3]], dtype=torch.float64)
    residual_map, fixed = linear(rates, torch.ones(2, 2, dtype=torch.float64))
    start = torch.stack([fixed[0], torch.zeros(2, dtype=torch.float64)])
    state, _, counts = run(residual_map, start)
    assert counts[0] == 1 and counts[1] > 3
    assert torch.equal(state[0], fixed[0]) and torch.allclose(state[1], fixed[1])


def test_each_state_ends_as_it_would_alone():
    generator = torch.Generator().manual_seed(1)
    rates = torch.rand(4, 6, generator=generator, dtype=torch.float64)
    residual_map, _ = linear(rates, torch.randn(4, 6, generator=generator, dtype=torch.float64))
    together, _, counts = run(residual_map, torch.zeros(4, 6, dtype=torch.float64))
    for k in range(4):
        alone, _, count = run(lambda index, state, k=k: residual_map(index + k, state), together.new_zeros(1, 6))
        assert torch.allclose(alone[0], together[k], atol=1e-9) and abs(int(count[0]) - int(counts[k])) <= 1


def test_where_there_is_no_fixed_point_the_smallest_residual_comes_back():
    def residual_map(index, state):
        step = 1 + state**2  # x = x + 1 + x^2 has no solution; closest at 0
        return step, step.abs().amax(1)

    state, residual, counts = run(residual_map, torch.full((1, 1), 2.0, dtype=torch.float64), most=60)
    assert counts.item() == 60 and residual.item() >= 1
    assert residual.item() == pytest.approx(1 + state.item() ** 2) and residual.item() <= 5


def test_what_is_no_number_is_never_the_best():
    def residual_map(index, state):
        step = torch.where(state.abs() > 1, torch.nan, 0.5 - state)
        return step, step.abs().amax(1)

    state, residual, _ = run(residual_map, torch.zeros(1, 1, dtype=torch.float64))
    assert residual.item() < 1e-10 and state.item() == pytest.approx(0.5)
