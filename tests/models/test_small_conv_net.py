"""SmallConvNet against its numbers, and layer by layer."""

import pytest
import torch
from architectures import CIFAR10, check_shapes, count
from torch import nn

from wideflat import models


@pytest.mark.parametrize(
    ("name", "arguments", "published", "source"),
    [
        ("smallconvnet", {"num_classes": CIFAR10}, 657_080, "20*(75+1) + 50*(500+1) + 500*(1250+1) + 10*(500+1)"),
    ],
)
def test_parameter_count_is_the_published_one(name, arguments, published, source):
    assert count(name, **arguments) == published, source


@pytest.mark.parametrize(
    ("name", "arguments", "size", "shapes"),
    [
        ("smallconvnet", {}, 32, {"conv1": (20, 28, 28), "conv2": (50, 10, 10), "dense1": (500,)}),
    ],
)
def test_layer_shapes_are_the_published_ones(name, arguments, size, shapes):
    check_shapes(name, arguments, size, shapes)


def test_too_small_images_are_refused():
    with pytest.raises(ValueError, match="at least 16"):
        models.smallconvnet(image_size=15)


def test_it_is_the_layer_by_layer_network():
    torch.manual_seed(0)
    model = models.smallconvnet()
    x = torch.randn(4, 3, 32, 32)
    naive = nn.Sequential(
        model.conv1, nn.ReLU(), nn.MaxPool2d(2), model.conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), model.dense1,
        nn.ReLU(), model.dense2,
    )  # fmt: skip
    torch.testing.assert_close(model(x), naive(x), rtol=0, atol=0)
