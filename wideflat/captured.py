"""Steps that are traced or captured once and run many times: `torch.compile`, CUDA graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.centered import Centered
from wideflat.checks import flag
from wideflat.kernels.branchless import Lists, Outer, Real, chances, noise_scale, phase_of, scattered
from wideflat.kernels.counter import key_of, normal, table_on
from wideflat.kernels.foreach import add_noise
from wideflat.kernels.noise import GaussianNoise
from wideflat.kernels.parts import Part
from wideflat.kernels.rounding import ROUNDED
from wideflat.kernels.shards import is_sharded, local, stretches
from wideflat.kernels.traced_noise import TABLES, TracedNoise, drawn

__all__ = ["Captured"]

#: The lists of a group that are filled for a step, and those of its parameters that have no gradient in it.
_GOING = ("w_prime", "w", "mu", "velocity", "outer_velocity", "rest", "gradients")
_IDLE = _GOING[:-1]


class _Group:
    """What a captured step works on, of one param group."""

    def __init__(self) -> None:
        #: Of the parameters that have a gradient, and of those that have a center but no gradient.
        self.going, self.idle = Lists(), Lists()
        #: 1 or 0 for each parameter of the group: whether it has moved in this cycle, and whether it moves now.
        self.masks: list[Tensor] = []
        #: The places of those that go, and the numbers of those that are idle.
        self.places: list[int] = []
        self.numbers: list[int] = []
        #: Of each run of tensors whose places follow each other: the number of the first, how many, the place, and the
        #: key of its noise; and the tables of that.
        self.runs: list[int] = []
        self.tables: list[Tensor] = []


class Captured(Centered):
    """An optimizer whose step can be one graph, the same for every phase of the cycle.

    The counters ``step`` and ``position`` are tensors then, and nobody looks at them: every step does what is done at
    the start of a cycle, an inner step, and an outer step, each multiplied by 0 or 1 (`wideflat.kernels.branchless`).
    So it is with ``capturable=True``, and from the first step that `torch.compile` traces on.
    """

    _kept = (*Centered._kept, "capturable", "_obstacle")
    capturable = False
    #: Why steps cannot be captured; None if they can.
    _obstacle: str | None = None
    #: How parameters of 16 bits are rounded, by those that move them themselves.
    rounding = "nearest"

    #: The tensors of each group in this step, with a gradient and without one, until they are asked for.
    _gathered: list[tuple[Part, Part]]

    def _settle_capture(self, capturable: bool) -> None:
        """Find out whether steps can be captured, at the end of a constructor; refuse what was asked for and cannot."""
        _mark_for_the_tracer()
        self.capturable, self._obstacle = flag("capturable", capturable), type(self)._obstacle
        params, group = self._parameters(), self.outer.param_groups[0]
        if self._obstacle is not None:
            pass
        elif self.state_device is not None:
            self._obstacle = "because its state is kept on another device (state_device)"
        elif any(map(is_sharded, params)) or len({p.device for p in params}) > 1:
            self._obstacle = "because its parameters are sharded, or on several devices"
        elif type(self.outer) is not torch.optim.SGD or group["maximize"] or group["dampening"]:
            self._obstacle = "because its outer optimizer is not torch's SGD without dampening"
        elif self._prefix and self.inner_state == "restart":
            self._obstacle = "because the state of its inner optimizer restarts with each cycle (inner_state)"
        if self.capturable and self._obstacle is not None:
            raise ValueError(
                f"capturable=True: steps of this {type(self).__name__} cannot be captured, {self._obstacle}"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _mark_for_the_tracer()

    def _is_captured(self) -> bool:
        return self._obstacle is None and (self.capturable or torch.compiler.is_compiling())

    # --------------------------------------------------------------------------------------------- what subclasses say

    def _parts(self, chosen: Callable[[Tensor], bool]) -> list[Part]:
        raise NotImplementedError

    def _has_moved(self, p: Tensor) -> bool:
        raise NotImplementedError

    def _noise_of(self, settings: dict[str, Any]) -> GaussianNoise:
        raise NotImplementedError

    def _forget_cycle(self) -> None:
        """Nothing is known any more of what the steps of this cycle moved."""

    def _step_inner(self, inner: Optimizer) -> None:
        raise NotImplementedError

    def _move(self, groups: list[Lists]) -> None:
        """The pull and the inner step, of the parameters that have a gradient."""
        raise NotImplementedError

    def _inner_rate(self, number: int) -> Real:
        """The learning rate of the inner step of a group."""
        raise NotImplementedError

    def _outer_rule(self, number: int) -> Outer:
        """What the outer step does to a group."""
        raise NotImplementedError

    def _own_memory(self, number: int, part: Part) -> tuple[list[Tensor], list[Tensor]]:
        """Velocities of an inner SGD that is built in, and what the rounding of w' has lost."""
        return [], []

    # ---------------------------------------------------------------------------------------------------------- a step

    def _captured_step(self, closure: Callable[[], Any] | None) -> Any:
        """One step without a branch.

        torch's tracer does not trace a method of an optimizer that is called ``_init_group``: it calls it, and takes
        what it has put into lists for inputs of the graph. What decides about them is guarded by the tracer.
        """
        if torch.compiler.is_compiling():
            if len(self.inner) > 1:
                self._prepare_first()
                for inner in self.inner:  # the tracer then knows their groups by their places there, as their steps do
                    len(inner.param_groups)
            self._init_group()  # before anybody has looked at the counters: they become tensors
        self._refuse_at_center("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            if self._is_rehearsal():
                self._parts(self._has_gradient)
                self._rehearse()
                return loss
            self._init_group()
        groups = [self._group(number) for number in range(len(self.param_groups))]
        record = self._settings()[0]
        start, close = phase_of(record["position"], record["inner_steps"])
        for number, group in enumerate(groups):
            group.going.apart = group.idle.apart = self._moves_apart(number)
            for lists in (group.going, group.idle):
                lists.begin(start, restarts=not self._prefix and self.inner_state == "restart")
            moved, present = group.masks
            moved.mul_(1 - start).add_(present).clamp_(max=1)
        self._move([group.going for group in groups])
        for number, group in enumerate(groups):
            self._settle(number, group, close)
        record["position"].add_(1).mul_(1 - close.to(torch.int64))
        record["step"].add_(1)
        return loss

    def _settle(self, number: int, group: _Group, close: Tensor) -> None:
        """Noise, mean, and the outer step of a group."""
        going, idle, settings, rule = group.going, group.idle, self._settings()[number], self._outer_rule(number)
        if going.w_prime:
            if isinstance(settings["epsilon"], Tensor) or settings["epsilon"]:
                self._add_noise(number, group, noise_scale(self._inner_rate(number), settings["epsilon"]))
            going.average(settings["alpha"])
            going.follow(close, rule)
        for k, its_number in enumerate(group.numbers):  # moved earlier in this cycle, if at all
            idle.only(k).follow(close * group.masks[0][its_number], rule)
        by_chance = going.apart and self.rounding == "stochastic"
        seed, step = int(settings["seed"]), self._settings()[0]["step"]
        going.store(chances(going.w_prime, group.places, seed, step) if by_chance else None)
        idle.store()

    def _group(self, number: int) -> _Group:
        group = _Group()
        lists = [getattr(group.going, name) for name in _GOING] + [getattr(group.idle, name) for name in _IDLE]
        plain = (group.masks, group.places, group.runs, group.numbers, group.tables)
        self._init_group(number, *plain, *lists)
        return group

    def _moves_apart(self, number: int) -> bool:
        """Are the parameters of 16 bits of a group moved in float32 by the SGD that is built in, and then rounded?"""
        half = any(p.dtype in ROUNDED for p in self.param_groups[number]["params"])
        return half and not self._prefix and self.state_dtype == torch.float32

    def _step_along(self, inner: Optimizer, groups: list[Lists], directions: list[list[Tensor]]) -> None:
        """A step of an inner optimizer with other gradients, which are taken back."""
        kept = [[gradient.clone() for gradient in going.gradients] for going in groups]
        for going, d in zip(groups, directions, strict=True):
            if d:
                torch._foreach_copy_(going.gradients, d)
        self._step_captured(inner)
        for going, gradients in zip(groups, kept, strict=True):
            if gradients:
                torch._foreach_copy_(going.gradients, gradients)

    def _step_captured(self, inner: Optimizer) -> None:
        """A step of an inner optimizer; traced beneath what torch wraps around it, which breaks graphs."""
        hooked = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        if torch.compiler.is_compiling() and not hooked:
            self._cores[type(inner)](inner)
        else:
            self._step_inner(inner)

    def _add_noise(self, number: int, group: _Group, scale: Real) -> None:
        settings, step, x = self._settings()[number], self._settings()[0]["step"], group.going.x
        if x[0].device.type == "cpu" and not torch.compiler.is_compiling():
            add_noise(x, list(group.places), self._noise_of(settings), int(step), float(scale))
            return
        for run in range(len(group.runs) // 4):
            first, count, place, key = group.runs[4 * run : 4 * run + 4]
            chosen = x[first : first + count]
            elements = sum(tensor.numel() for tensor in chosen)
            if x[0].device.type == "cpu":
                z = drawn(step, place, elements, key, group.tables[TABLES * run : TABLES * (run + 1)])
            else:
                at = torch.arange(place, place + elements, device=x[0].device)
                z = normal(at, key_of(int(settings["seed"]), step), group.tables[run])
            scaled = torch._foreach_mul(scattered(z.to(chosen[0].dtype), chosen), scale)
            torch._foreach_add_(chosen, scaled)

    # ----------------------------------------------------------------------------------- what is made, and never traced

    def _init_group(self, number: int | None = None, *lists: list[Any]) -> None:
        """Make the state that a step works on; for a group, put it into lists."""
        if number is None:
            self._prepare()
            return
        going, idle = self._gathered[number]
        self._gathered[number] = Part(), Part()  # else its gradients would be kept
        masks, places, runs, numbers, tables, *others = lists
        masks += self._masks(number, going)
        places += stretches(going.places) or []
        numbers += [k for k, p in enumerate(going.group) if p.grad is None and self._has_center(p)]
        for first, count, place in _runs_of(going):
            key, its_tables = self._noise_tables(number, going.params[first : first + count], place)
            runs += [first, count, place, key]
            tables += its_tables
        for part, names, filled in ((going, _GOING, others), (idle, _IDLE, others[len(_GOING) :])):
            velocity, rest = self._own_memory(number, part)
            outer = zip(part.params, part.centers, strict=True) if self._outer_rule(number).momentum else []
            found: dict[str, list[Any]] = {
                "w_prime": part.w_prime,
                "w": part.w,
                "mu": part.mu if part.keeps_mean else [],
                "velocity": velocity,
                "outer_velocity": [self._outer_velocity(p, center) for p, center in outer],
                "rest": rest,
                "gradients": part.gradients,
            }
            for name, into in zip(names, filled, strict=False):
                into += found[name]

    def _noise_tables(self, number: int, params: list[Tensor], place: int) -> tuple[int, list[Tensor]]:
        """A key and the tables of the noise of a run, on whose device it is made by torch's operations."""
        settings, device = self._settings()[number], params[0].device
        if device.type != "cpu":
            return 0, [table_on(device)]
        if not settings["epsilon"] or not torch.compiler.is_compiling():
            return 0, []
        which = int(settings["seed"]), place, sum(p.numel() for p in params)
        if which not in self._streams:
            self._streams[which] = TracedNoise(*which)
        return self._streams[which].key, self._streams[which].tables

    def _outer_velocity(self, p: Tensor, center: Tensor) -> Tensor:
        state = self.outer.state[center]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(center)
        velocity: Tensor = state["momentum_buffer"]
        self.state[p]["outer_momentum_buffer"] = velocity
        return local(velocity)

    def _prepare(self) -> None:
        self.capturable = True
        self._forget_cycle()
        self._forget_rehearsal()
        device = self._parameters()[0].device
        if not self._moved:  # the first of these steps: the counters are numbers still, or were loaded
            self._was_open = self._is_open()
        self._counters_on(device)
        going = self._parts(self._has_gradient)
        idle = self._parts(lambda p: p.grad is None and self._has_center(p))
        for part in (*going, *idle):
            self._fit(part.params)
        self._gathered = list(zip(going, idle, strict=True))
        for inner in self.inner:
            _set_at_rest(inner)
            self._cores[type(inner)] = inspect.unwrap(type(inner).step)
            inner._opt_called = True  # type: ignore[attr-defined] # what a scheduler asks for

    def _prepare_first(self) -> bool:
        """As above, where the tracer has not called ``_init_group`` yet: it runs this when it traces, and not again."""
        self._prepare()
        return True

    def _counters_on(self, device: torch.device) -> None:
        """Make tensors of the counters, one of each for all groups."""
        record = self._settings()[0]
        for name in ("step", "position"):
            value = record[name]
            if not isinstance(value, Tensor) or value.device != device:
                value = torch.tensor(int(value), device=device)
            for settings in self._settings():
                settings[name] = value

    def _masks(self, number: int, going: Part) -> list[Tensor]:
        """Has each parameter of the group moved in this cycle? And does it now? 1 or 0."""
        params, device = going.group, self._settings()[0]["step"].device
        here = set(going.params)
        if number not in self._moved or len(self._moved[number]) != len(params):
            moved = [float(self._was_open and self._has_center(p) and self._has_moved(p)) for p in params]
            self._moved[number] = torch.tensor(moved, device=device)
        present = tuple(float(p in here) for p in params)
        if (number, present) not in self._present:
            self._present[number, present] = torch.tensor(present, device=device)
        return [self._moved[number], self._present[number, present]]

    def _make_working_memory(self) -> None:
        super()._make_working_memory()
        self._gathered, self._was_open = [], False
        self._streams: dict[tuple[int, int, int], TracedNoise] = {}
        self._moved: dict[int, Tensor] = {}
        self._cores: dict[type[Optimizer], Callable[..., Any]] = {}
        self._present: dict[tuple[int, tuple[float, ...]], Tensor] = {}


def _runs_of(part: Part) -> list[tuple[int, int, int]]:
    """Tensors whose places follow each other: the number of the first, how many, and the place."""
    runs: list[tuple[int, int, int]] = []
    end = -1
    for number, (p, place) in enumerate(zip(part.params, stretches(part.places) or [], strict=True)):
        if place == end:
            first, count, start = runs[-1]
            runs[-1] = first, count + 1, start
        else:
            runs.append((number, 1, place))
        end = place + p.numel()
    return runs


def _set_at_rest(inner: Optimizer) -> None:
    """Give torch's SGD its velocities, of zeros: it makes them in its first step, which would be a graph of its own."""
    if type(inner) is not torch.optim.SGD:
        return
    for group in inner.param_groups:
        for p in group["params"]:
            makes_one = group["momentum"] and not group["dampening"] and p.grad is not None
            if makes_one and inner.state[p].get("momentum_buffer") is None:
                inner.state[p]["momentum_buffer"] = torch.zeros_like(p)


def _mark_for_the_tracer() -> None:
    """The tracer runs this method and does not trace it.

    Said when there is an optimizer, for which torch has imported its compiler by itself; as a decorator it would be
    imported with this module, which takes twenty times as long as all else here.
    """
    torch.compiler.assume_constant_result(Captured._prepare_first)
