"""SNOO: Nesterov momentum on the steps between snapshots of any optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from wideflat.entropic import Entropic

__all__ = ["SNOO"]


class SNOO(Entropic):
    r"""SNOO, a step-K Nesterov outer optimizer (Kallusky et al., 2025): DiLoCo with one worker.

    .. code-block:: text

        for t = 1, 2, ...
            w' <- w
            K steps of the inner optimizer on w'
            b <- outer_momentum b + (w - w')
            w <- w - outer_lr (outer_momentum b + (w - w'))

    It is `wideflat.Entropic` without pull, noise and running mean. Without outer momentum it is `wideflat.Lookahead`
    around an optimizer that keeps its state.

    Args:
        *optimizers: The inner optimizers, made as usual.
        inner_steps: K.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Its Nesterov momentum.
        **settings: ``inner_state``, ``state_dtype`` and ``state_device`` of `wideflat.Entropic`.

    Example:
        One step of SGD with rate 0.5 on the gradient 1 goes to 0.5; the first outer step is 1.67 * 0.67 times as long:

        >>> import torch
        >>> w = torch.nn.Parameter(torch.tensor(1.0))
        >>> opt = SNOO(torch.optim.SGD([w], lr=0.5), inner_steps=1)
        >>> w.grad = torch.tensor(1.0)
        >>> opt.step()
        >>> round(w.item(), 5)  # 1 - 0.67 * 1.67 * 0.5
        0.44055
    """

    def __init__(
        self,
        *optimizers: Optimizer,
        inner_steps: int = 20,
        outer_lr: float = 0.67,
        outer_momentum: float = 0.67,
        **settings: Any,
    ) -> None:
        outer: dict[str, Any] = {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
        super().__init__(*optimizers, inner_steps=inner_steps, pull=0.0, **outer, **settings)
