"""ASAM: a neighbourhood that is measured relative to the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from wideflat.baselines.sam import SAM

__all__ = ["ASAM"]


class ASAM(SAM):
    r"""Adaptive SAM: the radius is relative to each weight, so that rescaled networks are alike (Kwon et al., 2021).

    .. code-block:: text

        t <- |w| + eta                                     weight by weight
        e <- rho t^2 grad Loss(w) / |t grad Loss(w)|
        w <- w - lr grad Loss(w + e)

    Note on the paper:
        Its program has t = 1 for biases. Give them a group with ``"adaptive": False`` for that.

    Args:
        params: Parameters, or groups of them.
        base: The optimizer of the step, as for `wideflat.SAM`.
        rho: Radius of the neighbourhood, about ten times that of SAM.
        eta: What is added to the size of each weight.
        **settings: Further arguments of `wideflat.SAM`, and those of ``base``.

    Example:
        On the loss w^2/2 at w = 2 with rho = 0.5 and eta = 0: e = 0.5 * 4 * 2 / 4 = 1, and the gradient is 3:

        >>> w = torch.nn.Parameter(torch.tensor(2.0))
        >>> opt = ASAM([w], rho=0.5, eta=0.0, lr=0.1)
        >>> (w**2 / 2).backward()
        >>> opt.perturb(), w.item()
        (True, 3.0)
    """

    def __init__(
        self,
        params: Iterable[Any],
        base: Callable[..., Optimizer] = torch.optim.SGD,
        rho: float = 0.5,
        *,
        eta: float = 0.01,
        **settings: Any,
    ) -> None:
        super().__init__(params, base, rho, adaptive=True, eta=eta, **settings)
