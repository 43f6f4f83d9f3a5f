import math

import closed_forms as forms
import numpy as np
import pytest
import torch

from wideflat.volume.descents import LONGEST, descend, most_gradients
from wideflat.volume.walks import Effort, Walk


def walk(make, seed, **effort):
    energy = make(np.random.default_rng([seed, 11]))
    return energy, Walk(energy, 1.0, energy.beta, Effort(seed=seed, **effort), energy.solutions)


def test_a_descent_finds_the_bottom_of_a_turned_bowl():
    """U = xi.(1 + H).xi/2 + g.xi is lowest at -(1 + H)^-1 g."""
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    H, g = Q * 10 ** rng.uniform(-1, 1, 6) @ Q.T, rng.normal(size=6)
    energy = forms.ClosedForm("", 6, lambda x: (0.5 * x @ M @ x + G @ x, M @ x + G), 0)
    M, G = torch.tensor(H), torch.tensor(g)
    bottom = -np.linalg.solve(np.eye(6) + H, g)
    for step in (1e-4, 0.1, 50.0):  # the last is far too long
        found = descend(energy, 1.0, 3 * torch.ones(6, dtype=torch.float64), step)
        assert found.potential == pytest.approx(0.5 * g @ bottom, abs=0.1) and found.gradients <= LONGEST


def test_a_descent_keeps_away_from_where_there_is_no_energy():
    function = lambda x: (torch.where(x[0] < 0, torch.inf, 5 * x[0]), 5 * torch.ones_like(x))  # noqa: E731
    found = descend(forms.ClosedForm("", 1, function, 0), 1.0, torch.tensor([2.0], dtype=torch.float64), 1.0)
    assert 0 <= found.xi.item() < 2 and math.isfinite(found.potential)
    nowhere = descend(forms.ClosedForm("", 1, function, 0), 1.0, torch.tensor([-1.0], dtype=torch.float64), 1.0)
    assert nowhere.gradients == 1 and nowhere.potential == math.inf


def test_the_price_is_a_share_of_what_was_walked():
    assert most_gradients(2000, 1000) == 100 and most_gradients(2000, 10) == 300
    _, many = walk(lambda rng: forms.logistic(rng, 300), 0)
    found = many.run()
    spent = sum(used for _, used in many.descents.values())
    assert 0 < spent < 0.05 * found.gradients + 2 * LONGEST and found.converged
    assert found.gradients == spent + sum(t.gradients for traces in many.finished.values() for t in traces)


@pytest.mark.parametrize("seed", [1005, 1019, 1023, 1024, 1026, 2000])
def test_a_narrow_well_that_cooling_misses_is_refused(seed):
    """Each would be accepted without descents, or was, 5 to 10 stated errors off."""
    energy, walked = walk(forms.wells_apart, seed)
    found = walked.run()
    assert "wells" in found.flags and abs(found.log_z - energy.exact) > 3 * found.stderr
    assert any("no chain has met" in reason for reason in found.reasons)


def test_a_walk_that_was_stopped_among_its_descents_goes_on_bit_for_bit():
    """Before a descent, and in the chain from the lowest."""
    _, whole = walk(forms.wells_apart, 1010, samples=9, burn=6)
    ticks = []
    whole.tick = lambda what: ticks.append(what)
    found = whole.run()
    first = ticks.index("descent")
    assert "lowest" in whole.finished and "trajectory" in ticks[first:]
    for stop in (first + 2, first + ticks[first:].index("trajectory") + 3, len(ticks) - 1):
        _, part = walk(forms.wells_apart, 1010, samples=9, burn=6)

        left = [stop]

        def tick(what, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        part.tick = tick
        with pytest.raises(KeyboardInterrupt):
            part.run()
        _, again = walk(forms.wells_apart, 1010, samples=9, burn=6)
        again.restore(part.saved())
        assert again.run() == found


def test_shallow_wells_that_chains_go_between_are_not_refused():
    for seed in range(3):
        for make in (forms.OTHERS["waves"], forms.OTHERS["double well"], forms.mixture):
            _, walked = walk(make, seed)
            assert "wells" not in walked.run().flags
