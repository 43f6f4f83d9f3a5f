"""The first layer at many points from a few products: what it gives is what the layer itself gives there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wideflat import slices
from wideflat.noise.first_layer import FirstLayer
from wideflat.noise.shared_noise import SharedNoise


def generator():
    return torch.Generator().manual_seed(0)


def must_agree(model, x):
    """The network with the layer's products against the network with the weights perturbed."""
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad(), SharedNoise(model, names) as noise:
        layer = FirstLayer(model, noise.originals(), [noise.directions()])
        noise.draw(generator())
        layer.start(x)
        for sigma in (0.1, 0.7):
            noise.apply(sigma)
            expected = model(x)
            layer.at(sigma)
            with layer:
                torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("first", [nn.Linear(6, 4), nn.Conv1d(2, 4, 2), nn.Linear(6, 4, bias=False)])
def test_the_first_layer_is_linear_in_sigma(first):
    x = torch.randn(5, 2, 3) if isinstance(first, nn.Conv1d) else torch.randn(5, 6)
    model = nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    model(x)
    must_agree(model, x)


class Twice(nn.Module):
    """One weight, the input seen in two ways."""

    def __init__(self, weight, function):
        super().__init__()
        self.weight, self.bias, self.function = nn.Parameter(weight), nn.Parameter(torch.randn(len(weight))), function

    def forward(self, x):
        return self.function(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Twice(torch.randn(4, 4), lambda x, w, b: F.linear(x, w) + F.linear(x.transpose(1, 2), w)), (5, 4, 4)),
        (
            Twice(
                torch.randn(3, 4),
                lambda x, w, b: F.linear(x, w) + F.linear(x.reshape(5, 2, 2, 2).mT.reshape(5, 2, 4), w),
            ),
            (5, 2, 4),
        ),
        (
            Twice(
                torch.randn(2, 2, 3), lambda x, w, b: F.conv1d(x, w, padding=1) + F.conv1d(x, w, padding=2, dilation=2)
            ),
            (5, 2, 6),
        ),
        (Twice(torch.randn(3, 4), lambda x, w, b: F.linear(x, w, b) + F.linear(x, w)), (5, 4)),
        (Twice(torch.randn(3, 4), lambda x, w, b: F.linear(x, w, b * b)), (5, 4)),
        (Twice(torch.randn(3, 4), lambda x, w, b: F.linear(x, w * 1) + F.linear(x, w)), (5, 4)),
    ],
    ids=["transpose", "view", "dilation", "bias", "computed bias", "computed weight"],
)
def test_a_product_is_kept_for_what_it_is_the_product_of(model, shape):
    x = torch.randn(shape)
    must_agree(model, x)


def test_two_directions_and_memory_that_is_used_again():
    """One layer called twice on the same input, and what comes out of it written into."""
    model = Twice(torch.randn(4, 3), lambda x, w, b: F.linear(x, w, b).relu_() + F.linear(x, w, b).neg_()).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    ways = [{name: torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(2)]
    with torch.no_grad(), SharedNoise(model, ["weight", "bias"]) as change:
        flat = [change.flattened(way) for way in ways]
        layer = FirstLayer(model, change.originals(), ways, reuse=True)
        layer.start(x)
        for point in ((0.1, 0.2), (0.1, -1.0), (0.5, -1.0), (0.0, 0.0), (0.0, 2.0)):
            change.move(point, flat)
            weight, bias = (p + sum(t * d[n] for t, d in zip(point, ways, strict=True))
                            for n, p in change.originals().items())  # fmt: skip
            expected = F.linear(x, weight, bias).relu() - F.linear(x, weight, bias)
            torch.testing.assert_close(model(x), expected)
            layer.at(*point)
            with layer:
                torch.testing.assert_close(model(x), expected)


def test_values_that_are_the_memory_of_the_first_layer_are_kept_point_by_point():
    model = nn.Linear(1, 1, bias=False).double()
    data = torch.ones(4, 1, dtype=torch.float64), torch.ones(4)
    other = {"weight": model.weight.detach() + 1}
    found = slices(model, data, other, positions=[0.0, 1.0, 2.0], metric=lambda out, _: out[:, 0], progress=False)
    assert found.mean.tolist() == pytest.approx([0.0, 1.0, 2.0])
