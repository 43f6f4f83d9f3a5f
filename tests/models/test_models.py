"""Every architecture against the published numbers, at any image size and number of classes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from wideflat import models

CIFAR10, CIFAR100, TINY, IMAGENET = 10, 100, 200, 1000

# (name, arguments, trainable parameters, source of the number)
PUBLISHED: list[tuple[str, dict, int, str]] = [
    ("smallconvnet", {"num_classes": CIFAR10}, 657_080, "20*(75+1) + 50*(500+1) + 500*(1250+1) + 10*(500+1)"),
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
    ("pyramidnet272", {"num_classes": CIFAR10}, 26_210_842, "osmr/pytorchcv, pyramidnet272_a200_bn_cifar10"),
    ("pyramidnet272", {"num_classes": CIFAR100}, 26_288_692, "osmr/pytorchcv, pyramidnet272_a200_bn_cifar100"),
    ("efficientnet_b0", {"num_classes": IMAGENET}, 5_288_548, "torchvision model table, efficientnet_b0 (paper: 5.3M)"),
    ("efficientnet_b0", {"num_classes": CIFAR100}, 4_135_648, "the row above - 900*(1280+1)"),
    ("densenet121", {"num_classes": IMAGENET, "stem": "imagenet"}, 7_978_856, "torchvision model table, densenet121"),
    ("densenet121", {"num_classes": CIFAR10}, 6_956_298, "kuangliu/pytorch-cifar, DenseNet121"),
    ("densenet121", {"num_classes": TINY}, 7_151_048, "the row above + 190*(1024+1)"),
    ("vgg3x512", {"num_classes": CIFAR10}, 12_863_370, "PGDL Task 1: 512*28 + 5*512*(4608+1) + 128*(8192+1) + 10*129"),
]

# (name, arguments, image size, {layer: shape of its output for one image})
SHAPES: list[tuple[str, dict, int, dict[str, tuple[int, ...]]]] = [
    ("smallconvnet", {}, 32, {"conv1": (20, 28, 28), "conv2": (50, 10, 10), "dense1": (500,)}),
    ("resnet18", {}, 32, {"conv1": (64, 32, 32), "stages.0": (64, 32, 32), "stages.1": (128, 16, 16),
                          "stages.2": (256, 8, 8), "stages.3": (512, 4, 4)}),
    ("resnet50", {"stem": "imagenet"}, 224, {"conv1": (64, 112, 112), "stages.0": (256, 56, 56),
                                             "stages.1": (512, 28, 28), "stages.2": (1024, 14, 14),
                                             "stages.3": (2048, 7, 7)}),  # He et al. 2016, Table 1
    ("resnet50", {}, 64, {"stages.0": (256, 64, 64), "stages.3": (2048, 8, 8)}),
    ("resnet110", {}, 32, {"stages.0": (16, 32, 32), "stages.1": (32, 16, 16), "stages.2": (64, 8, 8)}),
    # Han et al. 2017, Table 1: 16 + 200 k / 90 channels, times 4, after block k; blocks 30 and 60 halve the image.
    ("pyramidnet272", {}, 32, {"conv1": (16, 32, 32), "blocks.0": (4 * 18, 32, 32), "blocks.29": (4 * 83, 32, 32),
                               "blocks.30": (4 * 85, 16, 16), "blocks.60": (4 * 152, 8, 8), "blocks.89": (864, 8, 8)}),
    # Tan and Le 2019, Table 1: the last block of each row.
    ("efficientnet_b0", {}, 224, {"stem": (32, 112, 112), "blocks.0": (16, 112, 112), "blocks.2": (24, 56, 56),
                                  "blocks.4": (40, 28, 28), "blocks.7": (80, 14, 14), "blocks.10": (112, 14, 14),
                                  "blocks.14": (192, 7, 7), "blocks.15": (320, 7, 7), "head": (1280, 7, 7)}),
    # Huang et al. 2017, Table 1.
    ("densenet121", {"stem": "imagenet"}, 224, {"stem": (64, 56, 56), "blocks.0": (256, 56, 56),
                                                "blocks.1": (128, 28, 28), "blocks.2": (512, 28, 28),
                                                "blocks.4": (1024, 14, 14), "blocks.6": (1024, 7, 7)}),
    ("vgg3x512", {}, 32, {"features.4": (512, 16, 16), "features.9": (512, 8, 8), "features.14": (512, 4, 4)}),
]  # fmt: skip

NAMES = [
    "smallconvnet",
    "resnet18",
    "resnet50",
    "resnet110",
    "pyramidnet272",
    "efficientnet_b0",
    "densenet121",
    "vgg3x512",
]


def build(name: str, **arguments: object) -> nn.Module:
    """The network without memory behind its weights."""
    make: Callable[..., nn.Module] = getattr(models, name)
    with torch.device("meta"):
        return make(**arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "count", "source"), PUBLISHED, ids=lambda v: str(v) if v in NAMES else ""
)
def test_parameter_count_is_the_published_one(name: str, arguments: dict, count: int, source: str) -> None:
    assert sum(p.numel() for p in build(name, **arguments).parameters()) == count, source


@pytest.mark.parametrize(("name", "arguments", "size", "shapes"), SHAPES, ids=lambda v: str(v) if v in NAMES else "")
def test_layer_shapes_are_the_published_ones(name: str, arguments: dict, size: int, shapes: dict) -> None:
    model = build(name, **arguments)
    seen: dict[str, tuple[int, ...]] = {}
    for layer in shapes:
        module = model.get_submodule(layer)
        module.register_forward_hook(lambda m, i, out, layer=layer: seen.update({layer: tuple(out.shape[1:])}))
    model(torch.empty(2, 3, size, size, device="meta"))
    assert seen == shapes


def test_the_number_in_the_name_is_the_number_of_layers() -> None:
    for name, depth in [("resnet18", 18), ("resnet50", 50), ("resnet110", 110), ("pyramidnet272", 272)]:
        arguments = {"option": "A"} if name == "resnet110" else {}
        layers = [
            layer
            for layer, module in build(name, **arguments).named_modules()
            if isinstance(module, (nn.Conv2d, nn.Linear)) and ".shortcut" not in layer
        ]
        assert len(layers) == depth, name
    assert sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in build("densenet121").modules()) == 121


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "classes", "channels"), [(48, 2, 1)])
def test_any_image_size_and_number_of_classes(name: str, size: int, classes: int, channels: int) -> None:
    sized = {"image_size": size} if name in ("smallconvnet", "vgg3x512") else {}
    model = build(name, num_classes=classes, in_channels=channels, **sized)
    assert model(torch.empty(3, channels, size, size, device="meta")).shape == (3, classes)


@pytest.mark.parametrize("name", ["resnet18", "resnet110", "efficientnet_b0", "densenet121"])
def test_odd_image_sizes(name: str) -> None:
    assert build(name)(torch.empty(2, 3, 33, 33, device="meta")).shape[0] == 2


def test_too_small_images_and_unknown_stems_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        models.smallconvnet(image_size=15)
    with pytest.raises(ValueError, match="at least 8"):
        models.vgg3x512(image_size=7)
    with pytest.raises(ValueError, match=r'"cifar" or "imagenet"'):
        build("resnet18", stem="mnist")
    with pytest.raises(ValueError, match=r'"cifar" or "imagenet"'):
        build("densenet121", stem="mnist")


def test_smallconvnet_is_the_layer_by_layer_network() -> None:
    torch.manual_seed(0)
    model = models.smallconvnet()
    x = torch.randn(4, 3, 32, 32)
    naive = nn.Sequential(
        model.conv1, nn.ReLU(), nn.MaxPool2d(2), model.conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), model.dense1,
        nn.ReLU(), model.dense2,
    )  # fmt: skip
    torch.testing.assert_close(model(x), naive(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["smallconvnet", "resnet18", "resnet110", "efficientnet_b0"])
def test_channels_last_gives_the_same_scores(name: str) -> None:
    torch.manual_seed(0)
    model = getattr(models, name)(num_classes=5).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        actual = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_weights_can_be_stacked_and_vmapped() -> None:
    """Many perturbed copies at once, as the local energy and the replicas want."""
    torch.manual_seed(0)
    model = models.resnet110().eval()
    weights = {name: torch.stack([p, 1.1 * p]) for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        both = torch.func.vmap(lambda w: torch.func.functional_call(model, (w, buffers), (x,)))(weights)
        torch.testing.assert_close(both[0], model(x), rtol=1e-3, atol=1e-3)
    assert both.shape == (2, 2, 10)
