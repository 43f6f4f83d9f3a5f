import itertools
import math

import pytest
import torch
from scipy import special

from wideflat.committee.channel import _linear_votes, _log_votes, log_majority, vote_channel, vote_hessian


def enumerated(u):
    """Z_out and P(pivotal) by summing over all 2^H votes: the definition."""
    hidden = u.shape[0]
    p = torch.from_numpy(special.ndtr(u.numpy()))
    q = torch.from_numpy(special.ndtr(-u.numpy()))
    z = torch.zeros(u.shape[1:], dtype=u.dtype)
    pivotal = torch.zeros_like(u)
    for votes in itertools.product((0, 1), repeat=hidden):
        chosen = torch.stack([p[h] if votes[h] else q[h] for h in range(hidden)])
        if sum(votes) > hidden / 2:
            z += chosen.prod(0)
        for h in range(hidden):
            if sum(votes) - votes[h] == (hidden - 1) // 2 and votes[h]:  # each set of the other votes once
                pivotal[h] += torch.cat([chosen[:h], chosen[h + 1 :]]).prod(0)
    return z, pivotal


@pytest.mark.parametrize("hidden", [1, 3, 5, 9])
def test_the_channel_is_the_sum_over_all_votes(hidden):
    generator = torch.Generator().manual_seed(hidden)
    omega = 3 * torch.randn(hidden, 40, dtype=torch.float64, generator=generator)
    V = torch.rand(hidden, 40, dtype=torch.float64, generator=generator) + 0.2
    y = torch.randint(0, 2, (40,), generator=generator).double() * 2 - 1
    u = y * omega / V.sqrt()
    z, pivotal = enumerated(u)
    phi = torch.exp(-(u**2) / 2) / math.sqrt(2 * math.pi)
    log_z, g, G = vote_channel(omega, V, y)
    torch.testing.assert_close(log_z, z.log(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(g, y * phi * pivotal / (V.sqrt() * z), rtol=1e-11, atol=1e-300)
    torch.testing.assert_close(G, g * (g + omega / V), rtol=1e-12, atol=0)


@pytest.mark.parametrize("hidden", [1, 5])
def test_g_and_G_are_derivatives_and_the_heat_equation_holds(hidden):
    generator = torch.Generator().manual_seed(3)
    omega = torch.randn(hidden, 6, dtype=torch.float64, generator=generator)
    V = torch.rand(hidden, 6, dtype=torch.float64, generator=generator) + 0.5
    y = torch.tensor([1.0, -1, 1, -1, 1, -1], dtype=torch.float64)
    _, g, G = vote_channel(omega, V, y)
    step = 1e-4
    for h in range(hidden):
        e = torch.zeros_like(omega)
        e[h] = step
        up, down = vote_channel(omega + e, V, y), vote_channel(omega - e, V, y)
        torch.testing.assert_close((up.log_z - down.log_z) / (2 * step), g[h], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(-(up.g[h] - down.g[h]) / (2 * step), G[h], rtol=1e-6, atol=1e-7)
        wide, narrow = vote_channel(omega, V + e, y), vote_channel(omega, V - e, y)
        torch.testing.assert_close((wide.log_z - narrow.log_z) / (2 * step), ((g**2 - G) / 2)[h], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("hidden", [1, 3, 5])
def test_the_hessian_is_the_derivative_of_g(hidden):
    generator = torch.Generator().manual_seed(4)
    omega = torch.randn(hidden, 6, dtype=torch.float64, generator=generator)
    V = torch.rand(hidden, 6, dtype=torch.float64, generator=generator) + 0.5
    y = torch.tensor([1.0, -1, 1, -1, 1, -1], dtype=torch.float64)
    J = vote_hessian(omega, V, y)
    assert torch.equal(J, J.transpose(0, 1))
    for k in range(hidden):
        e = torch.zeros_like(omega)
        e[k] = 1e-4
        slope = (vote_channel(omega + e, V, y).g - vote_channel(omega - e, V, y).g) / 2e-4
        torch.testing.assert_close(J[:, k], slope, rtol=1e-6, atol=1e-7)
    # the covariance of the fields given the pattern, V + V J V, is one
    covariance = (torch.einsum("hp,hkp,kp->phk", V, J, V)) + torch.diag_embed(V.T)
    assert (torch.linalg.eigvalsh(covariance) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", [1, 3, 9])
def test_extreme_arguments_are_finite_and_follow_the_asymptote(hidden, dtype):
    omega = torch.tensor([-600.0, -60, -6, 0, 6, 60, 600], dtype=dtype).expand(hidden, -1)
    log_z, g, G = vote_channel(omega, torch.ones_like(omega), torch.ones(7, dtype=dtype))
    for value in (log_z, g, G):
        assert torch.isfinite(value).all()
    assert (log_z <= 0).all() and (log_z.diff() >= 0).all()
    # far out, (H + 1)/2 units must be wrongly decided each: log Z ~ (H + 1)/2 log Phi(-600), shared over H derivatives
    deciding = (hidden + 1) / 2
    assert log_z[0].item() == pytest.approx(deciding * float(special.log_ndtr(-600.0)), rel=1e-3)
    assert g[:, 0].sum().item() == pytest.approx(deciding * 600, rel=1e-2 if dtype is torch.float32 else 1e-4)
    assert g[0, -1].item() == 0


def test_mixed_extremes():
    omega = torch.tensor([[600.0], [-600.0], [0.5]], dtype=torch.float64)
    log_z, g, _ = vote_channel(omega, torch.ones_like(omega), torch.ones(1, dtype=torch.float64))
    assert log_z.item() == pytest.approx(float(special.log_ndtr(0.5)), abs=1e-14)  # the third unit decides
    hazard = math.exp(-0.125) / math.sqrt(2 * math.pi) / float(special.ndtr(0.5))
    assert g.squeeze(1).tolist() == pytest.approx([0, 0, hazard], abs=1e-14)


def test_both_kinds_of_table_agree():
    u = 2 * torch.randn(9, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_z, slope, small = _linear_votes(u)
    assert not small.any()
    exact_z, exact_slope = _log_votes(u)
    torch.testing.assert_close(log_z, exact_z, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(slope, exact_slope, rtol=1e-11, atol=1e-300)


def test_majority_of_certain_and_of_hopeless_trials():
    log_p = torch.full((5, 2), -2000.0, dtype=torch.float64)
    log_q = torch.zeros_like(log_p)
    assert log_majority(log_p, log_q).tolist() == pytest.approx([-6000 + math.log(10)] * 2, abs=1e-9)
    assert log_majority(log_q, log_p).tolist() == [0, 0]


def test_an_even_number_of_units_is_refused():
    with pytest.raises(ValueError, match=r"must be odd.*got 4"):
        vote_channel(torch.zeros(4, 1), torch.ones(4, 1), torch.ones(1))
    with pytest.raises(ValueError, match=r"must be odd.*got 2"):
        log_majority(torch.zeros(2, 1), torch.zeros(2, 1))
