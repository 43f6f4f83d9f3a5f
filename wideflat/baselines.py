"""What the entropic algorithms are compared with: Lookahead, EASGD and Parle as relatives of them, and SAM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wideflat.centered import step_quietly
from wideflat.checks import number
from wideflat.distributed.group import detached
from wideflat.entropy_sgd import EntropySGD
from wideflat.replicas import ReplicaCoupling, ReplicaGroup, Replicas

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["EASGD", "SAM", "Lookahead", "Parle"]


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
        inner_state: whether its state is kept from cycle to cycle, see `wideflat.EntropySGD`.

    Example:
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
        )


class EASGD(ReplicaCoupling):
    r"""Elastic averaging SGD: the replicas are tied to a center with an inertia of its own (Zhang et al., 2015).

    .. code-block:: text

        at every K-th iteration
            dw_a   <- dw_a + K gamma (w_a - center)
            center <- center + rate (w_bar - center)

    In the symmetric form of the paper, ``rate`` is y lr K gamma. With ``rate=1`` the center is the barycenter of the
    last interaction, so that Replicated-SGD is EASGD without delay.

    Args:
        replicas: The replicas, or this rank's network.
        mesh: Where the other replicas are, as for `wideflat.ReplicaCoupling`.
        rate: How far the center follows the barycenter at an interaction; the authors' default is 0.9.
        period: K.
        gamma: The strength of the tie.

    Example:
        >>> from torch import nn
        >>> replicas = Replicas(lambda: nn.Linear(1, 1, bias=False), num_replicas=2)
        >>> for model, w in zip(replicas, (0.0, 2.0)):
        ...     _ = nn.init.constant_(model.weight, w)
        >>> coupling = EASGD(replicas, rate=0.5, period=1, gamma=0.5)
        >>> _ = nn.init.constant_(replicas[1].weight, 4.0)  # a step of training
        >>> coupling.couple()
        True
        >>> [model.weight.grad.item() for model in replicas]  # the center was at 1
        [-0.5, 1.5]
        >>> coupling.center[0].item()  # half of the way from 1 to the barycenter, 2
        1.5
    """

    def __init__(
        self,
        replicas: Replicas | nn.Module | ReplicaGroup,
        *,
        mesh: DeviceMesh | None = None,
        rate: float = 0.9,
        period: int = 10,
        gamma: float = 0.0,
    ) -> None:
        super().__init__(replicas, mesh=mesh, period=period, gamma=gamma)
        if not 0 < rate <= 1:
            raise ValueError(f"rate must be above 0 and at most 1, got {rate}")
        self.rate = rate
        #: The center, parameter by parameter; at the barycenter to begin with.
        self.center: list[Tensor] = [p.detach().clone() for p in self._trainable()[0]]
        with torch.no_grad():
            for _, (center,), w_bar in self.group.blocks(detached(self._trainable()), self.center):
                torch._foreach_copy_(center, w_bar)

    def _attract(self) -> None:
        members = self._trainable()
        strength = self.period * float(self.gamma)
        gradients = self._gradients(members)
        for w, (center, *dw), w_bar in self.group.blocks(detached(members), self.center, *gradients):
            for w_a, dw_a in zip(w, dw, strict=True):
                torch._foreach_add_(dw_a, torch._foreach_sub(w_a, center), alpha=strength)
            torch._foreach_lerp_(center, w_bar, self.rate)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, the center included."""
        return {**super().state_dict(), "rate": self.rate, "center": self.center}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        super().load_state_dict(state_dict)
        self.rate = state_dict["rate"]
        for mine, saved in zip(self.center, state_dict["center"], strict=True):
            mine.copy_(saved)


class Parle(ReplicaCoupling):
    r"""Parle: Entropy-SGD inside each replica, and replicas that attract each other at its outer steps
    (Chaudhari et al., 2017).

    `wideflat.EntropySGD` trains all replicas, their cycles in phase. Whenever a cycle has ended, and each
    replica stands at its own w_a, they are pulled together by w_a <- w_a - s/(1+s) (w_a - w_bar) with s = lr gamma and
    the outer ``lr``. Both strengths are focused by a `wideflat.Focusing` each: of the optimizer, and of this.

    Args:
        replicas: The replicas, or this rank's network.
        optimizer: An `wideflat.EntropySGD` over the parameters of all replicas in this process, or one for each of
            them.
        mesh: Where the other replicas are, as for `wideflat.ReplicaCoupling`.
        gamma: The strength of the attraction between replicas; that within each is the optimizer's.

    Example:
        >>> from torch import nn
        >>> replicas = Replicas(lambda: nn.Linear(2, 1), num_replicas=3)
        >>> opt = EntropySGD(replicas.parameters(), inner_steps=2)
        >>> coupling = Parle(replicas, opt, gamma=1.0)
        >>> for _ in range(4):
        ...     replicas(torch.ones(3, 8, 2)).sum().backward()
        ...     opt.step()
        ...     print(coupling.couple())  # after the step, not before it
        False
        True
        False
        True
    """

    optimizers: list[EntropySGD]  # type: ignore[assignment]

    def __init__(
        self,
        replicas: Replicas | nn.Module | ReplicaGroup,
        optimizer: EntropySGD | Sequence[EntropySGD],
        *,
        mesh: DeviceMesh | None = None,
        gamma: float = 0.0,
    ) -> None:
        super().__init__(replicas, mesh=mesh, period=1, gamma=gamma, mode="proximal", optimizer=optimizer)
        for each in self.optimizers:
            if not isinstance(each, EntropySGD):
                raise TypeError(f"Parle couples replicas that EntropySGD trains, got {type(each).__name__}")

    @torch.no_grad()
    def couple(self) -> bool:
        """Call it after every step of the optimizer; it acts when a cycle has ended."""
        if not self.optimizers[0].at_center:
            return False
        return super().couple()


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
