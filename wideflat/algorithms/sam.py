"""Sharpness-aware minimisation: the gradient at the worst point of a small ball."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from wideflat.algorithms.algorithm import Algorithm, base_optimizer, on_baseline
from wideflat.baselines.sam import SAM

if TYPE_CHECKING:
    from wideflat.presets import Preset


def make_optimizer(preset: Preset, parameters: list[nn.Parameter], seed: int) -> SAM:
    """SAM around the optimizer that the preset names."""
    return SAM(parameters, base_optimizer(preset), rho=preset.rho, lr=preset.lr)


def settings(row: Mapping[str, Preset]) -> Preset:
    """The baseline's settings and the customary radius."""
    note = ("epochs", "as many passes as the baseline, but two gradients for each mini-batch")
    return on_baseline(row["sgd"], row, "sam", note, rho=0.05)


ALGORITHM = Algorithm(
    name="sam",
    words="sharpness-aware minimisation: the gradient at the worst point of a small ball",
    make_optimizer=make_optimizer,
    closure=True,
    moves_center=False,
    settings=settings,
)
