"""Networks without memory behind their weights, and what is compared with the published numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from wideflat import models

CIFAR10, CIFAR100, TINY, IMAGENET = 10, 100, 200, 1000


def build(name: str, **arguments: object) -> nn.Module:
    """The network without memory behind its weights."""
    make: Callable[..., nn.Module] = getattr(models, name)
    with torch.device("meta"):
        return make(**arguments)


def count(name: str, **arguments: object) -> int:
    """Its trainable parameters."""
    return sum(p.numel() for p in build(name, **arguments).parameters())


def check_shapes(name: str, arguments: dict, size: int, shapes: dict[str, tuple[int, ...]]) -> None:
    """Layers give outputs of these shapes for one image."""
    model = build(name, **arguments)
    seen: dict[str, tuple[int, ...]] = {}
    for layer in shapes:
        module = model.get_submodule(layer)
        module.register_forward_hook(lambda m, i, out, layer=layer: seen.update({layer: tuple(out.shape[1:])}))
    model(torch.empty(2, 3, size, size, device="meta"))
    assert seen == shapes


def depth(name: str, **arguments: object) -> int:
    """Layers with weights, but for those of shortcuts."""
    modules = build(name, **arguments).named_modules()
    return sum(isinstance(m, (nn.Conv2d, nn.Linear)) and ".shortcut" not in layer for layer, m in modules)
