import torch

from wideflat.committee.channel import vote_channel
from wideflat.entropy.belief_propagation import Problem, RelaxedBP
from wideflat.entropy.expectation_propagation import FullCovariance, _posterior, vector_sites
from wideflat.entropy.fixed_point import solve, sweep
from wideflat.entropy.sampling import sample_log_z


def problem(hidden, num_inputs, patterns, overlap, seed):
    generator = torch.Generator().manual_seed(seed)
    common = torch.rand(num_inputs, generator=generator) < 0.5
    same = torch.rand(patterns, num_inputs, generator=generator) < overlap**0.5
    x = torch.where(torch.where(same, common, torch.rand(patterns, num_inputs, generator=generator) < 0.5), 1.0, -1.0)
    x = x.double()
    w = torch.randn(1, hidden, num_inputs, dtype=torch.float64, generator=generator)
    return Problem.of(w, x, (w[0] @ x.T).sign().sum(0).sign())


def test_the_fixed_point_is_that_of_textbook_ep():
    """Sites a and b, posterior covariance and mean, cavities, tilted moments: as the definition has them."""
    p = problem(3, 30, 20, 0.4, seed=1)
    delta = 0.6
    point = solve(p, FullCovariance(p.gram, 30), delta, tolerance=1e-12)
    assert point.converged.all()
    g, V, kappa, K = point.g[:, 0], point.V[:, 0], p.kappa[:, 0], p.gram
    omega = kappa + delta * g @ K - V * g
    log_z_out, g, G = vote_channel(omega, V, p.target)
    a, b = G / (1 - V * G), (g + omega * G) / (1 - V * G)
    log_z = log_z_out.sum()
    for h in range(3):
        prior = delta * K
        Sigma = torch.linalg.inv(torch.linalg.inv(prior) + a[h].diag())
        mu = Sigma @ (torch.linalg.solve(prior, kappa[h]) + b[h])
        tilted_mean, tilted_variance = omega[h] + V[h] * g[h], V[h] - V[h] ** 2 * G[h]
        torch.testing.assert_close(mu, tilted_mean, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(Sigma.diagonal(), tilted_variance, rtol=1e-8, atol=0)
        # log of the integral of prior times sites, less that of each cavity times its site
        log_z += 0.5 * (torch.logdet(Sigma) - torch.logdet(prior))
        log_z += 0.5 * (mu @ torch.linalg.solve(Sigma, mu) - kappa[h] @ torch.linalg.solve(prior, kappa[h]))
        s, peak = tilted_variance, tilted_mean
        log_z -= (0.5 * (s / V[h]).log() + 0.5 * peak**2 / s - 0.5 * omega[h] ** 2 / V[h]).sum()
    torch.testing.assert_close(point.log_z[0], log_z, rtol=0, atol=1e-8)


def test_the_posterior_with_sites_of_both_signs():
    p = problem(1, 30, 20, 0.4, seed=1)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(20, dtype=torch.float64, generator=generator)
    a = torch.where(a > 0, a, 0.1 * a)
    a[:4] = 0
    expected = torch.linalg.inv(torch.linalg.inv(0.5 * p.gram) + a.diag())
    assert torch.linalg.eigvalsh(expected)[0] > 0 and (a < 0).any()
    diagonal, log_det = _posterior(p.gram, a, 0.5)
    torch.testing.assert_close(diagonal, expected.diagonal(), rtol=1e-10, atol=0)
    identity = torch.eye(20, dtype=torch.float64)
    torch.testing.assert_close(log_det, torch.logdet(identity + 0.5 * a.diag() @ p.gram), rtol=1e-10, atol=0)
    assert _posterior(p.gram, torch.where(a > 0, a, 100 * a), 0.5) is None
    found = _posterior(p.gram, torch.zeros(20, dtype=torch.float64), 0.5)
    torch.testing.assert_close(found[0], 0.5 * p.gram.diagonal())


def test_more_patterns_than_inputs_and_repeated_patterns():
    """The covariance of the fields is then singular. A repeated pattern is no new constraint: EP half knows that."""
    p = problem(1, 12, 20, 0.0, seed=3)
    assert solve(p, FullCovariance(p.gram, 12), 0.3).converged.all()
    generator = torch.Generator().manual_seed(0)
    x = torch.where(torch.rand(6, 40, generator=generator) < 0.5, 1.0, -1.0).double()
    w = torch.randn(1, 1, 40, dtype=torch.float64, generator=generator)
    y = (w[0] @ x.T).sign().squeeze(0)
    once = Problem.of(w, x, y)
    twice = Problem.of(w, torch.cat([x, x]), torch.cat([y, y]))
    ep_once = solve(once, FullCovariance(once.gram, 40), 1.0).log_z.item()
    ep_twice = solve(twice, FullCovariance(twice.gram, 40), 1.0).log_z.item()
    bp_once, bp_twice = (solve(p, RelaxedBP(40), 1.0).log_z.item() for p in (once, twice))
    assert abs(ep_twice - ep_once) < 0.6 * abs(bp_twice - bp_once)


def test_on_overlapping_patterns_ep_is_nearer_to_the_sampler_than_bp():
    p = problem(3, 100, 60, 0.64, seed=5)
    delta = 1.0
    judge = sample_log_z(p.kappa[:, 0], p.gram, p.target, 100, delta, particles=300, runs=4, sweeps=15)
    assert judge.log_z_stderr < 0.2
    ep = solve(p, FullCovariance(p.gram, 100), delta).log_z.item()
    bp = solve(p, RelaxedBP(100), delta).log_z.item()
    assert abs(ep - judge.log_z) < 0.15 * abs(judge.log_z) + 3 * judge.log_z_stderr
    assert abs(bp - judge.log_z) > 2 * abs(ep - judge.log_z)


def test_it_converges_up_to_delta_3():
    p = problem(5, 200, 150, 0.64, seed=2)
    for point in sweep(p, FullCovariance(p.gram, 200), (0.03, 0.3, 3.0)):
        assert point.converged.all() and (point.residual < 1e-6).all()


def test_vector_sites_are_nothing_where_there_is_nothing_to_correlate():
    one_unit = problem(1, 30, 20, 0.4, seed=1)
    assert vector_sites(one_unit, solve(one_unit, FullCovariance(one_unit.gram, 30), 0.5)).item() == 0
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(1, 5, 40, dtype=torch.float64, generator=generator)
    x = torch.where(torch.rand(1, 40, generator=generator) < 0.5, 1.0, -1.0).double()
    one_pattern = Problem.of(w, x, (w[0] @ x.T).sign().sum(0).sign())
    assert abs(vector_sites(one_pattern, solve(one_pattern, FullCovariance(one_pattern.gram, 40), 2.0)).item()) < 1e-9


def test_vector_sites_bring_ep_nearer_to_the_sampler():
    p = problem(5, 100, 60, 0.64, seed=5)
    delta = 2.0
    judge = sample_log_z(p.kappa[:, 0], p.gram, p.target, 100, delta, particles=300, runs=4, sweeps=15)
    point = solve(p, FullCovariance(p.gram, 100), delta)
    correction = vector_sites(p, point).item()
    before, after = point.log_z.item() - judge.log_z, point.log_z.item() + correction - judge.log_z
    assert correction > 3 * judge.log_z_stderr
    assert abs(after) < 0.5 * abs(before)
