"""RMSprop as TensorFlow has it, which the published training of EfficientNet uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.checks import LARGEST, function, number
from wideflat.checks.options import bounded
from wideflat.checks.records import of_shape
from wideflat.kernels.shards import local, local_gradient

__all__ = ["TensorFlowRMSprop"]


class TensorFlowRMSprop(Optimizer):
    r"""RMSprop with the stabiliser within the root and the learning rate within the momentum.

    .. code-block:: text

        ms <- 1 for every weight, mom <- 0
        for t = 1, 2, ...
            g   <- grad Loss(w) + weight_decay w
            ms  <- alpha ms + (1 - alpha) g^2
            mom <- momentum mom + lr g / sqrt(ms + eps)
            w   <- w - mom

    `torch.optim.RMSprop` divides by sqrt(ms) + eps, starts from ms = 0 and multiplies mom with the present lr. With
    the customary eps = 1e-3 these are two optimizers: for a gradient that stays at 1e-3 the step of torch's is 16 times
    as long (eps = 1e-3 within the root is about 0.03 beside it). And as lr is within mom here, a drop of it takes
    effect over 1 / (1 - momentum) steps.

    Notes:
        - ms starts at 1, as in ``tf.train.RMSPropOptimizer``, which the published code uses: the first steps
          are about lr g, not lr sign(g) / sqrt(1 - alpha). (The optimizer of Keras starts at 0.)
        - Weight decay is a part of the gradient, as in `torch.optim.RMSprop`.
        - The names of arguments and state are those of `torch.optim.RMSprop`.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        alpha: The weight of the past in the mean square ms; TensorFlow calls it decay.
        eps: The stabiliser.
        weight_decay: L2 penalty.
        momentum: The weight of the past in mom.
        maximize: Ascend the objective instead.

    Example:
        A gradient of 3, without momentum: ms = 0.9 + 0.1 * 9 = 1.8, and w moves by 0.1 * 3 / sqrt(1.8 + 0.2):

        >>> w = torch.nn.Parameter(torch.tensor(0.0))
        >>> opt = TensorFlowRMSprop([w], lr=0.1, alpha=0.9, eps=0.2)
        >>> w.grad = torch.tensor(3.0)
        >>> opt.step()
        >>> round(w.item(), 6)
        -0.212132
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.01,
        alpha: float = 0.9,
        eps: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if isinstance(lr, Tensor) and not lr.is_nested and lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element, got one of shape {tuple(lr.shape)}")
        defaults = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        self._check(defaults)
        super().__init__(bounded(params), {**defaults, "maximize": maximize})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the gradients; parameters without one stay where they are.

        Args:
            closure: Evaluates the model and returns the loss; called once, before the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = function("closure", closure)()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                try:
                    self._step_of(group, params)
                except Exception:
                    self._check(group, params)  # what was changed since to what it cannot be is said so
                    raise
        return loss

    def _check(self, group: dict[str, Any], params: Iterable[Tensor] = ()) -> None:
        for name in ("lr", "eps", "weight_decay", "momentum"):
            number(name, group[name], 0, LARGEST)
        number("alpha", group["alpha"], 0, 1)
        for p in params:
            for name, kept in self.state[p].items():
                of_shape(name, kept, p)

    def _step_of(self, group: dict[str, Any], params: list[Tensor]) -> None:
        lr, alpha, momentum = float(group["lr"]), group["alpha"], group["momentum"]
        g = [local_gradient(p) for p in params]
        if any(grad.is_sparse for grad in g) or any(p.is_complex() for p in params):
            raise RuntimeError(
                "TensorFlowRMSprop does not support sparse gradients and complex parameters; use torch.optim.RMSprop"
            )
        if group["maximize"]:
            g = list(torch._foreach_neg(g))
        w = [local(p) for p in params]
        if group["weight_decay"]:
            g = list(torch._foreach_add(g, w, alpha=group["weight_decay"]))
        ms = [local(self._state(p, "square_avg", 1.0)) for p in params]
        torch._foreach_mul_(ms, alpha)
        torch._foreach_addcmul_(ms, g, g, value=1 - alpha)
        root = torch._foreach_add(ms, group["eps"])
        torch._foreach_sqrt_(root)
        if not momentum:
            torch._foreach_addcdiv_(w, g, root, value=-lr)
            return
        mom = [local(self._state(p, "momentum_buffer", 0.0)) for p in params]
        torch._foreach_mul_(mom, momentum)
        torch._foreach_addcdiv_(mom, g, root, value=lr)
        torch._foreach_sub_(w, mom)

    def _state(self, p: Tensor, name: str, start: float) -> Tensor:
        """A part of the state of a parameter, made where it is asked for the first time."""
        state = self.state[p]
        if name not in state:
            state[name] = torch.full_like(p, start, memory_format=torch.preserve_format)
        return state[name]
