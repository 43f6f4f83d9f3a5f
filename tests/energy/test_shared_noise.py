"""Noise on parameters: selection, one z for all examples."""

import pytest
import torch
from torch import nn

from wideflat.energy.selection import select_parameters
from wideflat.energy.shared_noise import FirstLayer, SharedNoise


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def network():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4), nn.LayerNorm(4)
    ).eval()


# ---- selection


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("all", {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias", "5.weight", "5.bias"}),
        ("no batch norm", {"0.weight", "0.bias", "4.weight", "4.bias"}),
        ("no biases", {"0.weight", "1.weight", "4.weight", "5.weight"}),
        ("weights", {"0.weight", "4.weight"}),
        ("4[.].*", {"4.weight", "4.bias"}),
        (["0.weight", "5.bias"], {"0.weight", "5.bias"}),
        (lambda name, parameter: parameter.dim() == 4, {"0.weight"}),
    ],
)
def test_selection(selection, expected):
    assert set(select_parameters(network(), selection)[0]) == expected


def test_a_selection_of_nothing_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"selects none of the 8 parameters.*0\.weight"):
        select_parameters(network(), "fc.*")
    with pytest.raises(ValueError, match="regular expression"):
        select_parameters(network(), "(")


def test_tied_parameters_are_selected_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert select_parameters(model)[0] == ["0.weight"]


# ---- one z for all


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


@pytest.mark.parametrize("first", [nn.Linear(6, 4), nn.Conv1d(2, 4, 2), nn.Linear(6, 4, bias=False)])
def test_the_first_layer_is_linear_in_sigma(first):
    x = torch.randn(5, 2, 3) if isinstance(first, nn.Conv1d) else torch.randn(5, 6)
    model = nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    model(x)
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad(), SharedNoise(model, names) as noise:
        layer = FirstLayer(noise)
        noise.draw(generator())
        layer.start(x)
        for sigma in (0.1, 0.7):
            noise.apply(sigma)
            expected = model(x)
            layer.apply(sigma)
            with layer:
                torch.testing.assert_close(model(x), expected)
