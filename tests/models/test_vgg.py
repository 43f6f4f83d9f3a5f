"""The VGG of PGDL's first task against its numbers."""

import pytest
from architectures import CIFAR10, check_shapes, count

from wideflat import models


@pytest.mark.parametrize(
    ("name", "arguments", "published", "source"),
    [
        (
            "vgg3x512",
            {"num_classes": CIFAR10},
            12_863_370,
            "PGDL Task 1: 512*28 + 5*512*(4608+1) + 128*(8192+1) + 10*129",
        ),
    ],
)
def test_parameter_count_is_the_published_one(name, arguments, published, source):
    assert count(name, **arguments) == published, source


@pytest.mark.parametrize(
    ("name", "arguments", "size", "shapes"),
    [
        ("vgg3x512", {}, 32, {"features.4": (512, 16, 16), "features.9": (512, 8, 8), "features.14": (512, 4, 4)}),
    ],
)
def test_layer_shapes_are_the_published_ones(name, arguments, size, shapes):
    check_shapes(name, arguments, size, shapes)


def test_too_small_images_are_refused():
    with pytest.raises(ValueError, match="at least 8"):
        models.vgg3x512(image_size=7)
