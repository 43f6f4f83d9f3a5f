"""The baseline: SGD or RMSprop, one network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from wideflat.algorithms.algorithm import Algorithm, base_optimizer

if TYPE_CHECKING:
    from wideflat.presets import Preset


def make_optimizer(preset: Preset, parameters: list[nn.Parameter], seed: int) -> Optimizer:
    """The optimizer that the preset names."""
    return base_optimizer(preset)(parameters, lr=preset.lr)


ALGORITHM = Algorithm(
    name="sgd",
    words="the baseline: SGD (RMSprop for EfficientNet)",
    make_optimizer=make_optimizer,
    moves_center=False,
)
