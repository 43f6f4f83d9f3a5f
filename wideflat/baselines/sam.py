"""SAM: gradients taken where the loss is highest nearby. The base of its family, with two gradients a step."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wideflat.baselines.closures import call_for_gradients, call_idle, refuse_gradients, step_of
from wideflat.checks import LARGEST, flag, function, instance, maker, network, number, optimizer, whole
from wideflat.checks.options import bounded, strength
from wideflat.checks.options import param_group as checked_group
from wideflat.checks.parameters import refuse_shared_memory
from wideflat.checks.records import check_state_dict, of_shape, reading
from wideflat.kernels.flat_blocks import is_dense
from wideflat.kernels.shards import is_sharded, like, local, local_gradient, norm
from wideflat.kernels.together import chosen, clones, multiply_, put_, times

__all__ = ["SAM"]


@dataclass
class _First:
    """What is put aside while the model holds w + e."""

    params: list[Tensor]
    w: list[Tensor]
    gradients: list[Tensor]
    #: Were all gradients finite? A tensor, so that the host need not wait for it. None: w was not left.
    finite: Tensor | None
    buffers: list[tuple[Tensor, Tensor]]


@dataclass
class _Work:
    """Where a step is. One object that is changed in place: Lightning's wrapper calls our methods as its own."""

    first: _First | None = None
    restored: bool = False
    has_warned: bool = False
    #: For variants.
    means: dict[Tensor, Tensor] = field(default_factory=dict)


