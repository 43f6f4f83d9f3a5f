"""Entropy-SGD: gradient descent on the local entropy, as a torch optimizer (Algorithm 1, Eq. 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.centered import step_quietly
from wideflat.checks import choice, flag, maker, optimizer, warn_of_low_lr
from wideflat.checks.family import check_cycle, check_entropy_sgd, refuse_differentiable, warn_of_adam
from wideflat.checks.options import bounded
from wideflat.checks.options import param_group as checked_group
from wideflat.checks.parameters import check_parameters, refuse_stale
from wideflat.cycles import Cycles
from wideflat.kernels.blocks import BlockLists
from wideflat.kernels.branchless import Lists, Outer, Real, sgd_
from wideflat.kernels.choice import chosen, is_rounded, rests
from wideflat.kernels.entropy_sgd import KernelLists, Rule
from wideflat.kernels.foreach import displacement
from wideflat.kernels.parts import Part
from wideflat.kernels.shards import like, local, of_one_kind
from wideflat.notebook import settings_shown

__all__ = ["EntropySGD"]

#: What a group of a file from before these names means.
ABSENT = dict.fromkeys(("outer_momentum", "outer_nesterov", "outer_weight_decay")) | {
    "step": 0,
    "position": 0,
    "evaluating": False,
}

#: Nesterov momentum when it is left out, that of the paper (App. C), and the inner rate when that is.
MOMENTUM, INNER_LR = 0.9, 0.02


class EntropySGD(Cycles):
    r"""Entropy-SGD (Algorithm 1): an explorer w' wanders around w for L mini-batches, then w moves after it.

    .. code-block:: text

        for t = 1, 2, ...
            w', mu <- w
            for l = 1, ..., L                                     each is one call of step(), on one mini-batch
                dw' <- grad Loss(w') + gamma (w' - w)
                w'  <- w' - eta' dw' + sqrt(eta') epsilon N(0, I)
                mu  <- alpha mu + (1 - alpha) w'
            w <- w - eta (w - mu)                                 within the L-th call

    The model holds w', on which gradients are taken; the optimizer holds w. The gradient of the local entropy is
    gamma (w - <w'>) (Eq. 5), with mu for the mean <w'> and gamma absorbed in eta, as in the paper.

    ``lr`` is the outer rate eta, so every scheduler of torch drives the outer step. All arguments live in the param
    groups and are read from there at every call: change ``group["gamma"]`` by hand or with `wideflat.Focusing`.

    Notes on the paper:
        - Weight decay and momentum are used in both loops (App. C). In the inner loop: gradient + gamma (w' - w) +
          weight decay, then momentum, then the step, then the noise. Inner momentum is zero when a cycle starts; outer
          momentum lives on. In the outer loop the same with (w - mu) as the gradient.
        - The coupling pulls w' towards w, as Algorithm 1 prints it (the text of Sec. 4 has the opposite sign).
        - mu keeps the weight ``alpha`` and the noise is sqrt(eta') epsilon, both as printed. Other implementations use
          1 - alpha, and a factor sqrt(2) in the noise.
        - w' is put back on w at the end of the L-th call, so at a multiple of L calls the model holds w.

    Args:
        params: Parameters, or groups of them, as for any torch optimizer.
        lr: Outer learning rate eta: the part of the way from w to the mean of w' that w goes, 0.5 to 1 in the paper.
            SGD's learning rate is ``inner_lr``. How the defaults were chosen: `docs/optimizers.md`.
        inner_lr: Inner learning rate eta'. It is not driven by schedulers.
        inner_steps: L, the mini-batches in a cycle; the same in all groups.
        gamma: Strength of the pull towards w.
        epsilon: Size of the Langevin noise.
        alpha: Weight of the past in the running mean mu; 0 keeps the last w' alone.
        momentum: Momentum of both loops. When left out, Nesterov's of 0.9 as in the paper; with another ``inner`` 0.
        nesterov: Nesterov momentum in both loops; where ``momentum`` is given it is to be asked for, as in torch.
        weight_decay: Weight decay of both loops.
        outer_momentum: Momentum of the outer loop, where it is to differ; None means ``momentum``.
        outer_nesterov: The same for ``nesterov``.
        outer_weight_decay: The same for ``weight_decay``.
        inner: Another optimizer for the inner step: anything that makes one out of params and ``lr``, for example
            ``functools.partial(torch.optim.RMSprop, momentum=0.9)``. It gets the gradient + gamma (w' - w), its ``lr``
            is set to ``inner_lr`` before each step, and its state is saved with this one's. ``momentum``, ``nesterov``
            and ``weight_decay`` then concern the outer loop alone: give the inner ones to the factory. Around AdamW or
            Muon `wideflat.Entropic` is the better choice: its pull does not go through their gradients.
        inner_state: ``"restart"`` the inner optimizer with each cycle, or ``"keep"`` its state; always the whole of it,
            since its parts belong together (Adam's moments share one step count). None restarts SGD, as the paper
            does, and keeps that of another ``inner``, whose knowledge of the landscape takes longer than L steps.
        seed: Seed of the noise, which is a function of (seed, step, parameter): the same on every data-parallel rank
            and after a resume.
        fused: Work in a compiled kernel, one pass over memory a step: for parameters on the CPU, where there is a C
            compiler (`wideflat.kernels.library`). None does so where it can be done; True raises an error where not;
            False uses torch's operations. The noise is the same, the rest equal up to rounding.
        state_dtype: Type of w, mu and the velocities, where it is wider than that of the parameters: steps below the
            rounding of bfloat16 weights are not lost.
        state_device: Where they are kept; None means with the parameters. They come and go block by block; with
            ``gamma = alpha = 0`` the center does so once in a cycle.
        rounding: What becomes of steps of w' below the rounding of parameters in bfloat16 or float16, whose gradients
            are taken at the rounded w' in any case. ``"kept"``: 16 bits more for each weight hold what it loses, and w'
            moves as in float32. ``"stochastic"``: w' is rounded up or down by chance, right on average, without more
            memory. ``"nearest"``: they are lost. For the built-in SGD; another ``inner`` rounds as it does.
        maximize: Ascend the objective instead.
        foreach: As for `torch.optim.SGD`, of the two inside, where neither the kernel nor blocks are used.
        differentiable: Refused: the steps are taken in place.
        capturable: Take steps that a CUDA graph can capture: the counters are tensors, and every step does the work of
            all phases of the cycle. `torch.compile` turns it on by itself. See `docs/devices.md`.

    Example:
        On the loss w^2/2 from w = 1, with L = 2, eta' = 0.5, gamma = 1 and alpha = 0.5, w' is 0.5 and then
        0.5 - 0.5 (0.5 - 0.5) = 0.5; mu is 0.75 and then 0.625; w ends at 1 - 0.8 (1 - 0.625) = 0.7:

        >>> w = torch.nn.Parameter(torch.tensor(1.0))
        >>> opt = EntropySGD([w], lr=0.8, inner_lr=0.5, inner_steps=2, gamma=1.0, epsilon=0.0, alpha=0.5, momentum=0)
        >>> for _ in range(2):
        ...     opt.zero_grad()
        ...     (w**2 / 2).backward()
        ...     _ = opt.step()
        >>> round(w.item(), 6), opt.at_center
        (0.7, True)
    """

    _kept = (*Cycles._kept, "_fused", "_plain", "_prefix", "_foreach", "rounding")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.5,
        inner_lr: float = INNER_LR,
        inner_steps: int = 5,
        gamma: float = 0.5,
        epsilon: float = 1e-4,
        alpha: float = 0.75,
        momentum: float | None = None,
        nesterov: bool | None = None,
        weight_decay: float = 0.0,
        *,
        outer_momentum: float | None = None,
        outer_nesterov: bool | None = None,
        outer_weight_decay: float | None = None,
        inner: Callable[..., Optimizer] | None = None,
        inner_state: str | None = None,
        seed: int = 0,
        fused: bool | None = None,
        state_dtype: torch.dtype = torch.float32,
        state_device: torch.device | str | None = None,
        rounding: str = "kept",
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        capturable: bool = False,
    ) -> None:
        if type(self) is EntropySGD and inner is None and isinstance(inner_lr, float) and inner_lr == INNER_LR:
            warn_of_low_lr(lr)
        refuse_differentiable(differentiable)
        fused = None if fused is None else flag("fused", fused)
        foreach = None if foreach is None else flag("foreach", foreach)
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        choice("rounding", rounding, ("kept", "nearest", "stochastic"))
        self._fused, self._plain, self.rounding, self._foreach = fused, inner is None, rounding, foreach
        self._prefix = "" if self._plain else "inner_"
        kept = ("restart" if self._plain else "keep") if inner_state is None else inner_state
        self._set_up(kept, state_dtype, state_device)
        defaults: dict[str, Any] = {"lr": lr, "inner_lr": inner_lr, "inner_steps": inner_steps, "gamma": gamma}
        defaults |= {"epsilon": epsilon, "alpha": alpha}
        defaults |= {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        defaults |= {"outer_momentum": outer_momentum, "outer_nesterov": outer_nesterov}
        defaults |= {"outer_weight_decay": outer_weight_decay, "seed": seed, "maximize": maximize}
        super().__init__(bounded(params), defaults)
        if inner is None:
            self.inner = [self._inner_sgd(group) for group in self.param_groups]
        else:
            made = maker("inner", inner)([self._inner_group(group) for group in self.param_groups], lr=inner_lr)
            self.inner = [optimizer("what inner returns", made)]
            warn_of_adam(self.inner[0], self.param_groups)
        foreach = of_one_kind(self._parameters()) and self._foreach is not False
        self.outer = torch.optim.SGD([self._centers_of(group) for group in self.param_groups], foreach=foreach)
        self._remember_beginning()
        self._settle_capture(capturable)

    def __repr__(self) -> str:
        return settings_shown(self)

    # --------------------------------------------------------------------------------------------------------- groups

    def _check_settings(self) -> None:
        for group in self.param_groups:
            check_entropy_sgd(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; in the middle of a cycle it joins in with w' = w."""
        super().add_param_group(checked_group(param_group))
        group = self.param_groups[-1]
        left_out = group["momentum"] is None
        if left_out:
            group["momentum"] = MOMENTUM if self._plain else 0.0
        if group["nesterov"] is None:
            group["nesterov"] = left_out and self._plain
        try:
            check_entropy_sgd(group)
            check_parameters(group["params"], self.param_groups)
            check_cycle(self.param_groups[0])
            if group["inner_steps"] != self.param_groups[0]["inner_steps"]:
                raise ValueError(
                    "inner_steps must be the same in all param groups, which go through the cycle together; "
                    f"got {group['inner_steps']} beside {self.param_groups[0]['inner_steps']}"
                )
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for name, start in (("step", 0), ("position", 0), ("evaluating", False)):
            group[name] = self.param_groups[0].get(name, start)
        if not self.inner:  # torch's constructor: the optimizers are made after it, of all groups
            return
        if self._plain:
            self.inner.append(self._inner_sgd(group))
        else:
            self.inner[0].add_param_group(self._inner_group(group))
        self.outer.add_param_group(self._centers_of(group))

    @staticmethod
    def _inner_group(group: dict[str, Any]) -> dict[str, Any]:
        """Our groups carry names that another optimizer does not know; it is given the parameters alone."""
        return {"params": group["params"], "lr": group["inner_lr"]}

    def _inner_sgd(self, group: dict[str, Any]) -> Optimizer:
        """SGD of one group, so that a faster path can take another one."""
        foreach = of_one_kind(group["params"]) and self._foreach is not False
        return torch.optim.SGD([{"params": group["params"]}], foreach=foreach)

    def _centers_of(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"params": [self._center_of(p) for p in group["params"] if p.requires_grad]}

    def _settings(self) -> list[dict[str, Any]]:
        return self.param_groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            for name, value in {**self.__dict__.get("defaults", {}), **ABSENT}.items():
                group.setdefault(name, value)
        super().__setstate__(state)

    # ---------------------------------------------------------------------------------------------------- Algorithm 1

    def _descend(self) -> list[tuple[Tensor, Tensor | None]]:
        """Where a group is to be maximized, turn its gradients round; those that were there, to be put back."""
        rising = [p for group in self.param_groups if flag("maximize", group["maximize"]) for p in group["params"]]
        before = [(p, p.grad) for p in rising if self._has_gradient(p)]
        for p, gradient in before:
            assert gradient is not None
            p.grad = -gradient
        return before

    @contextmanager
    def _pulled(self, numbers: range, parts: list[Part]) -> Iterator[None]:
        """Within it the gradients are dw' = gradient + gamma (w' - w)."""
        originals: list[tuple[Tensor, Tensor | None]] = []
        for part in parts:
            refuse_stale(part.gradients, part.params)
        for number, part in zip(numbers, parts, strict=True):
            gamma = float(self.param_groups[number]["gamma"])
            if not gamma or not part.w_prime:
                continue
            gradients = part.gradients
            originals += [(p, p.grad) for p in part.params]
            dw_prime = displacement(part.w_prime, part.w)
            torch._foreach_mul_(dw_prime, gamma)
            torch._foreach_add_(dw_prime, gradients)
            for p, pulled in zip(part.params, dw_prime, strict=True):
                p.grad = like(pulled, p)
        try:
            yield
        finally:
            for p, gradient in originals:
                p.grad = gradient

    def _step_inner(self, inner: Optimizer) -> None:
        """The inner step, with the rate (and for SGD the momentum and weight decay) that the groups have now."""
        number = self.inner.index(inner)
        groups = [self.param_groups[number]] if self._plain else self.param_groups
        for group, inner_group in zip(groups, inner.param_groups, strict=True):
            inner_group["lr"] = group["inner_lr"] if self.capturable else float(group["inner_lr"])
            if self._plain:
                inner_group.update({name: group[name] for name in ("momentum", "nesterov", "weight_decay")})
                if group["momentum"]:
                    for p in group["params"]:
                        if self._has_center(p):
                            self._velocity(p, inner, p)
        step_quietly(inner)

    def _step_outer(self) -> None:
        """The outer step: SGD on w - mu, with momentum and weight decay of its own."""
        for group, outer_group in zip(self.param_groups, self.outer.param_groups, strict=True):
            settings = {name: _outer(group, name) for name in ("momentum", "nesterov", "weight_decay")}
            outer_group.update(lr=float(group["lr"]), **settings)
        step_quietly(self.outer)

    def _restart(self, inner: Optimizer) -> None:
        if not self._plain:
            super()._restart(inner)
            return
        velocities = [local(state["momentum_buffer"]) for state in inner.state.values() if "momentum_buffer" in state]
        if velocities:
            torch._foreach_zero_(velocities)

    def _start_idle(self) -> None:
        super()._start_idle()
        if self._plain and self.inner_state == "restart":
            for p, state in self.state.items():
                if p.grad is None and "momentum_buffer" in state:
                    state["momentum_buffer"].zero_()

    # --------------------------------------------------------------------------------------------------- the velocities

    def _allocate(self, number: int, p: Tensor) -> dict[str, Any]:
        fresh = not self._has_center(p)
        state, group = super()._allocate(number, p), self.param_groups[number]
        if fresh:  # at rest, whatever the velocities were before ``opt.state`` was emptied
            self.outer.state.pop(state["center"], None)
            if self._plain:
                self.inner[number].state.pop(p, None)
        if self._plain and group["momentum"]:
            self._velocity(p, self.inner[number], p)
        if _outer(group, "momentum"):
            self._velocity(p, self.outer, state["center"])
        return state

    def _velocity(self, p: Tensor, sgd: Optimizer, weight: Tensor) -> Tensor:
        """The velocity of a parameter in either SGD, made of zeros where there is none yet."""
        velocity = sgd.state[weight].get("momentum_buffer")
        if velocity is None:
            velocity = sgd.state[weight]["momentum_buffer"] = self._like(p).zero_()
            self.state[p]["outer_momentum_buffer" if sgd is self.outer else "momentum_buffer"] = velocity
        return velocity

    def _velocities(self, name: str, part: Part, sgd: Optimizer, weights: list[Tensor]) -> list[Tensor]:
        try:
            return part.kept(name)
        except KeyError:
            return [local(self._velocity(p, sgd, weight)) for p, weight in zip(part.params, weights, strict=True)]

    def _adopt_inner(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        if not self._plain:
            super()._adopt_inner(saved)
            return
        for inner in self.inner:  # what was saved is copied into the velocities when they are made
            inner.state.clear()

    # ------------------------------------------------------------------------------------------------------ the kernel

    def _inner_step(self, parts: list[Part], starting: bool) -> None:
        if not self._plain:
            super()._inner_step(parts, starting)
            return
        for number, (group, inner, part) in enumerate(zip(self.param_groups, self.inner, parts, strict=True)):
            eta, momentum = float(group["inner_lr"]), float(group["momentum"])
            velocity = self._velocities("momentum_buffer", part, inner, part.params) if momentum else None
            lists = self._lists_of("inner", number, part, velocity)
            if lists is None:
                self._explore(inner, range(number, number + 1), [part], starting)
                continue
            pull = [float(group[name]) for name in ("weight_decay", "gamma", "alpha")]
            scale = math.sqrt(eta) * float(group["epsilon"])
            rule = Rule(eta, momentum, group["nesterov"], *pull, scale, starting)
            noise = self._noise_of(group) if scale else None
            taken = starting and self._is_taken_up(part)
            lists.inner_step(part.gradients, rule, noise, int(group["step"]), taken)

    def _follow(self, parts: list[Part]) -> None:
        others = []
        for number, (group, part) in enumerate(zip(self.param_groups, parts, strict=True)):
            momentum, nesterov, decay = (_outer(group, name) for name in ("momentum", "nesterov", "weight_decay"))
            velocity = self._velocities("outer_momentum_buffer", part, self.outer, part.centers) if momentum else None
            lists = self._lists_of("outer", number, part, velocity)
            if lists is None:
                others.append(part)
            else:
                lists.outer_step(Rule(float(group["lr"]), float(momentum), nesterov, float(decay)))
        super()._follow(others)

    def _lists_of(
        self, loop: str, number: int, part: Part, velocity: list[Tensor] | None
    ) -> KernelLists | BlockLists | None:
        """What takes the step of a group, kept as long as its tensors stay; None for torch on whole tensors."""
        if not part.w_prime or torch.compiler.is_compiling():
            return None
        if self._fused is False and not self._rounds_apart(part):
            return None
        rest = self._rests(part)
        lists = (part.w_prime, part.w, part.mu if part.keeps_mean else None, velocity, rest)
        kept = self._kernels.get((loop, number))
        if kept is not None and kept.matches(*lists, offsets=part.places):
            return kept
        self._kernels.pop((loop, number), None)
        self._fit(part.params)
        restarts = loop == "outer" or self.inner_state == "restart"
        chance = int(self.param_groups[number]["seed"]) if self.rounding == "stochastic" else None
        kept = chosen(part, lists, self._fused, restarts, self._rounds_apart(part), chance)
        if kept is not None:
            self._kernels[loop, number] = kept
        return kept

    def _rounds_apart(self, part: Part) -> bool:
        return self.rounding != "nearest" and is_rounded(part)

    def _rests(self, part: Part) -> list[Tensor] | None:
        return rests(part) if self.rounding == "kept" and self._rounds_apart(part) else None

    # -------------------------------------------------------------------------------------------------------- captured

    def _move(self, groups: list[Lists]) -> None:
        pairs = list(zip(self.param_groups, groups, strict=True))
        directions = [going.pulled(group["gamma"], -1.0 if group["maximize"] else 1.0) for group, going in pairs]
        if not self._plain:
            self._step_along(self.inner[0], groups, directions)
            return
        for (group, going), d in zip(pairs, directions, strict=True):
            rates = (group[name] for name in ("inner_lr", "momentum", "nesterov", "weight_decay"))
            sgd_(going.x, d, going.velocity, *rates)

    def _inner_rate(self, number: int) -> Real:
        return self.param_groups[number]["inner_lr"]

    def _outer_rule(self, number: int) -> Outer:
        group = self.param_groups[number]
        return Outer(group["lr"], *(_outer(group, name) for name in ("momentum", "nesterov", "weight_decay")))

    def _own_memory(self, number: int, part: Part) -> tuple[list[Tensor], list[Tensor]]:
        group = self.param_groups[number]
        if not self._plain:
            self.inner[0].param_groups[number]["lr"] = group["inner_lr"]
            return [], []
        has_velocity = part.params and group["momentum"]
        velocity = self._velocities("momentum_buffer", part, self.inner[number], part.params) if has_velocity else []
        return velocity, self._rests(part) or []

    def _make_working_memory(self) -> None:
        super()._make_working_memory()
        self._kernels: dict[tuple[str, int], KernelLists | BlockLists] = {}


def _outer(group: dict[str, Any], name: str) -> Any:
    value = group[f"outer_{name}"]
    return group[name] if value is None else value
