"""The engine of the entropic family: inner optimizers, an outer optimizer, and a spring between what they move."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.centered import Centered
from wideflat.checks import check_cycle, check_parameter, number, refuse_differentiable, shown
from wideflat.kernels.foreach import add_noise, as_held, pull_back, put_back, running_mean, take_up
from wideflat.kernels.noise import GaussianNoise
from wideflat.kernels.one_pass import OnePass
from wideflat.kernels.parts import Part
from wideflat.kernels.shards import anywhere, is_sharded, like, local, local_gradient, of_one_kind, place_of

__all__ = ["Cycles", "Entropic"]


class Cycles(Centered):
    """The steps of the family: L of the inner optimizers on w', which the model holds, then one of the outer one on w.

    .. code-block:: text

        for t = 1, 2, ...
            w', mu <- w
            for l = 1, ..., L                                     each is one call of step(), on one mini-batch
                w' is pulled towards w and moved by the inner optimizer; noise is added to it
                mu <- alpha mu + (1 - alpha) w'
            w <- step of the outer optimizer on the gradient w - mu             within the L-th call

    A subclass makes ``inner`` and ``outer`` and says how w' is pulled (`_pulled`). The groups of the inner optimizers,
    one after the other, those of the outer one, and the param groups correspond to each other.
    """

    _noise: GaussianNoise | None
    _last: list[Part]
    _stepped: list[list[Part]]

    def _pulled(self, numbers: range, parts: list[Part]) -> AbstractContextManager[None]:
        """Within it the inner optimizer takes its step; not asked for in the first step of a cycle, where w' = w."""
        raise NotImplementedError

    def _step_inner(self, inner: Optimizer) -> None:
        inner.step()

    def _step_outer(self) -> None:
        self.outer.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One inner step on one mini-batch; the L-th call also moves w and puts w' back on it.

        Parameters without a gradient stay where they are.

        Args:
            closure: Evaluates the model and returns the loss; called once, before the step.
        """
        self._refuse_at_center("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        position, inner_steps = self._phase()
        if self._is_rehearsal():
            self._parts(self._has_gradient)
            self._rehearse()
            return loss
        self._forget_rehearsal()
        if position == 0:
            self._start_idle()
            self._stepped, self._resumed = [], False
        given = self._descend()
        try:
            parts = self._parts_of_step()
            self._inner_step(parts, starting=position == 0)
        finally:
            for p, gradient in given:
                p.grad = gradient
        for part in parts:
            part.gradients = []  # else they would be kept beyond zero_grad()
        self._count(position + 1)
        if position + 1 >= inner_steps:
            self._outer_step()
        return loss

    def _descend(self) -> list[tuple[Tensor, Tensor | None]]:
        """Turn gradients that point upwards; those that were there. Here the inner optimizers do so themselves."""
        return []

    def _inner_step(self, parts: list[Part], starting: bool) -> None:
        """Move w' and mu of all groups."""
        first = 0
        for inner in self.inner:
            numbers = range(first, first := first + len(inner.param_groups))
            self._explore(inner, numbers, parts[numbers.start : numbers.stop], starting)

    def _explore(self, inner: Optimizer, numbers: range, parts: list[Part], starting: bool) -> None:
        """One inner step of the box above, by torch's operations, for the groups of one inner optimizer."""
        for part in parts:
            self._fit(part.params)
            if starting and part.w_prime:
                if not self._is_taken_up(part):
                    take_up(part.w, part.w_prime)
                if part.keeps_mean:
                    put_back(part.mu, part.w_prime)
        if starting and self.inner_state == "restart":
            self._restart(inner)
        with nullcontext() if starting else self._pulled(numbers, parts):
            self._step_inner(inner)
        for k, part, group in zip(numbers, parts, inner.param_groups, strict=True):
            settings = self._settings()[k]
            if settings["epsilon"]:
                scale = math.sqrt(float(group["lr"])) * float(settings["epsilon"])
                add_noise(part.w_prime, part.places, self._noise_of(settings), int(settings["step"]), scale)
            if part.w_prime and part.keeps_mean:
                running_mean(part.mu, part.w_prime, float(settings["alpha"]))

    def _outer_step(self) -> None:
        """Move w after mu, put w' back on w, and close the cycle."""
        parts = self._parts_that_moved()
        self._follow(parts)
        if self.state_device is not None:
            for part in parts:
                part.versions = [p._version for p in part.params]
        for settings in self._settings():
            settings["position"] = 0
        if self._prefix:  # else it is there already
            self._publish()

    def _is_taken_up(self, part: Part) -> bool:
        """Does the model hold w at the start of a cycle, and nobody has written to it? Asked where w is far away."""
        return self.state_device is not None and part.versions == [p._version for p in part.params]

    def _follow(self, parts: list[Part]) -> None:
        """The outer step of the box above, by torch's operations."""
        parts = [part for part in parts if part.w_prime]
        for part in parts:
            self._fit(part.params)
            for center, d in zip(part.centers, self._pseudo_gradients(part), strict=True):
                center.grad = like(d, center)
        self._step_outer()
        for part in parts:
            put_back(part.w_prime, part.w)
            for center in part.centers:
                center.grad = None

    def _pseudo_gradients(self, part: Part) -> list[Tensor]:
        """Compute w - mu, with w as the model held it."""
        rounded = [p.to(w.device, w.dtype) for w, p in zip(part.w, as_held(part.w, part.w_prime), strict=True)]
        mu = [mean.to(w.device, w.dtype) for w, mean in zip(part.w, part.mu, strict=True)]
        return list(torch._foreach_sub(rounded, mu))

    def _parts_of_step(self) -> list[Part]:
        """The parameters that have a gradient; those of the last step where nothing but the gradients is new."""
        kept, groups = self._stepped[-1] if self._stepped else self._last, self.param_groups
        if len(kept) != len(groups) or not all(
            part.renew(group["params"], self.state, self._keeps_mean(k))
            for k, (group, part) in enumerate(zip(groups, kept, strict=True))
        ):
            kept = self._parts(self._has_gradient)
        if not self._stepped or self._stepped[-1] is not kept:
            self._stepped.append(kept)
        self._last = kept
        return kept

    def _parts_that_moved(self) -> list[Part]:
        """The parameters that took an inner step in this cycle. One that never has a gradient stays as it is."""
        if self._resumed or not self._stepped:  # in the middle of it: nobody has counted
            return self._parts(self._has_moved)
        parts = self._stepped[0]
        if len(self._stepped) == 1 and len(parts) == len(self.param_groups) and all(p.is_of(self.state) for p in parts):
            return parts
        moved = {p for parts in self._stepped for part in parts for p in part.params}
        return self._parts(lambda p: p in moved and self._has_center(p))

    def _parts(self, chosen: Callable[[Tensor], bool]) -> list[Part]:
        """The parameters that take part, group by group; state is made for those that have none yet."""
        parts, place = [], 0
        for k, group in enumerate(self.param_groups):
            part, keeps_mean = Part(group=list(group["params"])), self._keeps_mean(k)
            part.absent = [p.grad is None for p in part.group]
            for p in part.group:
                if chosen(p):
                    state = self.state[p]
                    if "center" not in state or (keeps_mean and "mean" not in state):
                        self._allocate(k, p)
                    if is_sharded(p):  # before parts of what is refitted are taken
                        self._fit([p])
                    part.params.append(p)
                    part.places.append(place_of(p, place))
                    part.states.append(state)
                place += p.numel()
            part.gradients = [local_gradient(p) for p in part.params if p.grad is not None]
            part.w_prime = [local(p) for p in part.params]
            part.w = [local(state["center"]) for state in part.states]
            part.mu = [local(state["mean"]) for state in part.states] if keeps_mean else part.w_prime
            parts.append(part)
        return parts

    def _has_moved(self, p: Tensor) -> bool:
        """Does the parameter look as if it had taken an inner step in this cycle?"""
        state = self.state.get(p, {})
        if p.grad is not None or "center" not in state:
            return "center" in state
        mu, w_prime = local(state.get("mean", p)), local(p)
        (held,) = as_held([local(state["center"])], [w_prime])
        return anywhere([(p, (mu != held.to(mu.device, mu.dtype)).any())])

    def _start_idle(self) -> None:
        """The start of a cycle for parameters that have a center but no gradient then: w and mu on w'."""
        for p, state in self.state.items():
            if p.grad is None and "center" in state:
                take_up([local(state["center"])], [local(p)])
                if "mean" in state:
                    state["mean"].copy_(p)

    def _noise_of(self, settings: dict[str, Any]) -> GaussianNoise:
        """The noise of a seed, kept until another seed is asked for."""
        seed = int(settings["seed"])
        if self._noise is None or self._noise.seed != seed:
            self._noise = GaussianNoise(seed)
        return self._noise

    def _make_working_memory(self) -> None:
        super()._make_working_memory()
        self._noise, self._resumed, self._one_pass = None, True, OnePass()
        self._last, self._stepped = [], []

    def _count(self, position: int) -> None:
        step = self._settings()[0]["step"] + 1
        for settings in self._settings():
            settings["position"], settings["step"] = position, step

    @torch.no_grad()
    def flush(self) -> None:
        """Close a partial cycle now: w moves by the outer step on what mu has gathered. Nothing at a cycle's start."""
        self._refuse_at_center("flush()")
        if self._phase()[0] > 0:
            self._outer_step()


