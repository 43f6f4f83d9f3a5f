"""LookSAM: a second gradient at every k-th step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.baselines.sam import SAM
from wideflat.checks import number, whole
from wideflat.kernels.shards import like, local
from wideflat.kernels.together import chosen, inner_product, put_, times

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
        if not first:
            return second
        square = inner_product(first, first)
        if not self._needs_second():
            return self._with_remembered(first, square)
        if self.period > 1:
            self._remember(first, second, square)
        return second

    def _with_remembered(self, g: dict[Tensor, Tensor], square: Tensor) -> dict[Tensor, Tensor]:
        """The step where no second gradient is taken: g + alpha (|g| / |v|) v."""
        v = {p: self._memory[p].to(g[p].device, g[p].dtype) for p in g if p in self._memory}
        if not v:
            return g
        length = inner_product(v, v)
        factor = torch.where(length > 0, self.alpha * (square / length).sqrt(), 0)
        steps = torch._foreach_add(times(_parts(v), [factor] * len(v)), [local(g[p]) for p in v])
        return {**g, **{p: like(step, p) for p, step in zip(v, steps, strict=True)}}

    def _remember(self, g: dict[Tensor, Tensor], s: dict[Tensor, Tensor], square: Tensor) -> None:
        """Keep v, what of s is at right angles to g: zero where it is rounding, as it was where s is not finite."""
        along = torch.where(square > 0, inner_product(g, s) / square, 0)
        length = inner_product(s, s)
        finite = torch.isfinite(along) & torch.isfinite(length)
        both = [p for p in s if p in g]
        shares = times([local(g[p]).to(local(s[p])) for p in both], [along] * len(both))
        rests = torch._foreach_sub([local(s[p]) for p in both], shares) if both else []
        v = {**s, **{p: like(rest, p) for p, rest in zip(both, rests, strict=True)}}
        rounding = 4 * max(torch.finfo(gradient.dtype).eps for gradient in s.values())  # of them, and of sums
        counts = inner_product(v, v) > (rounding + 100 * torch.finfo(length.dtype).eps) ** 2 * length
        here = times(_parts(v), [counts] * len(v))
        before = [local(self._memory[p]) if p in self._memory else torch.zeros_like(local(v[p])) for p in v]
        self._keep(dict(zip(v, chosen(finite, here, before), strict=True)))

    def _keep(self, found: dict[Tensor, Tensor]) -> None:
        """Write it into the memory, in place where there is one."""
        for p, now in found.items():
            if p not in self._memory or self._memory[p].dtype != now.dtype or self._memory[p].device != now.device:
                self._memory[p] = like(torch.empty_like(now), p)
        put_([self._memory[p] for p in found], list(found.values()))

    def _kept(self) -> tuple[str, ...]:
        return (*super()._kept(), "period", "alpha")


def _parts(values: dict[Tensor, Tensor]) -> list[Tensor]:
    return [local(value) for value in values.values()]
