"""Noise on parameters: one z for all examples."""

import pytest
import torch
from torch import nn

from wideflat.noise.shared_noise import SharedNoise, unwritten


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def network():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4), nn.LayerNorm(4)
    ).eval()


def test_shared_noise_has_standard_deviation_sigma_times_the_weight():
    """sigma is a standard deviation, not a variance, and it multiplies |w|."""
    model = nn.Linear(200, 200)
    weight = model.weight.detach().clone()
    with SharedNoise(model, ["weight"]) as noise:
        noise.draw(generator())
        noise.apply(0.3)
        z = (model.weight.detach() - weight) / (0.3 * weight)
        assert z.std().item() == pytest.approx(1, abs=0.02)
        assert z.mean().item() == pytest.approx(0, abs=0.02)
        noise.apply(0.0)
        assert torch.equal(model.weight, weight)


def test_shared_noise_leaves_weights_and_their_storage_alone():
    model = network().to(memory_format=torch.channels_last)
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    noise = SharedNoise(model, list(before))
    with pytest.raises(RuntimeError, match="boom"), noise:
        noise.draw(generator())
        noise.apply(1.0)
        assert not torch.equal(model[0].weight, before["0.weight"][2])
        assert model[0].weight.stride() == before["0.weight"][0].stride()
        raise RuntimeError("boom")
    for name, p in model.named_parameters():
        assert p is before[name][0] and p.data_ptr() == before[name][1] and torch.equal(p, before[name][2])


def test_shared_noise_on_tied_and_strided_parameters():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.data = torch.randn(3, 4).T  # dense, but not in the usual order
    with SharedNoise(model, ["0.weight"]) as noise:
        noise.draw(generator())
        noise.apply(0.5)
        assert model[0].weight is model[1].weight
    assert noise.numel == 12


def test_mixed_precision_parameters():
    model = nn.Sequential(nn.Linear(3, 3).double(), nn.Linear(3, 3))
    with SharedNoise(model, ["0.weight", "1.weight"]) as noise:
        noise.draw(generator())
        noise.apply(0.5)
        assert model[0].weight.dtype == torch.float64 and model[1].weight.dtype == torch.float32


def test_noise_in_place_is_that_of_the_buffer_and_is_taken_back_exactly():
    model = network()
    names = [name for name, _ in model.named_parameters()]
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    with SharedNoise(model, names) as noise:
        noise.draw(generator())
        noise.apply(0.5)
        noisy = {name: p.detach().clone() for name, p in model.named_parameters()}
    with SharedNoise(model, names, in_place=True) as plain:
        plain.point(noise.directions())
        plain.apply(0.5)
        for name, p in model.named_parameters():
            assert torch.equal(p, noisy[name]) and p.data_ptr() == before[name][0]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][1]) and p.data_ptr() == before[name][0]


def test_noise_finds_its_parameter_again_when_the_network_has_moved_it():
    model = nn.Linear(3, 2, bias=False)
    with SharedNoise(model, ["weight"]) as noise:
        noise.draw(generator())
        model.weight.data = torch.zeros(2, 3)  # as networks do that normalise their weights in every call
        noise.apply(0.5)
        assert torch.equal(model.weight, noise._weights[0].view(2, 3) + 0.5 * noise.direction(model.weight))


def test_what_a_network_writes_into_its_weights_is_taken_back():
    model = nn.Linear(3, 2)
    values, pointer = model.weight.detach().clone(), model.weight.data_ptr()
    with unwritten(model):
        model.weight.data.mul_(2)
        model.bias.data = torch.zeros(2)
    assert torch.equal(model.weight, values) and model.weight.data_ptr() == pointer and model.bias.abs().sum() > 0
