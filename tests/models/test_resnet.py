"""ResNets against the published numbers."""

import pytest
from architectures import CIFAR10, IMAGENET, TINY, build, check_shapes, count, depth


@pytest.mark.parametrize(
    ("name", "arguments", "published", "source"),
    [
        ("resnet18", {"num_classes": CIFAR10}, 11_173_962, "kuangliu/pytorch-cifar, ResNet18"),
        ("resnet18", {"num_classes": IMAGENET, "stem": "imagenet"}, 11_689_512, "torchvision model table, resnet18"),
        ("resnet50", {"num_classes": CIFAR10}, 23_520_842, "kuangliu/pytorch-cifar, ResNet50"),
        ("resnet50", {"num_classes": TINY}, 23_910_152, "the row above + 190*(2048+1)"),
        ("resnet50", {"num_classes": IMAGENET, "stem": "imagenet"}, 25_557_032, "torchvision model table, resnet50"),
        (
            "resnet110",
            {"num_classes": CIFAR10},
            1_727_962,
            "He et al. 2016, Table 6 (1.7M); akamaster/pytorch_resnet_cifar10",
        ),
        ("resnet110", {"num_classes": CIFAR10, "option": "B"}, 1_730_714, "osmr/pytorchcv, resnet110_cifar10"),
    ],
)
def test_parameter_count_is_the_published_one(name, arguments, published, source):
    assert count(name, **arguments) == published, source


@pytest.mark.parametrize(
    ("name", "arguments", "size", "shapes"),
    [
        (
            "resnet18",
            {},
            32,
            {
                "conv1": (64, 32, 32),
                "stages.0": (64, 32, 32),
                "stages.1": (128, 16, 16),
                "stages.2": (256, 8, 8),
                "stages.3": (512, 4, 4),
            },
        ),
        (
            "resnet50",
            {"stem": "imagenet"},
            224,
            {
                "conv1": (64, 112, 112),
                "stages.0": (256, 56, 56),
                "stages.1": (512, 28, 28),
                "stages.2": (1024, 14, 14),
                "stages.3": (2048, 7, 7),
            },
        ),  # He et al. 2016, Table 1
        ("resnet50", {}, 64, {"stages.0": (256, 64, 64), "stages.3": (2048, 8, 8)}),
        ("resnet110", {}, 32, {"stages.0": (16, 32, 32), "stages.1": (32, 16, 16), "stages.2": (64, 8, 8)}),
    ],
)
def test_layer_shapes_are_the_published_ones(name, arguments, size, shapes):
    check_shapes(name, arguments, size, shapes)


def test_the_number_in_the_name_is_the_number_of_layers():
    assert depth("resnet18") == 18
    assert depth("resnet50") == 50
    assert depth("resnet110", option="A") == 110


def test_an_unknown_stem_is_refused():
    with pytest.raises(ValueError, match=r'"cifar" or "imagenet"'):
        build("resnet18", stem="mnist")
