"""The local energy of committee machines: exact, and against sampling."""

import numpy as np
import pytest
import torch

from wideflat import committee_local_energy, local_energy
from wideflat.committee import CommitteeMachine
from wideflat.energy.committees import committee_profile

SIGMAS = [0.1, 0.3, 0.6]


def measure(model, data, sigmas=SIGMAS, **options):
    return local_energy(model, data, sigmas, progress=False, **options)


def test_the_committee_agrees_with_its_exact_profile():
    g = torch.Generator().manual_seed(0)
    x = torch.sign(torch.randn(300, 25, generator=g))
    model = CommitteeMachine(25, hidden=3, generator=g)
    y = torch.sign(model.eval()(x) + 0.3 * torch.randn(300, generator=g))
    exact = committee_local_energy(model.weight, x, y, SIGMAS).numpy()
    for noise, passes in (("batch", 50), ("example", 50), ("pass", 200)):
        profile = measure(model, (x, y), noise=noise, max_passes=passes)
        assert (np.abs(profile.mean - exact) < 4.5 * profile.stderr).all(), noise
    assert measure(model, (x, y), noise="example").conventions["treatment"] == {"weight": "independent"}


def test_exact_committees_are_batched_and_agree_with_enumeration():
    g = torch.Generator().manual_seed(0)
    weights, x = torch.randn(4, 3, 6, generator=g), torch.sign(torch.randn(10, 6, generator=g))
    y = torch.sign(torch.randn(10, generator=g))
    together = committee_local_energy(weights, x, y, SIGMAS)
    assert together.shape == (4, 3)
    for r in range(4):
        torch.testing.assert_close(committee_local_energy(weights[r], x, y, SIGMAS), together[r])
    w, sigma = weights[0].double(), 0.3
    p = torch.special.ndtr(y * (w @ x.double().T) / (sigma * ((w**2) @ (x.double() ** 2).T).sqrt()))  # right votes
    wrong = torch.zeros(10, dtype=torch.float64)
    for votes in range(8):
        right = torch.tensor([(votes >> h) & 1 for h in range(3)], dtype=torch.bool)
        if right.sum() <= 1:
            wrong += torch.where(right[:, None], p, 1 - p).prod(0)
    before = ((torch.sign(w @ x.double().T).sum(0) * y) < 0).double()
    assert float(together[0, 1]) == pytest.approx(float((wrong - before).mean()), abs=1e-12)
    with pytest.raises(ValueError, match="expected weights"):
        committee_local_energy(weights, x[:, :5], y, SIGMAS)


def test_the_profile_of_several_committees_is_their_mean():
    g = torch.Generator().manual_seed(0)
    weights, x = torch.randn(5, 3, 6, generator=g), torch.sign(torch.randn(10, 6, generator=g))
    y = torch.sign(torch.randn(10, generator=g))
    profile = committee_profile(weights, x, y, SIGMAS)
    values = committee_local_energy(weights, x, y, SIGMAS).numpy()
    assert profile.mean == pytest.approx(values.mean(0)) and profile.stderr == pytest.approx(
        values.std(0, ddof=1) / 5**0.5
    )
    assert profile.conventions["noise"] == "exact" and profile.conventions["perturbed"] == 18
    assert str(profile).splitlines()[1].endswith("exact") and "standard error: over" in str(profile)
