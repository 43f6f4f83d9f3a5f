"""Friendly SAM: e along what a mini-batch has of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.baselines.sam import SAM
from wideflat.checks import number
from wideflat.kernels.shards import like, local
from wideflat.kernels.together import chosen, put_

__all__ = ["FriendlySAM"]


class FriendlySAM(SAM):
    r"""F-SAM: the part of the gradient that all mini-batches share is taken out of e (Li et al., 2024).

    .. code-block:: text

        m <- decay m + (1 - decay) g,   g = grad Loss(w)
        e <- rho d / |d|,   d = g - sigma m
        w <- w - lr grad Loss(w + e)

    With ``sigma=0`` it is `wideflat.SAM`.

    Notes on the paper:
        - In the first step m is g, and e is SAM's: there is no past to take out. So does the authors' program.
        - Their program subtracts sigma times the m of before, which for sigma = 1 points the same way.

    Args:
        params: Parameters, or groups of them.
        base: The optimizer of the step, as for `wideflat.SAM`.
        rho: Radius of the neighbourhood.
        sigma: How much of the shared part is taken out.
        decay: Weight of the past in m; the paper calls it lambda.
        **settings: Further arguments of `wideflat.SAM`, and those of ``base``.

    With a `torch.amp.GradScaler` it is ``opt.perturb(scaler)``, never ``opt.perturb()``: m is of unscaled gradients.

    Example:
        After the gradients 1 and 3 with decay 0.5, m is 2 and d = 3 - 2 > 0: e is rho upwards.

        >>> w = torch.nn.Parameter(torch.tensor(0.0))
        >>> opt = FriendlySAM([w], rho=0.1, decay=0.5, lr=0.0)
        >>> for gradient in (1.0, 3.0):
        ...     w.grad = torch.tensor(gradient)
        ...     _ = opt.perturb()
        ...     w.grad = torch.tensor(gradient)
        ...     opt.restore(); opt.step()
        >>> opt.state_dict()["state"][0]["gradient_mean"].item()
        2.0
    """

    _remembered = "gradient_mean"

    def __init__(
        self,
        params: Iterable[Any],
        base: Callable[..., Optimizer] = torch.optim.SGD,
        rho: float = 0.05,
        sigma: float = 1.0,
        decay: float = 0.9,
        **settings: Any,
    ) -> None:
        self.sigma, self.decay = number("sigma", sigma, 0), number("decay", decay, 0, 1)
        super().__init__(params, base, rho, **settings)

    def _direction(self, params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        direction = dict(zip(params, gradients, strict=True))
        self._work.means = dict(direction)
        known = [p for p in params if self._steps and p in self._memory]
        if known:
            g = [direction[p] for p in known]
            before = [local(self._memory[p]).to(of_now) for p, of_now in zip(known, g, strict=True)]
            m = torch._foreach_lerp(before, g, 1 - self.decay)
            away = torch._foreach_sub(g, torch._foreach_mul(m, self.sigma))
            self._work.means.update(zip(known, m, strict=True))
            direction.update(zip(known, away, strict=True))
        return list(direction.values())

    def _take(self, params: list[Tensor], finite: Tensor) -> None:
        means = self._work.means
        kept = [torch.zeros_like(m) if p not in self._memory else local(self._memory[p]) for p, m in means.items()]
        found = chosen(finite, list(means.values()), kept)
        for p, m in means.items():
            if p not in self._memory or self._memory[p].dtype != m.dtype or self._memory[p].device != m.device:
                self._memory[p] = like(torch.empty_like(m), p)
        put_([self._memory[p] for p in means], found)
        self._work.means = {}

    def _kept(self) -> tuple[str, ...]:
        return (*super()._kept(), "sigma", "decay")
