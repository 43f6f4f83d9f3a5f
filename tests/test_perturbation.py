"""Noise on parameters: selection, one z for all, one z for each example."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wideflat.perturbation import ExampleNoise, FirstLayer, SharedNoise, seed_of, select_parameters


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


# ---- one z for each example


def sampled(model, x, sigma, draws, names=None, seed=0):
    """Outputs of many draws of example noise on copies of one input, shape (draws, outputs)."""
    names = names or [name for name, _ in model.named_parameters()]
    noise = ExampleNoise(model, names)
    batch = x.expand(draws, *x.shape[1:]).contiguous()
    with torch.no_grad():
        noise.probe(model, [(batch[:2], 2), (batch[:1], 1)])
        shared = noise.shared_names()
        assert not shared
        noise.start(batch, draws, generator(seed))
        noise.apply(sigma)
        with noise:
            return model(batch), noise


def brute(model, x, sigma, draws, seed=1):
    """The same by perturbing the weights once for each draw."""
    names = [name for name, _ in model.named_parameters()]
    g = generator(seed)
    out = []
    with torch.no_grad(), SharedNoise(model, names) as noise:
        for _ in range(draws):
            noise.draw(g)
            noise.apply(sigma)
            out.append(model(x))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(5, 3), (5,)),
        (nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()), (2, 3, 3)),
        (nn.Sequential(nn.Conv2d(4, 4, 2, groups=2), nn.Flatten()), (4, 3, 3)),
        (nn.Sequential(nn.Conv1d(2, 2, 2, stride=2, padding=1), nn.Flatten()), (2, 4)),
        (nn.Sequential(nn.Linear(3, 2), nn.Flatten()), (4, 3)),  # the same layer at four positions
        (nn.Sequential(nn.BatchNorm2d(2), nn.Flatten()), (2, 2, 2)),
        (nn.LayerNorm(4), (4,)),
        (nn.Sequential(nn.GroupNorm(1, 2), nn.Flatten()), (2, 3)),
        (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), (4,)),
    ],
    ids=["linear", "conv2d", "grouped", "conv1d", "positions", "batch norm", "layer norm", "group norm", "two layers"],
)
def test_example_noise_has_the_distribution_of_weight_noise(model, shape):
    """Means and full covariance of the outputs agree with perturbing the weights for each draw."""
    torch.manual_seed(0)
    model = copy.deepcopy(model).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, *shape, dtype=torch.float64)
    sigma, draws = 0.5, 6000
    ours, noise = sampled(model, x, sigma, draws)
    if not noise.independent:  # the examples of one batch share |z|, so each batch gives two draws only
        batch = x.expand(2, *x.shape[1:]).contiguous()
        g, out = generator(), []
        for _ in range(draws // 2):
            noise.start(batch, 2, g)
            with torch.no_grad(), noise:
                out.append(model(batch))
        ours = torch.cat(out)
    theirs = brute(model, x, sigma, draws)
    error = 5 * theirs.std(0) / draws**0.5 + 1e-9
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 2**0.5 * error).all()
    a, b = torch.atleast_2d(ours.T.cov()), torch.atleast_2d(theirs.T.cov())
    scale = torch.outer(b.diag().sqrt(), b.diag().sqrt()) + 1e-12
    assert ((a - b) / scale).abs().max() < 0.12


def test_examples_of_a_linear_network_are_independent_and_those_of_flipout_uncorrelated():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 4)
    for model, independent in (
        (nn.Sequential(nn.Flatten(), nn.Linear(32, 1)), True),
        (nn.Sequential(nn.Conv2d(2, 1, 4), nn.Flatten()), False),
    ):
        pairs = torch.stack([sampled(model, x, 0.5, 2, seed=seed)[0][:, 0] for seed in range(1500)])
        assert abs(torch.corrcoef(pairs.T)[0, 1]) < 0.09
        assert sampled(model, x, 0.5, 2)[1].independent is independent


def test_treatments():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.linear = nn.Embedding(5, 4), nn.Linear(4, 4)
            self.head, self.scale = nn.Linear(4, 5, bias=False), nn.Parameter(torch.ones(4))
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            x = self.embed(tokens)
            return self.head((self.linear(self.linear(x)) * self.scale).mean(1))

    model = Net().eval()
    noise = ExampleNoise(model, [name for name, _ in model.named_parameters()])
    tokens = torch.randint(5, (6, 3))
    with torch.no_grad():
        noise.probe(model, [(tokens, 6), (tokens[:5], 5)])
    assert noise.treatment == {
        "scale": "shared",
        "embed.weight": "shared",
        "linear.weight": "flipout",
        "linear.bias": "flipout",
    }


def test_an_axis_that_only_looks_like_the_batch_is_not_taken_for_it():
    """(length, batch, features) with length = batch: two batch sizes tell them apart."""

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x.transpose(0, 1)).mean(0)

    model = Transposed()
    noise = ExampleNoise(model, ["linear.weight"])
    x = torch.randn(4, 4, 3)
    with torch.no_grad():
        noise.probe(model, [(x, 4), (x[:3], 3)])
    assert noise.treatment == {"linear.weight": "shared"}


def test_a_parameter_used_in_a_new_way_is_an_error_and_not_forgotten():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.randn(2, 3)), False

        def forward(self, x):
            return x @ self.weight.T if self.other else F.linear(x, self.weight)

    model = Fickle()
    noise = ExampleNoise(model, ["weight"])
    x = torch.randn(4, 3)
    with torch.no_grad():
        noise.probe(model, [(x, 4)])
        model.other = True
        noise.start(x, 4, generator())
        noise.apply(0.1)
        with pytest.raises(RuntimeError, match="which it was not for the first batch"), noise:
            model(x)


def test_seeds_do_not_collide():
    seeds = {seed_of(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 8000 and all(0 <= seed < 2**63 for seed in seeds)