class Entropic(Cycles):
    r"""An outer loop around any optimizers: they move w', which is pulled back to w, and w follows it.

    .. code-block:: text

        for t = 1, 2, ...
            w', mu <- w
            for l = 1, ..., L                                     each is one call of step(), on one mini-batch
                w' <- w' - (pull / L) (w' - w)                    not at l = 1, where w' = w
                w' <- step of the inner optimizers                yours, with your groups and schedulers
                w' <- w' + sqrt(lr) epsilon N(0, I)
                mu <- alpha mu + (1 - alpha) w'
            w <- step of the outer optimizer on w - mu            SGD with Nesterov momentum, within the L-th call

    It is what Entropy-SGD (`wideflat.EntropySGD`) does around SGD, for AdamW, Muon, or several of them, with what they
    ask for: their state is kept over the cycles, and the pull does not go through their gradients, so that it is not
    normalised by them and that clipping bounds the gradient alone. With ``pull=0`` it is the outer loop of SNOO, and of
    DiLoCo with one worker; with ``outer_momentum=0`` besides, Lookahead.

    ``opt.param_groups`` are the param groups of the inner optimizers themselves: schedulers, decay groups and whatever
    else is done to them reaches them. ``opt.outer`` is an optimizer with groups of its own, for those who schedule it.

    Args:
        *optimizers: The inner optimizers, made as usual; each trains parameters of its own.
        inner_steps: L, the mini-batches in a cycle.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Its Nesterov momentum; 0 for none.
        pull: The share of the way back to w that the pull makes up for in a cycle: with 1, after L steps e^-1 of a
            displacement is left. It needs no scale; `wideflat.Focusing` drives it. Why it is 0: results/language-model.
        alpha: Weight of the past in the running mean mu; at 0 it is w' itself, and no memory is needed for it.
        epsilon: Size of the Langevin noise.
        outer: Another outer optimizer: anything that makes one out of params, which are tensors in ``state_dtype``,
            for example ``functools.partial(torch.optim.Adam, lr=0.01)``. ``outer_lr`` and ``outer_momentum`` are not
            used then.
        inner_state: ``"keep"`` the state of the inner optimizers from cycle to cycle, or ``"restart"`` each cycle with
            the state that they had when they were given; the whole of it, since its parts belong together.
        state_dtype: Type of w, mu and the outer velocity, where it is wider than that of the parameters: steps below
            the rounding of bfloat16 weights are not lost.
        state_device: Where they are kept; None means with the parameters. With ``pull = alpha = 0`` they are touched
            once in a cycle.
        seed: Seed of the noise.

    Example:
        On the loss w^2/2 from w = 1, SGD with rate 0.5 goes to w' = 0.5, half of the way back to 1, that is 0.75, and
        to 0.375. The outer step with rate 0.8 ends at 1 - 0.8 (1 - 0.375) = 0.5:

        >>> w = torch.nn.Parameter(torch.tensor(1.0))
        >>> sgd = torch.optim.SGD([w], lr=0.5)
        >>> opt = Entropic(sgd, inner_steps=2, outer_lr=0.8, outer_momentum=0.0, pull=1.0)
        >>> for gradient in (1.0, 0.75):
        ...     w.grad = torch.tensor(gradient)
        ...     opt.step()
        >>> round(w.item(), 6), opt.at_center, opt.param_groups[0] is sgd.param_groups[0]
        (0.5, True, True)
    """

    _kept = (*Cycles._kept, "_record")

    def __init__(
        self,
        *optimizers: Optimizer,
        inner_steps: int = 20,
        outer_lr: float = 0.67,
        outer_momentum: float = 0.67,
        pull: float = 0.0,
        alpha: float = 0.0,
        epsilon: float = 0.0,
        outer: Callable[..., Optimizer] | None = None,
        inner_state: str = "keep",
        state_dtype: torch.dtype = torch.float32,
        state_device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        _check_optimizers(optimizers)
        for name, value in (("outer_lr", outer_lr), ("outer_momentum", outer_momentum)):
            number(name, value, 0, 1e30)
        settings = {"inner_steps": inner_steps, "pull": pull, "alpha": alpha, "epsilon": epsilon, "seed": seed}
        check_cycle(settings)
        if not pull >= 0:
            raise ValueError(f"pull must be >= 0, got {pull}")
        self._set_up(inner_state, state_dtype, state_device)
        self.inner = list(optimizers)
        self._record: dict[str, Any] = {**settings, "step": 0, "position": 0, "evaluating": False}
        super().__init__([group for inner in optimizers for group in inner.param_groups], {})
        shared = set.intersection(*(set(inner.defaults) for inner in optimizers))  # some schedulers look here
        self.defaults = {name: value for name, value in optimizers[0].defaults.items() if name in shared}
        if outer is None:
            sgd = partial(torch.optim.SGD, lr=outer_lr, foreach=of_one_kind(self._parameters()))
            outer = partial(sgd, momentum=outer_momentum, nesterov=outer_momentum > 0)
        self.outer = outer([self._centers_of(group) for group in self.param_groups])
        if not isinstance(self.outer, Optimizer):
            raise TypeError(f"outer must make a torch optimizer of parameter groups, made {shown(self.outer)}")
        self._remember_beginning()

    def _settings(self) -> list[dict[str, Any]]:
        return [self._record] * len(self.param_groups)

    @property
    def inner_steps(self) -> int:
        """L."""
        return int(self._record["inner_steps"])

    @property
    def pull(self) -> float:
        """How strong the pull is; may be changed at any time, as `wideflat.Focusing` does."""
        return float(self._record["pull"])

    @pull.setter
    def pull(self, value: float) -> None:
        self._record["pull"] = value

    @contextmanager
    def _pulled(self, numbers: range, parts: list[Part]) -> Iterator[None]:
        """The pull, decoupled from the inner step and before it."""
        for part in parts:
            if self.pull and part.w_prime:
                pull_back(part.w_prime, part.w, min(1.0, self.pull / self.inner_steps))
        yield

    def _explore(self, inner: Optimizer, numbers: range, parts: list[Part], starting: bool) -> None:
        if starting or not self._one_pass.inner(inner, numbers, parts, self._record, self._noise_of(self._record)):
            super()._explore(inner, numbers, parts, starting)

    def _follow(self, parts: list[Part]) -> None:
        super()._follow([part for k, part in enumerate(parts) if not self._one_pass.outer(self.outer, k, part)])

    def _pseudo_gradients(self, part: Part) -> list[Tensor]:
        """Compute w - mu, in the memory of mu where it can be: what is there is not needed any more."""
        if all(
            mu.dtype == w.dtype == p.dtype and mu.device == w.device
            for p, w, mu in zip(part.w_prime, part.w, part.mu, strict=True)
        ):
            mu = [tensor.detach() for tensor in part.mu]
            torch._foreach_neg_(mu)
            torch._foreach_add_(mu, part.w)
            return mu
        return super()._pseudo_gradients(part)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, if there is one; in the middle of a cycle it joins in with w' = w."""
        if not hasattr(self, "outer"):  # torch's constructor, with the groups of the inner optimizers
            for p in param_group["params"]:
                check_parameter(p)
            super().add_param_group(param_group)
            param_group["entropic"] = self._record
            return
        if len(self.inner) > 1:
            raise ValueError(
                f"there are {len(self.inner)} inner optimizers; add the group to one of them, before Entropic is made"
            )
        self.inner[0].add_param_group(param_group)
        group = self.inner[0].param_groups[-1]
        group["entropic"] = self._record
        self.param_groups.append(group)
        self.outer.add_param_group(self._centers_of(group))

    def _centers_of(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"params": [self._center_of(p) for p in group["params"] if p.requires_grad]}

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer: the inner optimizers' state and groups whole, w, mu, the outer optimizer's state."""
        self._record["outer"] = [
            {name: value for name, value in group.items() if name != "params"} for group in self.outer.param_groups
        ]
        state_dict = super().state_dict()
        record = copy.deepcopy(self._record)
        for group in state_dict["param_groups"]:
            group["entropic"] = record
        return state_dict

    def _adopt_groups(self, groups: list[dict[str, Any]]) -> None:
        if not all("entropic" in group for group in groups):
            raise ValueError("the state is not that of an Entropic: its param groups have no entry 'entropic'")
        self._record.update(copy.deepcopy(groups[0]["entropic"]))
        for group, saved in zip(self.outer.param_groups, self._record.pop("outer"), strict=True):
            group.update({name: value for name, value in saved.items() if name != "foreach"})
        for group, saved in zip(self._inner_groups(), groups, strict=True):
            group.update({name: value for name, value in saved.items() if name not in ("params", "entropic")})

    def _adopt_inner(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        super()._adopt_inner(saved)
        self.param_groups = self._inner_groups()  # torch's loader has made new ones
        for group in self.param_groups:
            group["entropic"] = self._record

    def _inner_groups(self) -> list[dict[str, Any]]:
        return [group for inner in self.inner for group in inner.param_groups]


def _check_optimizers(optimizers: tuple[Any, ...]) -> None:
    if not optimizers:
        raise ValueError("Entropic goes around optimizers: pass at least one, for example torch.optim.AdamW(params)")
    for inner in optimizers:
        if not isinstance(inner, Optimizer):
            raise TypeError(
                f"Entropic goes around torch optimizers, got {type(inner).__name__}; make one of the parameters first, "
                "for example Entropic(torch.optim.AdamW(model.parameters()))"
            )
        refuse_differentiable(any(group.get("differentiable", False) for group in inner.param_groups))
        if isinstance(inner, Centered):
            raise TypeError(f"{type(inner).__name__} has a center already; pass the optimizers inside it")
