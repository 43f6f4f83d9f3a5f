"""Noise on parameters: one z for each example."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wideflat.noise.example_noise import ExampleNoise
from wideflat.noise.shared_noise import SharedNoise


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


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


def test_the_product_of_a_computed_weight_is_not_kept():
    """weight_norm, masks, parametrizations: the tensor is a temporary, and its place in memory comes again."""

    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.bias = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.zeros(3))
            self.register_buffer("v", torch.randn(3, 4))
            self.register_buffer("weight", torch.empty(3, 4))  # the same object in every call

        def forward(self, x):
            torch.mul(self.v, self.scale, out=self.weight)
            return F.linear(x, self.weight, self.bias)

    model, x = Computed(), torch.randn(6, 4)
    noise = ExampleNoise(model, ["scale", "bias"])
    with torch.no_grad():
        noise.probe(model, [(x, 6), (x[:5], 5)])
        assert noise.treatment == {"scale": "shared", "bias": "independent"}
        noise.start(x, 6, generator())
        for scale in (1.0, 3.0):
            model.scale.fill_(scale)
            noise.apply(0.5)
            with noise:
                torch.testing.assert_close(model(x), scale * F.linear(x, model.v))


@pytest.mark.parametrize(
    "see",
    [
        lambda x, w: F.linear(x, w) + F.linear(x.transpose(1, 2), w),
        lambda x, w: F.conv1d(x, w[:, :, None]) + F.conv1d(x.transpose(1, 2), w[:, :, None]),
    ],
    ids=["linear", "computed kernel"],
)
def test_the_input_seen_in_two_ways_has_two_products(see):
    """The change is linear in sigma: with the noise of one batch, that at 0.2 is twice that at 0.1."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return see(x, self.w)

    model, x = Twice(), torch.randn(6, 4, 4)
    noise = ExampleNoise(model, ["w"])
    with torch.no_grad():
        noise.probe(model, [(x, 6), (x[:5], 5)])
        noise.start(x, 6, generator())
        base, out = model(x), []
        for sigma in (0.1, 0.2):
            noise.apply(sigma)
            with noise:
                out.append(model(x) - base)
        torch.testing.assert_close(2 * out[0], out[1], atol=1e-5, rtol=1e-4)
        if noise.treatment["w"] == "flipout":
            noise.recording = True
            noise.apply(0.2)
            with noise:
                fast = model(x)
            moved = model.w + 0.2 * noise.directions(3)["w"]
            torch.testing.assert_close(fast[3:4], see(x[3:4], moved), atol=1e-5, rtol=1e-4)
