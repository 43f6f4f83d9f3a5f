"""EfficientNet-B0 against the published numbers."""

import pytest
from architectures import CIFAR100, IMAGENET, check_shapes, count


@pytest.mark.parametrize(
    ("name", "arguments", "published", "source"),
    [
        (
            "efficientnet_b0",
            {"num_classes": IMAGENET},
            5_288_548,
            "torchvision model table, efficientnet_b0 (paper: 5.3M)",
        ),
        ("efficientnet_b0", {"num_classes": CIFAR100}, 4_135_648, "the row above - 900*(1280+1)"),
    ],
)
def test_parameter_count_is_the_published_one(name, arguments, published, source):
    assert count(name, **arguments) == published, source


@pytest.mark.parametrize(
    ("name", "arguments", "size", "shapes"),
    [
        # Tan and Le 2019, Table 1: the last block of each row.
        (
            "efficientnet_b0",
            {},
            224,
            {
                "stem": (32, 112, 112),
                "blocks.0": (16, 112, 112),
                "blocks.2": (24, 56, 56),
                "blocks.4": (40, 28, 28),
                "blocks.7": (80, 14, 14),
                "blocks.10": (112, 14, 14),
                "blocks.14": (192, 7, 7),
                "blocks.15": (320, 7, 7),
                "head": (1280, 7, 7),
            },
        ),
    ],
)
def test_layer_shapes_are_the_published_ones(name, arguments, size, shapes):
    check_shapes(name, arguments, size, shapes)
