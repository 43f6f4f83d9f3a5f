"""DenseNet-121 against the published numbers."""

import pytest
from architectures import CIFAR10, IMAGENET, TINY, build, check_shapes, count
from torch import nn


@pytest.mark.parametrize(
    ("name", "arguments", "published", "source"),
    [
        (
            "densenet121",
            {"num_classes": IMAGENET, "stem": "imagenet"},
            7_978_856,
            "torchvision model table, densenet121",
        ),
        ("densenet121", {"num_classes": CIFAR10}, 6_956_298, "kuangliu/pytorch-cifar, DenseNet121"),
        ("densenet121", {"num_classes": TINY}, 7_151_048, "the row above + 190*(1024+1)"),
    ],
)
def test_parameter_count_is_the_published_one(name, arguments, published, source):
    assert count(name, **arguments) == published, source


@pytest.mark.parametrize(
    ("name", "arguments", "size", "shapes"),
    [
        # Huang et al. 2017, Table 1.
        (
            "densenet121",
            {"stem": "imagenet"},
            224,
            {
                "stem": (64, 56, 56),
                "blocks.0": (256, 56, 56),
                "blocks.1": (128, 28, 28),
                "blocks.2": (512, 28, 28),
                "blocks.4": (1024, 14, 14),
                "blocks.6": (1024, 7, 7),
            },
        ),
    ],
)
def test_layer_shapes_are_the_published_ones(name, arguments, size, shapes):
    check_shapes(name, arguments, size, shapes)


def test_the_number_in_the_name_is_the_number_of_layers():
    assert sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in build("densenet121").modules()) == 121


def test_an_unknown_stem_is_refused():
    with pytest.raises(ValueError, match=r'"cifar" or "imagenet"'):
        build("densenet121", stem="mnist")
