"""One committee machine at a time, by autograd and the library's own optimizers: the oracle of the batched training.

Slow and plain on purpose. :mod:`wideflat.committee.training` must do the same, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from wideflat.committee.machine import CommitteeMachine, committee_loss
from wideflat.committee.randomness import dropout_mask, initial_weights, order
from wideflat.committee.settings import Setting
from wideflat.entropy_sgd import EntropySGD
from wideflat.replicas import ReplicaCoupling, Replicas

__all__ = ["train_one"]


def train_one(
    setting: Setting, inputs: Tensor, targets: Tensor, seed: int, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Tensor, float]]:
    """Train one restart, epoch by epoch, as long as the caller wants.

    Args:
        setting: What to do; the stopping rule is left to the caller.
        inputs: (P, N).
        targets: (P,), +1 or -1.
        seed: The restart.
        dtype: Type of the weights.

    Yields:
        After each epoch the weights (y, H, N) and what the stopping rule measures.
    """
    x, target = inputs.to(dtype), targets.to(dtype)
    y, hidden = setting.num_replicas, setting.hidden
    replicas = Replicas(lambda: CommitteeMachine(x.shape[1], hidden, dtype=dtype), num_replicas=y)
    machines = [machine for machine in replicas if isinstance(machine, CommitteeMachine)]
    for machine, weight in zip(machines, initial_weights(setting, seed, x.shape[1]), strict=True):
        machine.weight.data.copy_(weight)
    coupling = ReplicaCoupling(replicas, period=setting.period)
    optimizer = _optimizer(setting, replicas, seed)
    scale = setting.gradient_scale / setting.batch_size
    epoch = 0
    while True:
        orders = torch.from_numpy(order(setting, seed, epoch, len(x)))
        masks = torch.from_numpy(dropout_mask(setting, seed, epoch, len(x))).to(dtype) if setting.dropout else None
        coupling.gamma = setting.gamma(epoch)
        for group in optimizer.param_groups:
            group["gamma"] = setting.gamma(epoch)
        for machine in machines:
            machine.tanh_beta = setting.tanh_beta(epoch)
        distance = math.nan
        for passes in range(setting.passes):
            for start in range(0, len(x), setting.batch_size):
                batch = slice(start, start + setting.batch_size)
                optimizer.zero_grad()
                for a, machine in enumerate(machines):
                    chosen = orders[passes + a, batch]
                    mask = None if masks is None else masks[passes + a, :, batch].T
                    output = machine.surrogate(x[chosen], mask)
                    loss = scale * committee_loss(output, target[chosen], setting.omega(epoch), reduction="sum")
                    loss.backward()
                if setting.replicated:
                    coupling.couple()
                state = optimizer.state[machines[0].weight]
                center = state.get("center", machines[0].weight).detach().clone()
                optimizer.step()
                if isinstance(optimizer, EntropySGD) and optimizer.at_center:
                    away = (center - state["center"]) / setting.lr  # w has gone that part of its way to mu
                    distance = float(away.square().sum()) / 2
                for machine in machines:
                    machine.normalize_()
        with torch.no_grad():
            value = _rule(setting, replicas, x, target, epoch, distance)
            weights = torch.stack([machine.weight for machine in machines])
        yield weights, value
        epoch += 1


def _optimizer(setting: Setting, replicas: Replicas, seed: int) -> torch.optim.Optimizer:
    if not setting.has_inner_loop:
        return torch.optim.SGD(replicas.parameters(), lr=setting.lr)
    return EntropySGD(
        replicas.parameters(),
        lr=setting.lr,
        inner_lr=setting.inner_lr,
        inner_steps=setting.inner_steps,
        epsilon=setting.epsilon,
        alpha=setting.alpha,
        momentum=0.0,
        seed=seed,
    )


def _rule(setting: Setting, replicas: Replicas, x: Tensor, target: Tensor, epoch: int, distance: float) -> float:
    """What the stopping rule measures; ``distance`` is that of w from mu."""
    first = replicas[0]
    assert isinstance(first, CommitteeMachine)
    if setting.stop == "errors":
        return float((first.predict(x) != target).sum())
    if setting.stop == "loss":
        output = first.surrogate(x, x.new_ones(setting.hidden))
        return float(committee_loss(output, target, setting.omega(epoch)))
    return float(replicas.distances().mean()) if setting.replicated else distance
