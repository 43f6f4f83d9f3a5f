"""Kaiming normal everywhere but in SmallConvNet."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from wideflat import models


def fan_in(weight: torch.Tensor) -> int:
    return weight[0].numel()


@pytest.mark.parametrize("name", ["resnet110", "efficientnet_b0", "densenet121"])
def test_weights_are_kaiming_normal_and_biases_zero(name: str) -> None:
    torch.manual_seed(0)
    model = getattr(models, name)()
    checked = 0
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            scaled = module.weight.detach() * math.sqrt(fan_in(module.weight) / 2)
            n = scaled.numel()
            assert abs(scaled.mean()) < 6 / math.sqrt(n)
            assert abs(scaled.var() - 1) < 6 * math.sqrt(2 / n)
            if n > 10_000:  # normal, not uniform: kurtosis 3 with error sqrt(24 / n)
                assert abs((scaled**4).mean() / scaled.var() ** 2 - 3) < 8 * math.sqrt(24 / n)
            assert module.bias is None or not module.bias.any()
            checked += 1
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert not module.bias.any()
    assert checked > 50


def test_smallconvnet_keeps_the_default_of_pytorch() -> None:
    torch.manual_seed(0)
    ours = models.smallconvnet()
    torch.manual_seed(0)
    default = [nn.Conv2d(3, 20, 5), nn.Conv2d(20, 50, 5), nn.Linear(1250, 500), nn.Linear(500, 10)]
    expected = [p for layer in default for p in layer.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), expected, strict=True))


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second, third = (torch.nn.utils.parameters_to_vector(_seeded(seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def _seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.resnet110()
