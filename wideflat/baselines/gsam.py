"""GSAM: SAM that also closes the gap between the loss at w + e and the loss at w."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.baselines.sam import SAM
from wideflat.checks import number
from wideflat.kernels.shards import local, total

__all__ = ["GSAM", "inner_product"]


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
        self.lr_min, self.lr_max = number("lr_min", lr_min, 0), lr_max
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
        step = {}
        for p, pushed in second.items():
            step[p] = pushed * (1 + self.alpha * along.to(pushed.device)).to(pushed.dtype)
            if p in first:
                step[p].sub_(first[p], alpha=self.alpha)
        return step

    def _kept(self) -> tuple[str, ...]:
        return (*super()._kept(), "alpha", "rho_min", "lr_min", "lr_max")


def inner_product(x: dict[Tensor, Tensor], y: dict[Tensor, Tensor]) -> Tensor:
    """The sum over what both have of the products, in float32 or wider, on one device.

    >>> p, q = torch.zeros(2), torch.zeros(1)
    >>> inner_product({p: torch.ones(2), q: torch.ones(1)}, {p: torch.full((2,), 3.0)})
    tensor(6.)
    """
    both = [p for p in x if p in y]
    if not both:
        return torch.zeros(())
    wide = [torch.promote_types(x[p].dtype, torch.float32) for p in both]
    parts = [(_real(x[p].to(dtype)) * _real(y[p].to(dtype))).sum() for p, dtype in zip(both, wide, strict=True)]
    found = total((p, part.to(parts[0])) for p, part in zip(both, parts, strict=True))
    assert found is not None
    return found


def _real(tensor: Tensor) -> Tensor:
    """What is here of a tensor; a complex one as two real ones."""
    part = local(tensor)
    return torch.view_as_real(part) if part.is_complex() else part
