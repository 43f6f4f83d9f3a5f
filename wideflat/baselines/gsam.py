"""GSAM: SAM that also closes the gap between the loss at w + e and the loss at w."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.baselines.sam import SAM
from wideflat.checks import number
from wideflat.kernels.shards import like, local
from wideflat.kernels.together import inner_product, times

__all__ = ["GSAM"]


class GSAM(SAM):
    r"""Surrogate gap guided SAM: a step down at w + e that does not go down at w itself (Zhuang et al., 2022).

    .. code-block:: text

        rho_t <- rho_min + (rho - rho_min) (lr_t - lr_min) / (lr_max - lr_min)         rho itself without rho_min
        e <- rho_t g / |g|,   g = grad Loss(w)
        p <- grad Loss(w + e)
        g = g_parallel + g_vertical                        along p, and at right angles to it
        w <- w - lr (p - alpha g_vertical)

    With ``alpha=0`` it is `wideflat.SAM`.

    Args:
        params: Parameters, or groups of them.
        base: The optimizer of the step, as for `wideflat.SAM`.
        rho: Radius of the neighbourhood; at the largest learning rate, if there is a ``rho_min``.
        alpha: Weight of what is at right angles.
        rho_min: Let the radius follow the learning rate, down to this one at ``lr_min``; None keeps it.
        lr_min: See above.
        lr_max: See above; None for the learning rate that a group has when it is given.
        **settings: Further arguments of `wideflat.SAM`, and those of ``base``. (An ``alpha`` of the base goes to it by
            ``functools.partial``.)

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> opt = GSAM([w], rho=0.0, alpha=0.5, lr=0.1)
        >>> w.grad = torch.tensor([1.0, 1.0])
        >>> _ = opt.perturb()
        >>> w.grad = torch.tensor([2.0, 0.0])  # g along it is (1, 0), at right angles (0, 1)
        >>> opt.restore()
        >>> w.grad
        tensor([ 2.0000, -0.5000])
    """

    _steps_along_first = True

    def __init__(
        self,
        params: Iterable[Any],
        base: Callable[..., Optimizer] = torch.optim.SGD,
        rho: float = 0.05,
        alpha: float = 0.4,
        *,
        rho_min: float | None = None,
        lr_min: float = 0.0,
        lr_max: float | None = None,
        **settings: Any,
    ) -> None:
        self.alpha = number("alpha", alpha, 0)
        self.rho_min = None if rho_min is None else number("rho_min", rho_min, 0)
        self.lr_min = number("lr_min", lr_min, 0)
        self.lr_max = None if lr_max is None else number("lr_max", lr_max, 0)
        super().__init__(params, base, rho, **settings)

    def _rho(self, group: dict[str, Any]) -> float | Tensor:
        if self.rho_min is None:
            return group["rho"]
        most = self.lr_max if self.lr_max is not None else group.get("initial_lr", self.defaults["lr"])
        if not float(most) > self.lr_min:
            raise ValueError(f"lr_max must be above lr_min, got {float(most)} and {self.lr_min}")
        return self.rho_min + (group["rho"] - self.rho_min) * (group["lr"] - self.lr_min) / (most - self.lr_min)

    def _combine(self, first: dict[Tensor, Tensor], second: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        square = inner_product(second, second)
        along = torch.where(square > 0, inner_product(first, second) / square, 0)
        pushed = [local(gradient) for gradient in second.values()]
        step = times(pushed, [1 + self.alpha * along] * len(pushed))
        both = [(made, local(first[p])) for p, made in zip(second, step, strict=True) if p in first]
        if both:
            torch._foreach_sub_([made for made, _ in both], [g for _, g in both], alpha=self.alpha)
        return {p: like(made, p) for p, made in zip(second, step, strict=True)}

    def _kept(self) -> tuple[str, ...]:
        return (*super()._kept(), "alpha", "rho_min", "lr_min", "lr_max")
