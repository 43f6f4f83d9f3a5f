"""The steps of the entropic family: inner optimizers on w', an outer optimizer on w."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.captured import Captured
from wideflat.checks import function
from wideflat.checks.family import check_cycle, check_numbers_of_torch, explained
from wideflat.checks.records import of_shape
from wideflat.checks.trainers import watch_trainer
from wideflat.kernels.foreach import add_noise, as_held, put_back, running_mean, take_up
from wideflat.kernels.noise import GaussianNoise
from wideflat.kernels.one_pass import OnePass
from wideflat.kernels.parts import Part
from wideflat.kernels.shards import anywhere, is_sharded, like, local, local_gradient, place_of

__all__ = ["Cycles"]


class Cycles(Captured):
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
        if not torch.compiler.is_compiling() and not self._place.has_looked_around:
            self._place.has_looked_around = True
            watch_trainer()
        if self._is_captured():
            return self._captured_step(closure)
        self._refuse_at_center("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = function("closure", closure)()
        try:
            self._advance()
        except Exception:
            self._check_settings()  # one that was changed since to what it cannot be is said so
            raise
        return loss

    def _check_settings(self) -> None:
        for settings in self._settings():
            check_cycle(settings)
        for inner in (*self.inner, self.outer):
            check_numbers_of_torch(inner)
        for p, state in self.state.items():
            same_parameter = self._layouts.get(p, (p.shape,))[0] == p.shape  # else it is not the state that is another
            for name in ("center", "mean"):
                if name in state and same_parameter and not is_sharded(p):
                    of_shape(name, state[name], p)
        self._fit([p for p, state in self.state.items() if "center" in state and not is_sharded(p)])

    def _advance(self) -> None:
        """A step with the gradients that are there."""
        position, inner_steps = self._phase()
        if self._is_rehearsal():
            self._parts(self._has_gradient)
            self._rehearse()
            return
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
        if starting:
            self._begin_cycle(inner, parts)
        with nullcontext() if starting else self._pulled(numbers, parts):
            self._step_inner(inner)
        for k, part, group in zip(numbers, parts, inner.param_groups, strict=True):
            settings = self._settings()[k]
            if settings["epsilon"]:
                scale = math.sqrt(float(group["lr"])) * float(settings["epsilon"])
                add_noise(part.w_prime, part.places, self._noise_of(settings), int(settings["step"]), scale)
            if part.w_prime and part.keeps_mean:
                running_mean(part.mu, part.w_prime, float(settings["alpha"]))

    def _begin_cycle(self, inner: Optimizer, parts: list[Part]) -> None:
        """Set w and mu on w', which is where w was put, unless somebody has changed the model since."""
        for part in parts:
            if part.w_prime and not self._is_taken_up(part):
                take_up(part.w, part.w_prime)
            if part.w_prime and part.keeps_mean:
                put_back(part.mu, part.w_prime)
        if self.inner_state == "restart":
            self._restart(inner)

    def _outer_step(self) -> None:
        """Move w after mu, put w' back on w, and close the cycle."""
        parts = self._parts_that_moved()
        self._follow(parts)
        if self.state_device is not None:
            for part in parts:
                part.versions = [p._version for p in part.params]
        self._set_position(0)
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

    def _forget_cycle(self) -> None:
        self._last, self._stepped, self._resumed = [], [], True

    def _count(self, position: int) -> None:
        step = int(self._settings()[0]["step"]) + 1  # a tensor where one that is captured has saved it
        for settings in self._settings():
            settings["position"], settings["step"] = position, step

    @explained
    @torch.no_grad()
    def flush(self) -> None:
        """Close a partial cycle now: w moves by the outer step on what mu has gathered. Nothing at a cycle's start."""
        self._refuse_at_center("flush()")
        if self._phase()[0] > 0:
            self._outer_step()
