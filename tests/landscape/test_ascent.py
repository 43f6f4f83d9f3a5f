"""Ascent in a ball, on functions whose largest value is known."""

import math

import numpy as np
import pytest
import torch

from wideflat.landscape.ascent import Ball, checkpoints, climb


def quadratic(h, center):
    """The function sum h (x - center)^2 / 2 and its gradient."""
    h, center = (torch.tensor(values, dtype=torch.float64) for values in (h, center))
    return lambda x, _: (float(0.5 * (h * (x - center) ** 2).sum()), h * (x - center))


def largest_on_the_sphere(h, center, radius):
    """By search over angles."""
    angle = np.linspace(0, 2 * np.pi, 200_001)
    x = radius * np.stack([np.cos(angle), np.sin(angle)])
    return float((0.5 * np.array(h)[:, None] * (x - np.array(center)[:, None]) ** 2).sum(0).max())


@pytest.mark.parametrize("radius", [0.1, 1.0, 5.0])
def test_the_largest_value_of_a_quadratic_in_the_l2_ball(radius):
    h, center = [1.0, 9.0], [0.5, 0.02]
    found = climb(quadratic(h, center), Ball("l2", radius), torch.zeros(2, dtype=torch.float64), 60)
    expected = largest_on_the_sphere(h, center, radius)
    assert found.value == pytest.approx(expected, rel=1e-3) and found.value <= expected * (1 + 1e-9)
    assert float(found.best.norm()) <= radius * (1 + 1e-9)


def test_the_largest_value_of_a_quadratic_in_the_box_is_a_corner():
    h, center = [1.0, 9.0, 4.0], [0.5, -0.2, 0.1]
    found = climb(quadratic(h, center), Ball("linf", 1.0), torch.zeros(3, dtype=torch.float64), 10)
    expected = sum(0.5 * a * (1 + abs(c)) ** 2 for a, c in zip(h, center, strict=True))
    assert found.value == pytest.approx(expected)
    assert found.best.tolist() == [-1.0, 1.0, -1.0]


def test_one_step_from_the_center_is_that_of_sam():
    objective = quadratic([1.0, 3.0], [1.0, 1.0])
    gradient = objective(torch.zeros(2, dtype=torch.float64), True)[1]
    for kind, expected in (("l2", 0.3 * gradient / gradient.norm()), ("linf", 0.3 * gradient.sign())):
        found = climb(objective, Ball(kind, 0.3), torch.zeros(2, dtype=torch.float64), 1)
        assert torch.allclose(found.last, expected)


def test_the_best_point_is_kept_also_where_the_function_falls():
    found = climb(lambda x, _: (-float(x @ x), -2 * x), Ball("l2", 1.0), torch.zeros(3, dtype=torch.float64), 5)
    assert found.value == 0 and float(found.best.norm()) == 0


def test_an_overflow_ends_the_ascent():
    def objective(x, _):
        return (math.inf if float(x.norm()) > 0.5 else float(x.sum())), torch.ones_like(x)

    assert climb(objective, Ball("l2", 1.0), torch.zeros(2, dtype=torch.float64), 5).value == math.inf


def test_random_points_lie_in_the_ball():
    for kind in ("l2", "linf"):
        ball = Ball(kind, 0.7)
        for seed in range(20):
            x = ball.random(torch.zeros(5), torch.Generator().manual_seed(seed))
            assert torch.equal(ball.project(x), x) and float(x.abs().max()) > 0


def test_checkpoints_become_closer():
    for steps in (1, 2, 7, 20, 50):
        found = checkpoints(steps)
        assert found == sorted(set(found)) and found[-1] <= steps
