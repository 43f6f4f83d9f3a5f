"""Lookahead: Entropy-SGD without noise, running mean and pull."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from wideflat.entropy_sgd import EntropySGD

__all__ = ["Lookahead"]


class Lookahead(EntropySGD):
    """Lookahead: fast weights take L steps, slow weights follow them part of the way (Zhang et al., 2019).

    It is Entropy-SGD without noise, running mean and pull: epsilon = alpha = gamma = 0 (Sec. 4), with no momentum in
    the outer loop, and inner momentum that restarts with each cycle. As in `wideflat.EntropySGD`, ``lr`` is the outer
    rate, the step of the slow weights, and ``inner_lr`` that of the fast ones.

    Args:
        params: Parameters, or groups of them.
        lr: How far the slow weights follow.
        inner_lr: Learning rate of the fast weights.
        inner_steps: Steps of the fast weights in a cycle.
        momentum: Momentum of the fast weights.
        nesterov: Nesterov momentum of the fast weights.
        weight_decay: Weight decay of the fast weights.
        inner: Another optimizer for the fast weights, and
        inner_state: whether its state is kept from cycle to cycle, see `wideflat.EntropySGD`; as for
        maximize:
        foreach:
        differentiable:
        capturable: and these.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.tensor(1.0))
        >>> opt = Lookahead([w], lr=0.5, inner_lr=0.1, inner_steps=2)
        >>> for _ in range(2):
        ...     w.grad = torch.tensor(1.0)
        ...     opt.step()
        >>> round(w.item(), 6)  # half of the way to 1 - 2 * 0.1
        0.9
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.5,
        inner_lr: float = 0.1,
        inner_steps: int = 5,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        inner: Callable[..., Optimizer] | None = None,
        inner_state: str | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            inner_lr=inner_lr,
            inner_steps=inner_steps,
            gamma=0.0,
            epsilon=0.0,
            alpha=0.0,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            outer_momentum=0.0,
            outer_nesterov=False,
            outer_weight_decay=0.0,
            inner=inner,
            inner_state=inner_state,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            capturable=capturable,
        )
