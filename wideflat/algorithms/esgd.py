"""Entropy-SGD (Algorithm 1): one network, an explorer around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from wideflat.algorithms.algorithm import Algorithm, Gamma, base_optimizer
from wideflat.entropy_sgd import EntropySGD

if TYPE_CHECKING:
    from wideflat.presets import Preset


def make_optimizer(preset: Preset, parameters: list[nn.Parameter], seed: int) -> EntropySGD:
    """Entropy-SGD around SGD, or around the preset's other optimizer; ``seed`` is that of the Langevin noise."""
    x = preset
    return EntropySGD(
        parameters,
        lr=x.lr,
        inner_lr=x.inner_lr,
        inner_steps=x.inner_steps,
        gamma=x.gamma0 or 0.0,
        epsilon=x.epsilon,
        alpha=x.alpha,
        momentum=x.momentum,
        nesterov=x.nesterov,
        weight_decay=x.weight_decay,
        inner=None if x.optimizer == "sgd" else base_optimizer(x),
        seed=seed,
    )


ALGORITHM = Algorithm(
    name="esgd",
    words="Entropy-SGD (Algorithm 1), as many passes over the data as the baseline in all",
    make_optimizer=make_optimizer,
    gammas=(Gamma("optimizer"),),
    inner=True,
)
