"""Every architecture at any image size and number of classes, in any memory format, stacked."""

from __future__ import annotations

import pytest
import torch
from architectures import build

from wideflat import models

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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "classes", "channels"), [(48, 2, 1)])
def test_any_image_size_and_number_of_classes(name: str, size: int, classes: int, channels: int) -> None:
    sized = {"image_size": size} if name in ("smallconvnet", "vgg3x512") else {}
    model = build(name, num_classes=classes, in_channels=channels, **sized)
    assert model(torch.empty(3, channels, size, size, device="meta")).shape == (3, classes)


@pytest.mark.parametrize("name", ["resnet18", "resnet110", "efficientnet_b0", "densenet121"])
def test_odd_image_sizes(name: str) -> None:
    assert build(name)(torch.empty(2, 3, 33, 33, device="meta")).shape[0] == 2


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
