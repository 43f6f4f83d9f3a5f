"""LookSAM: a second gradient at every k-th step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.baselines.gsam import inner_product
from wideflat.baselines.sam import SAM
from wideflat.checks import number, whole

__all__ = ["LookSAM"]


class LookSAM(SAM):
    r"""LookSAM: what the second gradient adds to the first is used again for k steps (Liu et al., 2022).

    .. code-block:: text

        for t = 0, 1, 2, ...
            g <- grad Loss(w)
            if t mod k = 0:
                s <- grad Loss(w + rho g / |g|)
                v <- what of s is at right angles to g
            else:
                s <- g + alpha (|g| / |v|) v
            w <- w - lr s

    It costs 1 + 1/k gradients a step. With ``period=1`` it is `wideflat.SAM`. By hand, `perturb` says whether a second
    gradient is wanted:

    .. code-block:: text

        loss.backward()
        if opt.perturb():
            second_loss.backward()
        opt.restore(); opt.step()

    Note on the paper:
        A v that is not longer than the rounding of s is taken for zero: the steps between divide by its length. With
        gradients in 16 bits most of v is rounding; let them be float32.

    Args:
        params: Parameters, or groups of them.
        base: The optimizer of the step, as for `wideflat.SAM`.
        rho: Radius of the neighbourhood.
        period: k.
        alpha: Weight of v in the steps between.
        **settings: Further arguments of `wideflat.SAM`, and those of ``base``.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> opt = LookSAM([w], rho=0.1, period=2, lr=0.1)
        >>> for _ in range(4):
        ...     (w**2).sum().backward()
        ...     again = opt.perturb()
        ...     if again:
        ...         (w**2).sum().backward()
        ...     opt.restore(); opt.step(); opt.zero_grad()
        ...     print(again)
        True
        False
        True
        False
    """

    _remembered = "sharpness"
    _steps_along_first = True

    def __init__(
        self,
        params: Iterable[Any],
        base: Callable[..., Optimizer] = torch.optim.SGD,
        rho: float = 0.05,
        period: int = 5,
        alpha: float = 0.7,
        **settings: Any,
    ) -> None:
        self.period, self.alpha = whole("period", period, 1), number("alpha", alpha, 0)
        super().__init__(params, base, rho, **settings)

    def _needs_second(self) -> bool:
        return self._steps % self.period == 0

    def _combine(self, first: dict[Tensor, Tensor], second: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        g, s = first, second
        if not g:
            return s
        square = inner_product(g, g)
        if not self._needs_second():
            v = {p: self._memory[p].to(g[p].device, g[p].dtype) for p in g if p in self._memory}
            length = inner_product(v, v)
            factor = torch.where(length > 0, self.alpha * (square / length).sqrt(), 0)
            return {p: g[p] + (v[p] * factor.to(v[p])).to(g[p]) if p in v else g[p] for p in g}
        if self.period > 1:
            along = torch.where(square > 0, inner_product(g, s) / square, 0)
            length = inner_product(s, s)
            finite = torch.isfinite(along) & torch.isfinite(length)
            v = {p: s[p] - g[p] * along.to(s[p].device, s[p].dtype) if p in g else s[p] for p in s}
            rounding = 4 * max(torch.finfo(gradient.dtype).eps for gradient in s.values())  # of them, and of sums
            counts = inner_product(v, v) > (rounding + 100 * torch.finfo(length.dtype).eps) ** 2 * length
            for p in v:
                here = v[p] * counts.to(v[p].device)
                before = self._memory.get(p, torch.zeros_like(here)).to(here.device, here.dtype)
                self._memory[p] = torch.where(finite.to(here.device), here, before)
        return s

    def _kept(self) -> tuple[str, ...]:
        return (*super()._kept(), "period", "alpha")
