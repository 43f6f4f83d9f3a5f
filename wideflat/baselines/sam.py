"""SAM: gradients taken where the loss is highest nearby."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.centered import step_quietly
from wideflat.checks import number

__all__ = ["SAM"]


class SAM(Optimizer):
    r"""Sharpness-aware minimisation: the gradient is taken where the loss is highest nearby (Foret et al., 2021).

    .. code-block:: text

        e <- rho grad Loss(w) / |grad Loss(w)|
        w <- w - lr grad Loss(w + e)                       the step itself by any torch optimizer

    Every step takes two gradients, through a closure; so it costs twice as much as SGD. Batch norm sees both passes.
    Weights in half precision are perturbed in their own type, where a small rho is below the rounding of many.

    Without a closure, the two gradients are taken by hand:

    .. code-block:: text

        loss.backward(); opt.perturb()                     at w + e, without gradients
        second_loss.backward(); opt.restore()              at w, with the gradients of w + e
        opt.step()

    Args:
        params: Parameters, or groups of them.
        base: Makes the optimizer of the step out of params and keyword arguments, for example `torch.optim.SGD`. Its
            param groups and its state are those of this optimizer.
        rho: Radius of the neighbourhood, the same for all groups: it bounds the norm over all of them.
        **settings: For ``base``: ``lr``, ``momentum``, ...

    Example:
        On the loss w^2/2 at w = 1 with rho = 0.5 the gradient is taken at 1.5:

        >>> w = torch.nn.Parameter(torch.tensor(1.0))
        >>> opt = SAM([w], rho=0.5, lr=0.1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = w**2 / 2
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure).item(), round(w.item(), 6)
        (0.5, 0.85)
    """

    def __init__(
        self,
        params: Iterable[Any],
        base: Callable[..., Optimizer] = torch.optim.SGD,
        rho: float = 0.05,
        **settings: Any,
    ) -> None:
        number("rho", rho, 0)
        if "lr" in settings:
            number("lr", settings["lr"], 0)
        #: While the model holds w + e: each parameter, its w and its first gradient.
        self._perturbed: list[tuple[Tensor, Tensor, Tensor]] | None = None
        self._restored = False
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups, **settings)
        self.defaults = {**self.base.defaults, "rho": rho}
        self._share()

    def _share(self) -> None:
        """One set of param groups and one state, so that schedulers and checkpoints reach the base."""
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, to the base too."""
        if hasattr(self, "base"):
            self.base.add_param_group({"rho": self.defaults["rho"], **param_group})
        else:
            super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: Clears the gradients, evaluates the model on the mini-batch, calls backward, returns the loss;
                called twice. None after `perturb` and `restore`.

        Returns:
            The loss at w.
        """
        if closure is None:
            if self._perturbed is not None:
                raise RuntimeError(
                    "step() was called after perturb(), while the model holds w + e; call restore() first"
                )
            if not self._restored and any(float(group["lr"]) for group in self.param_groups):
                raise ValueError(
                    "SAM takes two gradients a step: call opt.step(closure), where closure clears the gradients,"
                    " evaluates the loss, calls backward and returns the loss; or opt.perturb() and opt.restore()"
                )
            loss = None
        else:
            loss = self._first_gradients(closure)
            self.perturb()
            try:
                with torch.enable_grad():
                    closure()
            finally:
                self.restore()
        self._restored = False
        step_quietly(self.base)
        return loss

    def _first_gradients(self, closure: Callable[[], Any]) -> Any:
        """Call the closure at w. Gradients that were there before must not be in its gradients: a gradient of one
        parameter is replaced by NaN, which is gone afterwards if the closure clears the gradients.
        """
        before = [p for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()]
        if not before:
            with torch.enable_grad():
                return closure()
        witness = min(before, key=Tensor.numel)
        kept = witness.grad
        witness.grad = marked = torch.full_like(witness, torch.nan)
        version = marked._version
        try:
            with torch.enable_grad():
                loss = closure()
        finally:
            untouched = witness.grad is marked and marked._version == version
            if untouched:
                witness.grad = kept
        if not untouched and witness.grad is marked and bool(marked.isnan().all()):
            self.zero_grad()
            raise RuntimeError(
                "the closure adds to gradients that were there before: let it clear them (opt.zero_grad()), and call "
                "no backward() before step(closure). Gradients that are accumulated over several mini-batches do not "
                "go with SAM, which needs the whole mini-batch twice"
            )
        return loss

    @torch.no_grad()
    def perturb(self) -> None:
        """Go from w to w + e, with e along the gradients, and put those aside for the second ones."""
        if self._perturbed is not None:
            raise RuntimeError("perturb() was called twice; call restore() after the second gradients")
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in params]
        if any(g.is_sparse for g in gradients):
            raise RuntimeError(
                "SAM does not support sparse gradients, whose norm torch does not compute; "
                "use dense ones, for example Embedding(sparse=False)"
            )
        self._perturbed = [(p, p.detach().clone(), gradient) for p, gradient in zip(params, gradients, strict=True)]
        rho = float(self.param_groups[0]["rho"])
        if params and rho:
            norm = torch.nn.utils.get_total_norm([g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients])
            scale = (rho / norm).item() if norm > 0 else 0.0
            torch._foreach_add_([p.detach() for p in params], gradients, alpha=scale)
        for p in params:
            p.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to w. A parameter that has no second gradient keeps the first one."""
        if self._perturbed is None:
            raise RuntimeError("restore() was called without perturb()")
        for p, w, gradient in self._perturbed:
            p.copy_(w)
            if p.grad is None:
                p.grad = gradient
        self._perturbed, self._restored = None, True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for any optimizer."""
        super().load_state_dict(state_dict)
        self.base.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group.setdefault("rho", 0.05)
        super().__setstate__(state)
        self._perturbed, self._restored = None, False
        if "base" in state:
            self._share()
