"""Noise in pairs z and -z: what is odd in z cancels, what is even stays, and passes are counted as they cost."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from wideflat import local_energy

SIGMAS = [0.0, 0.1, 0.4]


def measure(model, data, sigmas=SIGMAS, **options):
    return local_energy(model, data, sigmas, progress=False, antithetic=True, **options)


def one_layer(n=12, inputs=5):
    g = torch.Generator().manual_seed(1)
    model = nn.Linear(inputs, 1, bias=False).double()
    w = torch.randn(inputs, generator=g).double()
    model.weight.data.copy_(w)
    return model, w, torch.randn(n, inputs, generator=g).double(), torch.randn(n, generator=g).double()


def deep():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    return model, (torch.randn(96, 5).double(), torch.randint(3, (96,)))


@pytest.mark.parametrize("noise", ["batch", "example"])
def test_what_is_linear_in_the_weights_does_not_change_at_all(noise):
    model, _, x, y = one_layer()
    profile = measure(model, (x, y), noise=noise, metric=lambda out, _: out[:, 0], max_passes=8)
    assert np.abs(profile.mean).max() < 1e-14
    assert profile.stderr.max() < 1e-14


@pytest.mark.parametrize("noise", ["batch", "example"])
def test_a_quadratic_keeps_its_mean_and_loses_its_linear_part(noise):
    """(w.x - y)^2 becomes sigma^2 (z w . x)^2, of mean m = sigma^2 sum w^2 x^2 and variance 2 m^2."""
    model, w, x, y = one_layer()
    own = (x**2) @ (w**2)
    options = {"noise": noise, "metric": lambda out, y: (out[:, 0] - y) ** 2, "max_passes": 240, "batch_size": 1}
    profile = measure(model, (x, y), **options)
    for sigma, mean, stderr in list(zip(SIGMAS, profile.mean, profile.stderr, strict=True))[1:]:
        exact, spread = sigma**2 * float(own.mean()), sigma**2 * float((2 * own**2).sum() / 120) ** 0.5 / len(x)
        assert abs(mean - exact) < 4.5 * spread
        assert stderr == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize("noise", ["batch", "example"])
@pytest.mark.parametrize("common", [True, False])
def test_it_measures_the_same_as_other_noise_with_smaller_bars(noise, common):
    model, data = deep()
    options = {"metric": "loss", "noise": noise, "max_passes": 60, "common_noise": common}
    other = local_energy(model, data, SIGMAS, progress=False, **options)
    profile = measure(model, data, **options)
    assert (np.abs(profile.mean - other.mean)[1:] < 4.5 * np.hypot(profile.stderr, other.stderr)[1:]).all()
    assert profile.stderr[1] < 0.3 * other.stderr[1]
    assert profile.evaluations.tolist() == other.evaluations.tolist()
    assert profile.conventions["antithetic"] is True
    assert "antithetic" not in other.conventions


def test_a_pair_is_the_mean_of_the_two_networks_that_noise_of_both_signs_makes():
    """Noise in proportion to weights that are all negative, and to their sizes: of one seed they are z and -z."""
    model, data = deep()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(-p.abs())
    scale = {name: p.detach().abs() for name, p in model.named_parameters()}
    options = {"metric": "loss", "noise": "batch", "progress": False, "batch_size": 96}
    there = local_energy(model, data, [0.3], max_passes=6, **options)
    back = local_energy(model, data, [0.3], max_passes=6, scale=scale, **options)
    both = local_energy(model, data, [0.3], max_passes=12, antithetic=True, **options)
    assert both.mean[0] == pytest.approx((there.mean[0] + back.mean[0]) / 2, rel=1e-9)


def test_a_target_is_reached_sooner():
    model, data = deep()
    options = {"metric": "loss", "noise": "batch", "target_stderr": 2.5e-4}
    other = local_energy(model, data, [0.05], progress=False, **options)
    profile = measure(model, data, [0.05], **options)
    assert profile.stderr[0] < 2.8e-4
    assert profile.evaluations[0] < other.evaluations[0] / 2


@pytest.mark.parametrize("passes", [1, 3])
def test_passes_that_are_no_pairs_are_refused_where_data_come_as_they_come(passes):
    model, (x, y) = deep()
    loader = torch.utils.data.DataLoader(TensorDataset(x, y), batch_size=32)
    assert measure(model, loader, max_passes=4).passes.tolist() == [4, 4, 4]
    with pytest.raises(ValueError, match=f"max_passes must be even, got {passes}"):
        measure(model, iter_only(loader), max_passes=passes)


def iter_only(loader):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(loader)

    return torch.utils.data.DataLoader(Stream(), batch_size=None)


def test_a_pass_over_an_iterator_is_there_and_back_at_once():
    model, (x, y) = deep()
    profile = measure(model, iter([(x[:48], y[:48]), (x[48:], y[48:])]), metric="loss")
    assert profile.passes.tolist() == [2, 2, 2]


def test_noise_of_a_pass_is_for_the_spread_and_refused():
    model, data = deep()
    with pytest.raises(ValueError, match="the spread over perturbations"):
        measure(model, data, noise="pass")
