"""Entropic: an outer loop around any optimizers, with a spring between what they move and what it moves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.centered import Centered
from wideflat.checks import instance, maker, number, shown
from wideflat.checks.family import check_cycle, refuse_differentiable
from wideflat.checks.options import param_group as checked_group
from wideflat.checks.options import strength
from wideflat.checks.parameters import check_parameters
from wideflat.cycles import Cycles
from wideflat.kernels.branchless import Lists, Outer, Real
from wideflat.kernels.foreach import pull_back
from wideflat.kernels.parts import Part
from wideflat.kernels.shards import of_one_kind

__all__ = ["Entropic"]


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
        capturable: Take steps that a CUDA graph can capture, as in `wideflat.EntropySGD`; the inner optimizers need
            theirs as well. `torch.compile` turns it on by itself.

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
        capturable: bool = False,
    ) -> None:
        _check_optimizers(optimizers)
        for name, value in (("outer_lr", outer_lr), ("outer_momentum", outer_momentum), ("pull", pull)):
            number(name, value, 0, 1e30)
        outer_lr, outer_momentum = strength("outer_lr", outer_lr), strength("outer_momentum", outer_momentum)
        settings = {"inner_steps": inner_steps, "pull": pull, "alpha": alpha, "epsilon": epsilon, "seed": seed}
        check_cycle(settings)
        settings |= {name: strength(name, settings[name]) for name in ("pull", "alpha", "epsilon")}
        self._set_up(inner_state, state_dtype, state_device)
        self.inner = list(optimizers)
        self._record: dict[str, Any] = {**settings, "step": 0, "position": 0, "evaluating": False}
        super().__init__([group for inner in optimizers for group in inner.param_groups], {})
        shared = set.intersection(*(set(inner.defaults) for inner in optimizers))  # some schedulers look here
        self.defaults = {name: value for name, value in optimizers[0].defaults.items() if name in shared}
        if outer is None:
            sgd = partial(torch.optim.SGD, lr=outer_lr, foreach=of_one_kind(self._parameters()))
            outer = partial(sgd, momentum=outer_momentum, nesterov=outer_momentum > 0)
        self.outer = maker("outer", outer)([self._centers_of(group) for group in self.param_groups])
        if not isinstance(self.outer, Optimizer):
            raise TypeError(f"outer must make a torch optimizer of parameter groups, made {shown(self.outer)}")
        self._remember_beginning()
        self._settle_capture(capturable)

    def __repr__(self) -> str:
        cycle = {name: self._record[name] for name in ("inner_steps", "pull", "alpha", "epsilon")}
        outer = {name: self.outer.param_groups[0].get(name) for name in ("lr", "momentum", "nesterov")}
        inner = [f"  inside: {type(each).__name__}, {_said(each.param_groups[0])}" for each in self.inner]
        where = "at its center" if self.at_center else "within a cycle"
        names = " and ".join(type(each).__name__ for each in self.inner)
        first = f"{type(self).__name__} around {names}, {where}, after {self._record['step']} steps: {_said(cycle)}"
        return "\n".join([first, *inner, f"  outside: {type(self.outer).__name__}, {_said(outer)}"])

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
        value = strength("pull", value)
        if isinstance(self._record["pull"], Tensor):  # of a captured step
            self._record["pull"].fill_(value)
        else:
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

    def _move(self, groups: list[Lists]) -> None:
        pull: Real = self._record["pull"]
        for going in groups:
            if going.w_prime and (isinstance(pull, Tensor) or pull):
                share = pull / self._record["inner_steps"]
                going.pull_back(share.clamp(max=1.0) if isinstance(share, Tensor) else min(1.0, share))
        for inner in self.inner:
            self._step_captured(inner)

    def _inner_rate(self, number: int) -> Real:
        return self.param_groups[number]["lr"]

    def _outer_rule(self, number: int) -> Outer:
        group = self.outer.param_groups[number]
        return Outer(*(group[name] for name in ("lr", "momentum", "nesterov", "weight_decay")))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, if there is one; in the middle of a cycle it joins in with w' = w."""
        if not hasattr(self, "outer"):  # torch's constructor, with the groups of the inner optimizers
            check_parameters(param_group["params"], self.param_groups)
            super().add_param_group(param_group)
            param_group["entropic"] = self._record
            return
        if len(self.inner) > 1:
            raise ValueError(
                f"there are {len(self.inner)} inner optimizers; add the group to one of them, before Entropic is made"
            )
        self.inner[0].add_param_group(checked_group(param_group))
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
        saved = {**self._record, **instance("entropic", groups[0]["entropic"], dict, "the record of an Entropic")}
        check_cycle(saved)
        number("pull", saved["pull"], 0, 1e30)
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


def _said(settings: Mapping[str, Any]) -> str:
    """Settings in words, without those that are off.

    Example:
        >>> _said({"params": [], "lr": 0.001, "betas": (0.9, 0.999), "foreach": None, "amsgrad": False})
        'lr=0.001, betas=(0.9, 0.999)'
    """
    hidden = ("params", "entropic", "initial_lr", "decoupled_weight_decay")
    kept = {n: v for n, v in settings.items() if n not in hidden and v is not None and v is not False}
    return ", ".join(f"{n}={v:g}" if isinstance(v, float) else f"{n}={v}" for n, v in kept.items())
