"""An optimizer with a center: w beside the weights w' that the model holds. What it keeps, saves, loads and shows."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wideflat.checks import flag, network, shown, warn_user
from wideflat.checks.family import explained, phase_of
from wideflat.checks.options import device, dtype
from wideflat.checks.records import check_state_dict, copiable, dense, of_shape
from wideflat.kernels.flat_blocks import is_dense
from wideflat.kernels.float64 import doubled
from wideflat.kernels.foreach import as_held
from wideflat.kernels.parts import has_gradient
from wideflat.kernels.rounding import ROUNDED, empty_rest
from wideflat.kernels.shards import anywhere, local, local_gradient, placed, replace, total

__all__ = ["Centered", "adopt_state", "step_quietly", "warn_off_center"]

#: State of a parameter that is made here, not by the inner optimizers or the outer one.
OWN = ("center", "mean", "momentum_buffer")
#: The optimizers that exist now, for `warn_off_center`; they are forgotten when nobody else holds them.
_alive: WeakSet[Centered] = WeakSet()


@dataclass
class _Place:
    """Where the model is. One object that is changed in place: Lightning's wrapper calls our methods as its own."""

    within_center: bool = False
    times_shown: int = 0
    has_warned: bool = False
    has_looked_around: bool = False


class Centered(Optimizer):
    """An optimizer whose model holds an explorer w' that inner optimizers move, and that moves a center w itself.

    State of a parameter: ``center``, ``mean`` where one is kept, ``explorer`` while the model holds w instead of w';
    and, under names of their own, that of the inner optimizers and of the outer one, which works on the centers. It is
    made at the first step, in ``state_dtype`` or the type of the parameter, whichever is wider.

    A subclass says where its settings are (`_settings`): for each param group a dict with ``inner_steps``, ``alpha``,
    and the counters ``step``, ``position`` and ``evaluating``.
    """

    inner: list[Optimizer]
    outer: Optimizer
    #: How entries of the inner optimizers' state are called among this one's.
    _prefix = "inner_"
    #: What a pickled or copied optimizer keeps, beside what torch keeps of every optimizer.
    _kept: tuple[str, ...] = (
        *("inner", "outer", "inner_state", "state_dtype", "state_device", "_centers", "_initial", "_rehearsed"),
    )

    def _set_up(self, inner_state: str, state_dtype: torch.dtype, state_device: torch.device | str | None) -> None:
        """Set what every subclass has; before torch's constructor."""
        if not isinstance(inner_state, str) or inner_state not in ("keep", "restart"):
            raise ValueError(f"inner_state must be 'keep' or 'restart', got {shown(inner_state)}")
        self.inner_state = inner_state
        self.state_dtype, self.state_device = dtype("state_dtype", state_dtype), device("state_device", state_device)
        self.inner = []
        self._centers: dict[Tensor, Tensor] = {}
        self._initial: list[dict[Tensor, Any]] = []
        self._rehearsed: list[Optimizer] = []
        self._make_working_memory()

    def _make_working_memory(self) -> None:
        self._place = _Place()
        _alive.add(self)
        self._layouts: dict[Tensor, tuple[Any, ...]] = {}

    def _settings(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _keeps_mean(self, number: int) -> bool:
        """Does the group have a running mean? Without one, at alpha = 0, it is w' itself."""
        return float(self._settings()[number]["alpha"]) > 0

    def _phase(self) -> tuple[int, int]:
        """The position in the cycle and its length, the same in all groups."""
        return phase_of(self._settings())

    def _set_position(self, position: int) -> None:
        """Set it in all groups; a counter that is a tensor stays the same one."""
        for settings in self._settings():
            counter = settings["position"]
            settings["position"] = counter.fill_(position) if isinstance(counter, Tensor) else position

    def _is_open(self) -> bool:
        """Is a cycle under way, so that the model holds w' and not w?"""
        return self._phase()[0] > 0

    # --------------------------------------------------------------------------------------------- state, where it is

    def _has_center(self, p: Tensor) -> bool:
        return p in self.state and "center" in self.state[p]

    def _center_of(self, p: Tensor) -> Tensor:
        """The memory of the center of a parameter, on which the outer optimizer works."""
        if p not in self._centers:
            self._centers[p] = self._like(p).copy_(p.detach())
        return self._centers[p]

    def _like(self, p: Tensor) -> Tensor:
        """Memory for state of a parameter, lying in it as the parameter does."""
        dtype, device = torch.promote_types(p.dtype, self.state_dtype), torch.device(self.state_device or p.device)
        pinned = device.type == "cpu" and p.device.type not in ("cpu", "meta") and p.layout == torch.strided
        return torch.empty_like(p, dtype=dtype, device=device, requires_grad=False, pin_memory=pinned)

    def _allocate(self, number: int, p: Tensor) -> dict[str, Any]:
        """The state of one parameter of a group, at w' = w and at rest."""
        known = p in self._centers
        center = self._center_of(p)
        if not known:  # thawed since: the outer optimizer has not seen it
            self.outer.param_groups[number]["params"].append(center)
        state = self.state[p]
        if "center" not in state:
            self._fit_tensor(p, center)
            state["center"] = center.copy_(p)
        if "mean" not in state and self._keeps_mean(number):
            state["mean"] = self._like(p).copy_(p)
        return state

    def _fit(self, params: list[Tensor]) -> None:
        """Let state follow parameters that were cast, moved or laid out anew (``model.double()``, channels_last)."""
        for p in params:
            layout = p.shape, local(p).stride(), p.dtype, p.device
            if self._layouts.get(p) == layout:
                continue
            center, state = self._centers[p], self.state[p]
            own = [state[name] for name in OWN if name in state]
            others = [value for value in self.outer.state.get(center, {}).values() if isinstance(value, Tensor)]
            for tensor in (*own, *(value for value in others if value.shape == center.shape)):
                self._fit_tensor(p, tensor)
            self._layouts[p] = layout

    def _fit_tensor(self, p: Tensor, tensor: Tensor) -> None:
        if tensor.shape != p.shape:
            raise RuntimeError(
                f"a parameter has the shape {tuple(p.shape)}, and had {tuple(tensor.shape)} when the optimizer first "
                "saw it; make a new optimizer for other parameters"
            )
        dtype, device = torch.promote_types(p.dtype, self.state_dtype), torch.device(self.state_device or p.device)
        cast_or_moved = tensor.dtype != dtype or tensor.device != device
        part = local(p)
        if cast_or_moved or (is_dense(part) and local(tensor).stride() != part.stride()):
            replace(tensor, self._like(p).copy_(tensor))

    def _restart(self, inner: Optimizer) -> None:
        """Give an inner optimizer the state that it had at the beginning: none, as a rule."""
        for p, state in inner.state.items():
            for name in state:
                self.state[p].pop(self._prefix + name, None)
        inner.state.clear()
        if self._initial:
            initial = self._initial[self.inner.index(inner)]
            inner.state.update({p: copy.deepcopy(state) for p, state in initial.items()})

    def _remember_beginning(self) -> None:
        if self.inner_state == "restart":
            self._initial = [{p: copy.deepcopy(state) for p, state in inner.state.items()} for inner in self.inner]

    def _has_gradient(self, p: Tensor) -> bool:
        return has_gradient(p, type(self).__name__)

    # ------------------------------------------------------------------------------------------ state, saved and loaded

    def _publish(self) -> None:
        """Show the state of the inner and the outer optimizers (the same tensors) among this one's."""
        for inner in self.inner:
            for p, state in inner.state.items():
                self.state[p].update({self._prefix + name: value for name, value in state.items()})
        for p, center in self._centers.items():
            if p in self.state:
                state = self.outer.state.get(center, {})
                self.state[p].update({f"outer_{name}": value for name, value in state.items()})

    def _is_rehearsal(self) -> bool:
        """Is this call for the state alone? torch.distributed.checkpoint calls ``step()`` on an optimizer without
        state, with zero gradients and zero ``lr``; that must not move anything.
        """
        if any("center" in state for state in self.state.values()):
            return False
        return all(float(group.get("lr", 1)) == 0 for group in self.param_groups) and not anywhere(
            (p, local_gradient(p).any()) for p in self._parameters() if self._has_gradient(p)
        )

    def _rehearse(self) -> None:
        """Make the state of the optimizers by a step that is taken back, so that its names are there for a checkpoint
        to be loaded. Its values mean nothing: they are loaded over, or forgotten at the first step.
        """
        for center in self._centers.values():
            center.grad = torch.zeros_like(center)
        for optimizer in (*self.inner, self.outer):
            if not optimizer.state:
                params = [p for group in optimizer.param_groups for p in group["params"]]
                before = [p.detach().clone() for p in params]
                step_quietly(optimizer)
                for p, w in zip(params, before, strict=True):
                    p.copy_(w)
                self._rehearsed.append(optimizer)
        for center in self._centers.values():
            center.grad = None
        self._publish()

    def _forget_rehearsal(self) -> None:
        for optimizer in self._rehearsed:
            optimizer.state.clear()
        self._rehearsed = []

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer; also right in the middle of a cycle and after `eval`, but not within `center`."""
        self._refuse_within_center("state_dict()")
        self._publish()
        return super().state_dict()

    @explained
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for any optimizer. Load the model's own state too: the model holds w', the optimizer w."""
        self._refuse_within_center("load_state_dict()")
        handle = self.register_load_state_dict_pre_hook(_hear)  # the last one: it hears what the others made
        try:
            super().load_state_dict(copiable(state_dict))
        finally:
            handle.remove()
            self.__dict__.pop("_heard", None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_working_memory()
        heard = self.__dict__.pop("_heard", None)
        if heard is not None:
            states = [heard["state"].get(number, {}) for group in heard["param_groups"] for number in group["params"]]
            saved = zip(self._parameters(), states, strict=True)
            self._adopt({p: _placed(s, p) for p, s in saved}, heard["param_groups"])

    @torch.no_grad()
    def _adopt(self, saved: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Take over what was saved: of each parameter, and of each group."""
        # Copies first: what is loaded may be this optimizer's own memory, filled from a file.
        copies = {
            p: {name: self._like(p).copy_(state[name]) for name in OWN if name in state} for p, state in saved.items()
        }
        self.state, self._rehearsed = defaultdict(dict), []
        self._adopt_groups(groups)
        self._adopt_inner(saved)
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if "center" in saved[p]:
                    state = self._allocate(number, p)
                    for name in state.keys() & copies[p].keys():
                        replace(state[name], copies[p][name])
                    if "explorer" in saved[p]:
                        state["explorer"] = torch.empty_like(p, requires_grad=False).copy_(saved[p]["explorer"])
                    if "rest" in saved[p] and saved[p]["rest"].dtype == ROUNDED.get(p.dtype):
                        state["rest"] = empty_rest(p).copy_(saved[p]["rest"])
        adopt_state(self.outer, "outer_", {center: saved[p] for p, center in self._centers.items()})
        if self.evaluating and self._is_open() and not any("explorer" in s for s in self.state.values()):
            raise ValueError(
                "the state was saved after eval() in the middle of a cycle, and came here without w'; save it after "
                "train(), or not flattened"
            )
        self._publish()

    def _adopt_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take over saved settings that torch's loader has not put into ``param_groups``."""

    def _adopt_inner(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        """Take over the state of the inner optimizers, by their own loaders, which know what must keep its type."""
        for inner in self.inner:
            adopt_state(inner, self._prefix, saved)

    # ------------------------------------------------------------------------------------------------------ the center

    @property
    def evaluating(self) -> bool:
        """Was `eval` called, and not `train` since?"""
        return flag("evaluating", self._settings()[0]["evaluating"])

    @property
    def at_center(self) -> bool:
        """Does the model hold w now? At the start of a cycle, within `center`, and after `eval`."""
        return self._place.within_center or self.evaluating or not self._is_open()

    @contextmanager
    def center(self, model: nn.Module | None = None) -> Iterator[None]:
        """Within ``with opt.center():`` the model holds w; afterwards w' again, whatever happened inside.

        Args:
            model: Restore the buffers of this model as well: for when its batch norm is refreshed within
                (`wideflat.refresh_batch_norm`), whose statistics belong to w and not to w'.
        """
        if self._place.within_center:  # nested: already there
            yield
            return
        if model is not None:
            network(model)
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if model is not None else []
        if not self.evaluating:
            self._show_center()
        self._place.within_center = True
        try:
            yield
        finally:
            self._place.within_center = False
            if not self.evaluating:
                self._show_explorer()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def eval(self) -> None:
        """Put w into the model, until `train`: Hugging Face's Trainer and Accelerate call both by themselves."""
        self._refuse_within_center("eval()")
        if not self.evaluating:
            self._show_center()
            for settings in self._settings():
                settings["evaluating"] = True

    def train(self) -> None:
        """Put w' back into the model after `eval`, to go on training."""
        self._refuse_within_center("train()")
        if self.evaluating:
            self._show_explorer()
            for settings in self._settings():
                settings["evaluating"] = False

    def recenter(self) -> None:
        """Start a cycle at the weights that the model holds now, for when others were loaded into it: they are w.

        An open cycle, and w' after `eval`, are forgotten; the optimizers inside keep their state.
        """
        self._refuse_within_center("recenter()")
        for state in self.state.values():
            state.pop("explorer", None)
        for settings in self._settings():
            settings["evaluating"] = False
        self._set_position(0)

    @torch.no_grad()
    def _show_center(self) -> None:
        """Put w into the model, in place: whoever shares the memory of the parameters sees it too."""
        self._place.times_shown += 1
        there = {p: state for p, state in self.state.items() if "center" in state} if self._is_open() else {}
        self._fit(list(there))
        for p, state in there.items():
            state["explorer"] = p.detach().clone()
            p.copy_(state["center"])
        torch.clear_autocast_cache()  # which may hold w', cast

    @torch.no_grad()
    def _show_explorer(self) -> None:
        self._fit(moved := [p for p, state in self.state.items() if "explorer" in state])
        for p in moved:
            p.copy_(self.state[p].pop("explorer"))
        torch.clear_autocast_cache()

    @explained
    @torch.no_grad()
    def distance(self) -> Tensor:
        """d(w', w): half the squared distance between explorer and center, over all parameters."""
        squares = []
        if self._is_open():
            for p in self._parameters():
                state = self.state.get(p, {})
                if "center" in state:
                    w_prime = local(state.get("explorer", p.detach()))
                    (held,) = as_held([local(state["center"])], [w_prime])
                    squares.append((p, doubled(w_prime - of_shape("a center", held, w_prime)).square().sum().cpu() / 2))
        return torch.zeros((), dtype=torch.float64) if (found := total(squares)) is None else found

    def _parameters(self) -> list[Tensor]:
        """All parameters, in an order that is the same on every rank."""
        return [p for group in self.param_groups for p in group["params"]]

    def _refuse_within_center(self, what: str) -> None:
        if self._place.within_center:
            raise RuntimeError(
                f"{what} was called within `with opt.center():`, where the model holds w and the optimizer w'; "
                "call it after the block"
            )

    def _refuse_at_center(self, what: str) -> None:
        self._refuse_within_center(what)
        if self.evaluating:
            raise RuntimeError(f"{what} was called after opt.eval(), while the model holds w; call opt.train() first")


def _hear(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Keep what is to be loaded, in the types that it was saved with; refuse what does not fit."""
    check_state_dict(state_dict)
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, (p, number) in enumerate(zip(params, numbers, strict=False)):  # torch refuses another number of them
        state = state_dict["state"].get(number, {})
        for name in (*OWN, "explorer", "rest", "outer_momentum_buffer"):
            if name in state and dense(f"{name} of parameter {index}", state[name]).shape != p.shape:
                raise ValueError(
                    f"the saved {name} of parameter {index} has the shape {tuple(state[name].shape)}, the parameter "
                    f"{tuple(p.shape)}; load the state of an optimizer of the same parameters"
                )
    optimizer.__dict__["_heard"] = state_dict


def _placed(state: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """What was saved of a parameter, its tensors cut over the ranks as the parameter is."""
    return {name: placed(value, p) if isinstance(value, Tensor) else value for name, value in state.items()}


def warn_off_center(params: Iterable[Tensor]) -> None:
    """Warn, once for an optimizer, if it has put w' into what is about to be measured or saved as the solution."""
    wanted = set(params)
    for optimizer in list(_alive):
        if optimizer._place.has_warned or not any(p in wanted for p in optimizer.state) or optimizer.at_center:
            continue
        optimizer._place.has_warned = True
        warn_user(
            f"the model holds the explorer w' of {type(optimizer).__name__}, not its solution w; measure and save it "
            "within `with opt.center(model):`, after opt.eval(), or, at the end of training, after opt.flush()"
        )


def adopt_state(optimizer: Optimizer, prefix: str, saved: dict[Tensor, dict[str, Any]]) -> None:
    """Load what was saved of each parameter under names with a prefix into an optimizer, groups as they are."""
    own: dict[str, Any] = {**optimizer.state_dict(), "state": {}}
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        state = saved.get(p, {}).items()
        if named := {name[len(prefix) :]: value for name, value in state if name.startswith(prefix)}:
            own["state"][index] = named
    optimizer.load_state_dict(own)


def step_quietly(optimizer: Optimizer) -> None:
    """A step of an optimizer inside another one: hooks on all optimizers count the step of the outer one alone."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer) if getattr(step, "hooked", False) else optimizer.step()
