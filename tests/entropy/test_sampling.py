import math

import pytest
import torch

from wideflat.committee.channel import vote_channel
from wideflat.entropy.sampling import _log_mean, _median, sample_log_z


def independent(hidden, patterns, seed):
    """Orthogonal patterns (K = 1): log Z is a sum over patterns, exactly."""
    generator = torch.Generator().manual_seed(seed)
    kappa = torch.randn(hidden, patterns, dtype=torch.float64, generator=generator)
    y = torch.where(torch.rand(patterns, generator=generator) < 0.5, 1.0, -1.0).double()
    return kappa, torch.eye(patterns, dtype=torch.float64), y


def exact(kappa, y, delta):
    return vote_channel(kappa, torch.full_like(kappa, delta), y).log_z.sum().item()


@pytest.mark.parametrize("hidden", [1, 3, 9])
def test_known_log_z(hidden):
    kappa, gram, y = independent(hidden, 12, seed=hidden)
    found = sample_log_z(kappa, gram, y, num_inputs=40, delta=2.0, particles=1000, runs=4, sweeps=15)
    truth = exact(kappa, y, 2.0)
    assert truth < -5 and found.levels > 5
    assert abs(found.log_z - truth) < 4 * found.log_z_stderr < 0.6
    assert len(found.runs) == 4


def test_the_stated_error_is_honest():
    """Over many repetitions with other seeds, (estimate - truth) / (stated error) has a spread near 1 and no bias."""
    kappa, gram, y = independent(3, 8, seed=12)
    truth = exact(kappa, y, 1.0)
    assert truth < -4
    found = [sample_log_z(kappa, gram, y, 6, 1.0, particles=100, runs=6, sweeps=8, seed=seed) for seed in range(40)]
    deviation = torch.tensor([f.log_z - truth for f in found])
    stated = torch.tensor([f.log_z_stderr for f in found])
    score = deviation / stated  # of Student's t with 5 degrees of freedom: its standard deviation is 1.29
    assert 0.8 < score.std() < 2.0
    assert abs(deviation.mean()) < 3 * deviation.std() / math.sqrt(40)  # no bias that 40 repetitions could see
    assert deviation.std().item() == pytest.approx(stated.square().mean().sqrt().item(), rel=0.4)


def test_the_error_of_two_runs_is_not_small_by_chance():
    """The scatter of two runs is below a fifth of its mean in one case of eight; then it must not be the error."""
    kappa, gram, y = independent(3, 8, seed=12)
    truth = exact(kappa, y, 1.0)
    found = [sample_log_z(kappa, gram, y, 6, 1.0, particles=100, runs=2, sweeps=8, seed=seed) for seed in range(40)]
    scatter = torch.tensor([_log_mean(f.runs)[1] for f in found])
    deviation = torch.tensor([abs(f.log_z - truth) for f in found])
    stated = torch.tensor([f.log_z_stderr for f in found])
    assert (deviation / scatter).max() > 6 and (deviation / stated).max() < 4


def test_direct_sampling_of_a_small_committee():
    """H = 3, N = 20, P = 20, independent patterns, Delta = 0.1: 400,000 draws of the weights themselves."""
    generator = torch.Generator().manual_seed(3)
    x = torch.where(torch.rand(20, 20, generator=generator) < 0.5, 1.0, -1.0).double()
    w = torch.randn(3, 20, dtype=torch.float64, generator=generator)
    w *= math.sqrt(20) / w.norm(dim=1, keepdim=True)
    y = (w @ x.T).sign().sum(0).sign()
    delta, draws = 0.1, 400_000
    step = math.sqrt(delta) * torch.randn(draws, 3, 20, dtype=torch.float32, generator=generator)
    right = ((y * ((w.float() + step) @ x.float().T).sign().sum(1)) > 0).all(1)
    z = right.double().mean().item()
    distance = 0.5 * step[right].square().sum((1, 2)).double().mean().item()
    found = sample_log_z(w @ x.T / math.sqrt(20), x @ x.T / 20, y, 20, delta, particles=1000, runs=5)
    error = math.hypot(found.log_z_stderr, math.sqrt((1 - z) / z / draws))
    assert abs(found.log_z - math.log(z)) < 4 * error
    assert abs(found.distance - distance) < 4 * math.hypot(found.distance_stderr, distance * 0.002)


def test_the_distance_follows_the_derivative_of_log_z():
    kappa, gram, y = independent(1, 10, seed=2)
    delta, step = 1.5, 1e-4
    slope = (exact(kappa, y, delta + step) - exact(kappa, y, delta - step)) / (2 * step)
    expected = 15 * delta / 2 + delta**2 * slope
    found = sample_log_z(kappa, gram, y, num_inputs=15, delta=delta, particles=1000, runs=6)
    assert abs(found.distance - expected) < 4 * found.distance_stderr


def test_patterns_that_are_not_kept_do_not_count():
    kappa, gram, y = independent(3, 10, seed=4)
    keep = torch.arange(10) < 4
    found = sample_log_z(kappa, gram, y, 12, 1.0, keep=keep, particles=1000, runs=4, sweeps=10)
    assert abs(found.log_z - exact(kappa[:, :4], y[:4], 1.0)) < 4 * found.log_z_stderr


def test_same_seed_same_numbers():
    kappa, gram, y = independent(1, 5, seed=4)
    a, b = (sample_log_z(kappa, gram, y, 5, 1.0, particles=50, runs=2, sweeps=3, seed=7) for _ in range(2))
    assert torch.equal(a.runs, b.runs)


@pytest.mark.parametrize("hidden", [1, 3, 5, 9])
def test_median(hidden):
    values = torch.randn(hidden, 100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_median(tuple(values)), values.median(0).values)


def test_log_mean():
    total, error = _log_mean(torch.tensor([1.0, 2.0, 3.0]).double().log())
    assert total == pytest.approx(math.log(2))
    assert error == pytest.approx(1 / math.sqrt(3) / 2, rel=0.1)  # the error of the mean over the mean
    assert _log_mean(torch.tensor([0.0, -math.inf, 0.0]).double())[0] == pytest.approx(math.log(2 / 3))
    assert _log_mean(torch.full((3,), -math.inf).double()) == (-math.inf, math.inf)


def test_bad_arguments():
    kappa, gram, y = independent(1, 5, seed=4)
    with pytest.raises(ValueError, match=r"runs must be >= 2.*got 1"):
        sample_log_z(kappa, gram, y, 5, 1.0, runs=1)
    with pytest.raises(ValueError, match=r"particles must be >= 10, got 1"):
        sample_log_z(kappa, gram, y, 5, 1.0, particles=1)
    with pytest.raises(ValueError, match=r"sweeps must be >= 1.*got 0"):
        sample_log_z(kappa, gram, y, 5, 1.0, sweeps=0)
