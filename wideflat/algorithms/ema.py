r"""Exponential averaging of the weights (EMA): the baseline, and beside it a running mean of its weights.

.. code-block:: text

    w    <- w - a step of the baseline
    mean <- a mean + (1 - a) w,      a = min(alpha, (1 + t) / (10 + t)) at step t = 0, 1, ...

The mean starts at the weights after the first step. In the beginning, when ``alpha`` would hold on to the initial
weights, it looks back over a part of the steps only. The network trains as the baseline does; the center is the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from wideflat.algorithms.algorithm import Algorithm, base_optimizer, on_baseline
from wideflat.kernels.shards import is_sharded, local
from wideflat.replicas import ReplicaCoupling

if TYPE_CHECKING:
    from wideflat.presets import Preset


def make_optimizer(preset: Preset, parameters: list[nn.Parameter], seed: int) -> Optimizer:
    """The optimizer that the preset names, which takes the mean after each of its steps and keeps it in its state."""
    optimizer = base_optimizer(preset)(parameters, lr=preset.lr)
    for group in optimizer.param_groups:
        group["averaged"] = 0
        if group.get("fused") and any(is_sharded(p) for p in group["params"]):
            group["fused"] = False  # torch has no such step of sharded tensors

    @torch.no_grad()
    def average(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            w = [p.detach() for p in group["params"] if p.grad is not None]
            states = [optimizer.state[p] for p in group["params"] if p.grad is not None]
            means = [local(state.setdefault("mean", p.clone())) for state, p in zip(states, w, strict=True)]
            t = group["averaged"]
            get_ema_multi_avg_fn(min(preset.alpha, (1 + t) / (10 + t)))(means, [local(p) for p in w], t)
            group["averaged"] = t + 1

    optimizer.register_step_post_hook(average)
    return optimizer


@torch.no_grad()
def center(copy: nn.Module, optimizers: Sequence[Optimizer], coupling: ReplicaCoupling | None) -> None:
    """The mean; before the first step, and where there was never a gradient, the weights themselves."""
    (optimizer,) = optimizers
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for target, p in zip(copy.parameters(), trained, strict=True):
        target.copy_(optimizer.state.get(p, {}).get("mean", p))


def settings(row: Mapping[str, Preset]) -> Preset:
    """The baseline's settings, and a mean over the last thousand steps or so."""
    note = ("alpha", "weight of the past in the running mean of the weights: 0.999, as is customary")
    return on_baseline(row["sgd"], row, "ema", note, alpha=0.999)


ALGORITHM = Algorithm(
    name="ema",
    words="the baseline with an exponential moving average of its weights",
    make_optimizer=make_optimizer,
    center=center,
    settings=settings,
)
