"""Lookahead: Entropy-SGD without noise, running mean and pull. The schedule drives its inner rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from wideflat.algorithms.algorithm import Algorithm, base_optimizer, on_baseline
from wideflat.baselines.lookahead import Lookahead

if TYPE_CHECKING:
    from wideflat.presets import Preset


def make_optimizer(preset: Preset, parameters: list[nn.Parameter], seed: int) -> Lookahead:
    """Slow weights behind SGD, or behind the preset's other optimizer."""
    x = preset
    if x.optimizer == "sgd":
        fast: dict[str, Any] = {"momentum": x.momentum, "nesterov": x.nesterov, "weight_decay": x.weight_decay}
        return Lookahead(parameters, lr=x.lr, inner_lr=x.inner_lr, inner_steps=x.inner_steps, **fast)
    return Lookahead(parameters, lr=x.lr, inner_lr=x.inner_lr, inner_steps=x.inner_steps, inner=base_optimizer(x))


def settings(row: Mapping[str, Preset]) -> Preset:
    """The baseline's rate inside, half of the way outside, cycles and epochs as Entropy-SGD has."""
    sgd, esgd = row["sgd"], row["esgd"]
    cell = on_baseline(
        sgd,
        row,
        "lookahead",
        ("schedule", "drives the inner learning rate; the outer one is constant"),
        lr=0.5,
        inner_lr=sgd.lr,
        inner_steps=esgd.inner_steps,
    )
    return cell.with_epochs(esgd.epochs)


ALGORITHM = Algorithm(
    name="lookahead",
    words="Entropy-SGD with epsilon = alpha = gamma = 0",
    make_optimizer=make_optimizer,
    drives="inner_lr",
    inner=True,
    settings=settings,
)