class SAM(Optimizer):
    r"""Sharpness-aware minimisation: the gradient is taken where the loss is highest nearby (Foret et al., 2021).

    .. code-block:: text

        e <- rho grad Loss(w) / |grad Loss(w)|
        w <- w - lr grad Loss(w + e)                       the step itself by any torch optimizer

    Every step takes two gradients, so it costs twice as much as SGD. They are taken by hand:

    .. code-block:: text

        loss.backward(); opt.perturb()                     at w + e, without gradients
        second_loss.backward(); opt.restore()              at w, with the gradients of w + e
        opt.step(); opt.zero_grad()

    or through a closure, ``opt.step(closure)``, which is called twice. Clip between `restore` and `step`. Gradients
    of several mini-batches are accumulated in both passes, before `perturb` and before `restore`.

    Notes:
        - `wideflat.ASAM`, `wideflat.GSAM`, `wideflat.FriendlySAM` and `wideflat.LookSAM` are variants of it.
        - With a `torch.amp.GradScaler`: scale both losses, call ``opt.perturb(scaler)`` without ``scaler.unscale_``
          before it, and ``scaler.step(opt)``. An infinite first gradient skips both halves: w is not left, and the
          scaler finds what is not finite.
        - On several ranks with ``DistributedDataParallel`` e belongs to the mean gradient. With the first pass
          within ``model.no_sync()`` each rank goes along the gradient of its own part of the mini-batch, as in the
          paper (m-sharpness); the second gradients are averaged, so that all ranks take the same step.
        - Weights in 16 bits: most of e is below their rounding (with rho = 0.05 about half of the weights do not
          change at all), and a warning says so. Keep the weights in float32 (autocast), or perturb in float32.

    Args:
        params: Parameters, or groups of them.
        base: Makes the optimizer of the step out of params and keyword arguments, for example `torch.optim.SGD`. Its
            param groups and its state are those of this optimizer.
        rho: Radius of the neighbourhood. A group may have its own: e of each group is its rho times its part of the
            gradient, over the norm of all of it.
        adaptive: Measure the neighbourhood relative to the weights, see `wideflat.ASAM`; a group may have its own.
        eta: For that: what is added to the size of each weight.
        model: Put its buffers back after the second pass, so that batch-norm statistics see each mini-batch once.
        perturb_dtype: Hold w + e in this type, for example `torch.float32`, while 16-bit weights are perturbed. The
            network then computes in that type; inputs that are real numbers must have it too.
        **settings: For ``base``: ``lr``, ``momentum``, ...

    Example:
        On the loss w^2/2 at w = 1 with rho = 0.5 the gradient is taken at 1.5:

        >>> w = torch.nn.Parameter(torch.tensor(1.0))
        >>> opt = SAM([w], rho=0.5, lr=0.1)
        >>> (w**2 / 2).backward()
        >>> opt.perturb(), w.item()
        (True, 1.5)
        >>> (w**2 / 2).backward()
        >>> opt.restore(); opt.step()
        >>> round(w.item(), 6)
        0.85
    """

    #: What is remembered of each parameter from step to step, as it is called in a state dict; None for nothing.
    _remembered: str | None = None
    #: Is the first gradient a part of the step? Then it must be the same on all ranks.
    _steps_along_first = False

    def __init__(
        self,
        params: Iterable[Any],
        base: Callable[..., Optimizer] = torch.optim.SGD,
        rho: float = 0.05,
        *,
        adaptive: bool = False,
        eta: float = 0.01,
        model: nn.Module | None = None,
        perturb_dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        rho, self.eta = number("rho", rho, 0, LARGEST), number("eta", eta, 0, LARGEST)
        if "lr" in settings and not isinstance(settings["lr"], Tensor):
            settings["lr"] = number("lr", settings["lr"], 0)
        self.model = None if model is None else network(model)
        self.perturb_dtype = None if perturb_dtype is None else instance("perturb_dtype", perturb_dtype, torch.dtype)
        self._memory: dict[Tensor, Tensor] = {}
        self._work = _Work()
        super().__init__(bounded(params), {"rho": rho, "adaptive": adaptive})
        for group in self.param_groups:
            group["rho"] = number("rho", group["rho"], 0, LARGEST)
        refuse_shared_memory([p for group in self.param_groups for p in group["params"]])
        self.base = optimizer("what base returns", maker("base", base)(self.param_groups, **settings))
        self.defaults = {**self.base.defaults, "rho": rho, "adaptive": adaptive}
        self._share()

    def _share(self) -> None:
        """One set of param groups and one state, so that schedulers and checkpoints reach the base."""
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, to the base too."""
        if hasattr(self, "base"):
            own = {name: self.defaults[name] for name in ("rho", "adaptive")}
            self.base.add_param_group({**own, **checked_group(param_group)})
        else:
            super().add_param_group(checked_group(param_group))

    def _needs_second(self) -> bool:
        """Does this step take a second gradient?"""
        return True

    def _rho(self, group: dict[str, Any]) -> float | Tensor:
        return group["rho"]

    def _direction(self, params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Where e points to, before it is scaled; the gradients are in float32 or wider."""
        return gradients

    def _take(self, params: list[Tensor], finite: Tensor) -> None:
        """The first gradients were taken: remember what the next ones need, if they are finite."""

    def _combine(self, first: dict[Tensor, Tensor], second: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The gradients of the step."""
        return second

    def _count(self, rehearsal: bool) -> None:
        """A step was taken; or one for the state alone, with rates of zero, as torch.distributed.checkpoint does."""
        assert self._remembered is not None
        for group in self.param_groups:
            group["sam_steps"] = group.get("sam_steps", 0) + (not rehearsal)
        for p in self._params():
            if rehearsal and p.requires_grad:
                self._memory.setdefault(p, torch.zeros_like(p))
            if p.grad is not None and p in self._memory:  # the base has made its own state by now
                self.state[p][self._remembered] = self._memory[p]

    @property
    def _steps(self) -> int:
        """The steps that were taken, counted where something is remembered of them."""
        return whole("sam_steps", self.param_groups[0].get("sam_steps", 0))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: Clears the gradients, evaluates the model on the mini-batch, calls backward, returns the loss;
                called twice. None after `perturb` and `restore`.

        Returns:
            The loss at w.
        """
        loss, rehearsal = None, closure is None and not self._work.restored
        if closure is None:
            self._refuse_to_step_blindly()
        elif self._work.restored:  # two gradients are there; Lightning calls step() with a closure that does nothing
            loss = call_idle(closure, self._params())
        else:
            loss = call_for_gradients(closure, self._params())
            needed = self.perturb()
            try:
                if needed:
                    with torch.enable_grad():
                        closure()
            except BaseException:
                self._put_back()
                raise
            self._finish(strict=False)
        self._work.restored = False
        step_of(self.base)
        if self._remembered is not None:
            self._count(rehearsal)
        return loss

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _refuse_to_step_blindly(self) -> None:
        if self._work.first is not None:
            raise RuntimeError("step() was called after perturb(), while the model holds w + e; call restore() first")
        if not self._work.restored and any(number("lr", group["lr"]) for group in self.param_groups):
            raise ValueError(
                "SAM takes two gradients a step: call opt.step(closure), where closure clears the gradients,"
                " evaluates the loss, calls backward and returns the loss; or opt.perturb() and opt.restore()"
            )

    @torch.no_grad()
    def perturb(self, scaler: torch.amp.GradScaler | None = None) -> bool:
        """Go from w to w + e, with e along the gradients, and put those aside for the second ones.

        Args:
            scaler: The one that scaled the loss, if there is one.

        Returns:
            Whether second gradients are needed now; if not (`wideflat.LookSAM`), `restore` may follow at once.
        """
        if self._work.first is not None:
            raise RuntimeError("perturb() was called twice; call restore() after the second gradients")
        if scaler is not None:
            function("scaler", getattr(scaler, "scale", None), "a torch.amp.GradScaler")
        self._refuse_unscaled(scaler)
        self._refuse_unequal()
        params = [p for p in self._params() if p.grad is not None]
        for p in params:
            local_gradient(p)  # summed over ranks that hold summands of it
        gradients: list[Tensor] = [p.grad for p in params if p.grad is not None]
        refuse_gradients(gradients, params)
        self._work.restored = False
        needed = self._needs_second()
        self._work.first = _First(params, [], gradients, None, [])
        if needed and params:
            self._leave(self._work.first, scaler)
            torch.clear_autocast_cache()  # a step inside of autocast would go on with w as it was cast before
        for p in params:
            p.grad = None
        return needed

    def _leave(self, first: _First, scaler: torch.amp.GradScaler | None) -> None:
        """Put w + e into the model."""
        params = first.params
        wide = [_wide(local(g)) for g in first.gradients]
        if scaler is not None:
            inverse = 1 / scaler.scale(torch.ones((), device=params[0].device))
            wide = times(wide, [inverse] * len(wide))
        direction = self._direction(params, wide)
        sizes = self._sizes(params)
        scaled = direction if sizes is None else list(torch._foreach_mul(direction, sizes))
        length = norm([like(part, p) for part, p in zip(scaled, params, strict=True)])
        first.finite = torch.isfinite(length)
        self._take(params, first.finite)
        inverse = torch.where(first.finite & (length > torch.finfo(length.dtype).tiny), 1 / length, 0)
        factors = dict(self._factors(inverse))
        e = chosen(first.finite, scaled if sizes is None else list(torch._foreach_mul(scaled, sizes)), None)
        e = times(e, [factors[p] for p in params])
        if self.model is not None:
            first.buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self._warn_of_rounding(params)
        if self.perturb_dtype is None or all(p.dtype == self.perturb_dtype for p in params):
            first.w = clones(params)
            torch._foreach_add_(e, [_wide(w) for w in first.w])
            put_(params, e)
            return
        if any(map(is_sharded, params)):
            raise RuntimeError("perturb_dtype= is for parameters that are not sharded: keep the shards in float32")
        first.w = [p.data for p in params]
        for p, step in zip(params, e, strict=True):
            p.data = (_wide(p.data) + step).to(self.perturb_dtype)
        torch.autograd.graph.increment_version(params)  # unlike writing in place, ``.data =`` is not counted

    def _factors(self, inverse: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What e is scaled by, the same tensor for all of a group. To maximize, e goes to where the loss is lowest."""
        for group in self.param_groups:
            rho = strength("rho", self._rho(group))
            factor = inverse * (-rho if flag("maximize", group.get("maximize", False)) else rho)
            yield from ((p, factor) for p in group["params"])

    def _sizes(self, params: list[Tensor]) -> list[Tensor] | None:
        """The size of each weight, by which an adaptive neighbourhood is measured; 1 in other groups."""
        adaptive = {p for group in self.param_groups if flag("adaptive", group["adaptive"]) for p in group["params"]}
        if not adaptive:
            return None
        parts = [_wide(local(p).detach()) for p in params]
        sizes = list(torch._foreach_add(torch._foreach_abs(parts), self.eta))
        return [size if p in adaptive else torch.ones_like(size) for p, size in zip(params, sizes, strict=True)]

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to w, with the gradients of w + e. A parameter that has no second gradient has none in the step."""
        if self._work.first is None:
            raise RuntimeError("restore() was called without perturb()")
        self._finish(strict=True)

    def _put_back(self) -> None:
        """Put w into the model again, and its buffers."""
        assert self._work.first is not None
        params, kept = self._work.first.params, self._work.first.w  # none of them if w was not left
        if any(local(p).shape != local(w).shape for p, w in zip(params, kept, strict=False)):
            raise RuntimeError("a parameter has another shape than in perturb(): w cannot be put back into it")
        if all(p.dtype == w.dtype for p, w in zip(params, kept, strict=False)):
            put_(params[: len(kept)], kept)
        else:
            for p, w in zip(params, kept, strict=True):
                gradient, p.grad = p.grad, None
                p.data = w
                p.grad = None if gradient is None else gradient.to(w.dtype)
            torch.autograd.graph.increment_version(params[: len(kept)])
        for buffer, value in self._work.first.buffers:
            buffer.copy_(value)
        torch.clear_autocast_cache()
        self._work.first = None

    def _finish(self, strict: bool) -> None:
        """Put w back, and the gradients of the step in place."""
        first = self._work.first
        assert first is not None
        self._put_back()
        made = dict(zip(first.params, first.gradients, strict=True))
        for p in self._params():
            if p.grad is not None:
                local_gradient(p)  # summed over ranks that hold summands of it
        second = {p: p.grad for p in self._params() if p.grad is not None}
        if first.finite is None:
            gradients = self._combine(made, {})
        elif second:
            gradients = self._combine(made, second)
            _spoil(gradients, first.finite)
        elif strict:
            raise RuntimeError(
                "restore() found no second gradients: evaluate the loss and call backward() between perturb() and "
                "restore()"
            )
        else:
            gradients = made  # a closure that makes none leaves those that are there
        found = {p: gradients[p] for p in {**made, **second} if p in gradients}
        refuse_gradients(list(found.values()), list(found))
        for p in {**made, **second}:
            p.grad = gradients.get(p)
        self._work.restored = True

    # --------------------------------------------------------------------------------------------------------- refusals

    def _refuse_unscaled(self, scaler: torch.amp.GradScaler | None) -> None:
        states = getattr(scaler, "_per_optimizer_states", {})
        if id(self) in states and getattr(states[id(self)].get("stage"), "name", "") == "UNSCALED":
            raise RuntimeError(
                "scaler.unscale_(opt) was called before opt.perturb(scaler): the second gradients would stay scaled. "
                "Call it between restore() and scaler.step(opt), if at all"
            )

    def _refuse_unequal(self) -> None:
        if self._steps_along_first and not getattr(self.model, "require_forward_param_sync", True):
            raise RuntimeError(
                f"{type(self).__name__} steps along the first gradient too, which was not averaged over the ranks "
                "(no_sync()): they would part. Take both passes with synchronisation, or use SAM, ASAM or FriendlySAM"
            )

    def _warn_of_rounding(self, params: list[Tensor]) -> None:
        half = any(p.dtype in (torch.bfloat16, torch.float16) for p in params)
        if half and self.perturb_dtype is None and not self._work.has_warned:
            self._work.has_warned = True
            warnings.warn(
                f"{type(self).__name__} perturbs 16-bit weights, whose rounding swallows a part of e (with rho = 0.05 "
                "about half of the weights do not change); keep them in float32 under autocast, or pass "
                "perturb_dtype=torch.float32",
                stacklevel=4,
            )

    # ----------------------------------------------------------------------------------------------- saved and loaded

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer."""
        if self._remembered is None:
            return super().state_dict()
        shared, name = self.state, self._remembered
        self.state = defaultdict(dict, {p: dict(state) for p, state in shared.items()})
        try:
            for p, value in self._memory.items():
                self.state[p][name] = value
            return super().state_dict()
        finally:
            self.state = shared

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for any optimizer."""
        with reading("state of an optimizer"):
            super().load_state_dict(check_state_dict(state_dict, self.defaults))
        if self._remembered is not None:
            name = self._remembered
            self._memory.clear()
            self._memory.update({p: of_shape(name, state[name], p) for p, state in self.state.items() if name in state})
            for p in [p for p, state in self.state.items() if set(state) == {name}]:
                del self.state[p]  # an optimizer that finds state takes it for its own
        self.base.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name in self._kept()}
        return {**kept, **super().__getstate__()}

    def _kept(self) -> tuple[str, ...]:
        """What a pickled or copied optimizer keeps, beside what torch keeps of every optimizer."""
        return ("base", "eta", "model", "perturb_dtype", "_memory")

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group.setdefault("rho", 0.05)
            group.setdefault("adaptive", False)
        super().__setstate__(state)
        self._work = _Work()
        if "base" in state:
            self._share()


def _wide(tensor: Tensor) -> Tensor:
    """In float32, or in its own type if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _spoil(gradients: dict[Tensor, Tensor], finite: Tensor) -> None:
    """Let gradients be NaN where the first ones were not finite: whoever looks at them skips the step."""
    for p, gradient in gradients.items():
        if not is_dense(local(gradient)):  # its elements may share memory
            gradients[p] = gradient.clone(memory_format=torch.contiguous_format)
    multiply_([local(gradient) for gradient in gradients.values()], torch.where(finite, 1.0, torch.nan))
