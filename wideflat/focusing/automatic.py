"""A first gamma from the data: loss and pull of equal size (App. C)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from wideflat.checks import function, number, shown

if TYPE_CHECKING:
    from wideflat.entropy_sgd import EntropySGD

__all__ = ["automatic_gamma0"]


def automatic_gamma0(
    optimizer: EntropySGD, closure: Callable[[], torch.Tensor | float], loss: float | None = None
) -> float:
    r"""gamma0 = L(w) / d(w', w) for Entropy-SGD: loss and pull of equal size after one loop with gamma = 0 (App. C).

    It runs L inner steps without the pull, measures how far w' got (d is half the squared distance), and puts
    everything back as it was, so training starts afresh. The paper calls this criterion not robust: take its order of
    magnitude. Batch-norm statistics and the mini-batches drawn are the model's and the loader's, and not put back.

    Args:
        optimizer: At the start of a cycle.
        closure: Draws a mini-batch, clears the gradients, calls backward, and returns the loss; called L times.
        loss: L(w), if a better value is known than the first mini-batch gives.

    Returns:
        gamma0, to be written into the param groups or given to `Focusing`.

    Example:
        On the loss w^2/2 at w = 2 one step of 0.5 goes to w' = 1: L(w) = 2, d = 1/2:

        >>> import wideflat
        >>> w = torch.nn.Parameter(torch.tensor(2.0))
        >>> opt = wideflat.EntropySGD([w], inner_lr=0.5, inner_steps=1, epsilon=0.0, momentum=0)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = w**2 / 2
        ...     loss.backward()
        ...     return loss
        >>> automatic_gamma0(opt, closure), w.item()
        (4.0, 2.0)
    """
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "at_center"):
        raise TypeError(f"optimizer must be an EntropySGD, got {shown(optimizer)}")
    function("closure", closure)
    if not optimizer.at_center:
        raise ValueError("automatic_gamma0 needs an optimizer at the start of a cycle; call optimizer.flush() first")
    state = copy.deepcopy(optimizer.state_dict())
    params = [p for group in optimizer.param_groups for p in group["params"]]
    weights = [p.detach().clone() for p in params]
    first: float | None = None
    try:
        inner_steps = optimizer.param_groups[0]["inner_steps"]
        for group in optimizer.param_groups:
            group["gamma"] = 0.0
            group["inner_steps"] = inner_steps + 1  # so that the cycle stays open for the measurement
        for _ in range(inner_steps):
            value = torch.as_tensor(optimizer.step(closure)).detach().item()
            first = value if first is None else first
        distance = optimizer.distance().item()
    finally:
        with torch.no_grad():
            for p, weight in zip(params, weights, strict=True):
                p.copy_(weight)
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
    assert first is not None
    loss = first if loss is None else loss
    if not distance > 0:
        raise ValueError(
            f"w' did not move in {inner_steps} steps (d = {distance}): is inner_lr > 0, are there gradients?"
        )
    return number("loss", loss) / distance
