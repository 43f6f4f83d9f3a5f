import math

import closed_forms as forms
import numpy as np
import pytest

from wideflat.volume import integration
from wideflat.volume.gaussian_hmc import Trace
from wideflat.volume.second_opinion import Opinion, more_points, outlying, worth_asking
from wideflat.volume.walks import Effort, Walk


def normal_points(count=4096, seed=0):
    """V ~ N(0, 1), of which log E exp(-beta V) = beta^2/2."""
    return np.random.default_rng(seed).normal(size=count)


@pytest.mark.parametrize("beta", [0.3, 1.0, 1.5])
def test_the_value_of_gaussian_points(beta):
    opinion = Opinion(normal_points(), beta)
    assert abs(opinion.log_z - beta**2 / 2) < 4 * opinion.stderr < 0.3
    # n_eff/n = exp(-beta^2) for a Gaussian
    assert opinion.count / 4096 == pytest.approx(math.exp(-(beta**2)), rel=0.35)


def test_the_share_of_solutions():
    opinion = Opinion(np.r_[np.zeros(32), np.ones(96)], 8.0, solutions=True)
    assert opinion.log_z == pytest.approx(math.log(0.25)) and opinion.count == 32
    assert opinion.stderr == pytest.approx(math.sqrt(0.75 / 32))
    none = Opinion(np.ones(64), 8.0, solutions=True)
    assert none.log_z == -math.inf and none.against(-3.0, 0.1, np.zeros(8)) == (0.0, False)


def test_what_is_apart_is_added_to_the_error_and_refused_beyond_three():
    opinion = Opinion(normal_points(), 1.0)
    samples = normal_points(72, 1) - 1  # where chains at beta = 1 are
    for apart, refused in ((0.5, False), (2.0, False), (4.0, True), (-4.0, True)):
        both = math.hypot(opinion.stderr, 0.1)
        added, contradicts = opinion.against(opinion.log_z + apart * both, 0.1, samples)
        assert added == pytest.approx(max(0.0, abs(apart) - 1) * both) and contradicts == refused


def test_points_that_are_not_where_the_chains_are_have_no_say():
    opinion = Opinion(normal_points(), 1.0)
    assert opinion.against(opinion.log_z + 20, 0.1, np.full(72, -20.0)) == (0.0, False)
    few = Opinion(np.r_[np.zeros(4), np.full(124, 50.0)], 1.0)
    assert few.count < 16 and few.against(few.log_z + 3, 0.1, np.zeros(72)) == (0.0, False)


def test_a_place_that_the_chains_have_not_met():
    """Two points of 128 at V = -8 where all chains say V = 0: few count, but they would be most of Z."""
    opinion = Opinion(np.r_[-8.0, -8.0, np.zeros(126)], 1.0)
    assert opinion.count < 16 and opinion.against(0.0, 0.05, np.zeros(72)) == (0.0, True)
    assert not opinion.against(0.0, 0.05, np.full(72, -8.0))[1]
    assert not Opinion(np.r_[-3.5, np.zeros(127)], 1.0).against(0.0, 0.05, np.zeros(72))[1]


def test_more_points_are_drawn_until_enough_count():
    values = normal_points(128)
    assert worth_asking(values, 1.0) and not worth_asking(30 * values, 1.0)
    assert not worth_asking(30 * values[:32], 1.0)  # one of 32 counts, as one always does
    drawn = normal_points()
    count = 128
    while (more := more_points(drawn[:count], 1.6)) > count:
        count = more
    assert 128 < count <= 1024 and (Opinion(drawn[:count], 1.6).count >= 64 or count == 1024)


def test_a_point_far_below_the_others():
    assert not outlying(normal_points(128), 1.0) and not outlying(normal_points(128) ** 2, 1.0)
    brink = np.r_[0.01 * normal_points(127), -0.4]
    assert outlying(brink, 1.0) and not outlying(brink, 0.1)
    assert outlying(np.r_[brink, np.inf], 1.0)


@pytest.mark.parametrize(
    ("trap", "seed"),
    [
        ("_random_wells", [1018, 5]),
        ("_random_wells", [402011, 21]),
        ("wells_in_the_plane", [1001, 11]),
        ("wells_in_the_plane", [1023, 11]),
    ],
)
def test_wells_that_chains_agreed_on_by_chance(trap, seed):
    """Each was accepted, 5 to 430 stated errors off."""
    energy = getattr(forms, trap)(np.random.default_rng(seed))
    found = Walk(energy, 1.0, energy.beta, Effort(seed=seed[0])).run()
    assert not found.converged or abs(found.log_z - energy.exact) < 3 * found.stderr


def test_what_was_left_in_the_burn_in_is_in_the_error():
    """Eight of 2 x 10 trajectories from the weights lie below all of 30 samples: log(1 + 8/42)."""
    low, high = (-5.0,) * 4 + (1.0,) * 6, (-5.0,) * 4 + (0.5,) * 6
    traces = [Trace(1.0, values=(0.0, 1.0, 2.0, 3.0, 4.0), before=before) for before in (low, high)]
    side = integration._Side([[trace] for trace in traces])
    left, stayed = integration._left(side, np.arange(30.0))
    assert left == pytest.approx(math.log(1 + 8 / 42)) and stayed == pytest.approx(0.4)
    assert integration._left(side, np.full(30, -5.0)) == (0.0, 0.0)
