"""A gamma that one need not choose: the one that holds the explorer at a given distance from the center."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wideflat.checks import number, shown
from wideflat.checks.options import value_of
from wideflat.checks.records import reading
from wideflat.entropy_sgd import EntropySGD
from wideflat.kernels.float64 import doubled

__all__ = ["TargetDistance"]


class TargetDistance:
    r"""Sets gamma of Entropy-SGD, cycle by cycle, so that w' gets as far from w as asked for.

    The distance is d(w', w) / |w|^2 with d half the squared distance, after the last but one inner step of a cycle,
    where it can still be seen. The paper's automatic gamma_0 = L(w) / d(w', w) depends on how the loss is scaled and is
    called not robust there; this depends on neither the loss nor the size of the weights.

    How it finds gamma. On a quadratic loss of curvature h, with gradient g at w, the displacement x = w' - w obeys

    .. code-block:: text

        x <- x - eta' (g + s x) + sqrt(eta') epsilon N(0, I),     s = h + gamma     weight decay is a part of g and h
        E |x_l|^2 = |g|^2 phi_l(s)^2 + N eta' epsilon^2 psi_l(s)
        phi_l(s) = (1 - (1 - eta' s)^l) / s                       without momentum; with it, by the same recursion

    After the first step s does not matter: |x_1| gives |g|. After step l = L - 1, |x_l| gives s, and so h. The gamma of
    the next cycle is the one whose s gives the distance asked for. If all curvatures are equal one cycle is enough
    ("exact on quadratics"); if they differ, or the loss is no quadratic, the correction is repeated every cycle, and
    it rests exactly where the distance is the one asked for.

    Not every distance can be had: without a pull w' goes only so far, and a pull cannot take back the first step, nor
    the noise of mini-batches, which also lets the distance of single cycles scatter around the target. gamma then
    stays at 0, or at its largest, where h + gamma is 1 / eta' or less.

    Call `step` after every step of the optimizer. It takes the place of `wideflat.Focusing`. For optimizers around
    Adam, whose steps know no |g|, use `wideflat.Entropic`: its pull is a share of the way back and needs no scale.

    Args:
        optimizer: With SGD inside and L >= 3. Its groups have one gamma, inner rate and momentum.
        ratio: d(w', w) / |w|^2 to be held.
        gain: 1 corrects gamma after each cycle by what that cycle says. Below 1, where mini-batches differ much, a
            running mean over about 1 / gain cycles is listened to, and gain^2 of the correction is made.

    Attributes:
        reached: The ratio of the last cycle.

    Example:
        The loss w^2/2 at w = 1, where two steps of eta' = 0.1 get to x = -0.19, d = 0.01805 without a pull. Asked for
        is 0.0128, x = -0.16: the second step must give 0.06 instead of 0.09, so gamma * 0.1 * 0.1 is 0.03.

        >>> w = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        >>> opt = EntropySGD([w], lr=0.0, inner_lr=0.1, inner_steps=3, gamma=0.0, epsilon=0.0, momentum=0)
        >>> hold = TargetDistance(opt, ratio=0.0128)
        >>> for _ in range(5):
        ...     opt.zero_grad(); (w**2 / 2).sum().backward(); opt.step(); hold.step()
        >>> round(opt.param_groups[0]["gamma"], 6), round(hold.reached, 6)
        (3.0, 0.0128)
    """

    def __init__(self, optimizer: EntropySGD, ratio: float, *, gain: float = 1.0) -> None:
        if not isinstance(optimizer, EntropySGD):
            raise TypeError(f"optimizer must be an EntropySGD, got {shown(optimizer)}")
        if optimizer.inner_state != "restart" or any(type(inner) is not torch.optim.SGD for inner in optimizer.inner):
            raise TypeError(
                "TargetDistance works out what SGD does in a cycle, and the inner optimizer is another one or keeps "
                "its state; around Adam use wideflat.Entropic, whose pull needs no scale"
            )
        if optimizer.param_groups[0]["inner_steps"] < 3:
            raise ValueError(
                "TargetDistance looks at the first and at the last but one inner step of a cycle, so inner_steps must "
                f"be at least 3, got {optimizer.param_groups[0]['inner_steps']}"
            )
        self.optimizer, self.ratio = optimizer, number("ratio", ratio, above=0)
        self.gain = number("gain", gain, 0, 1)
        self.reached = float("nan")
        self._first = float("nan")
        #: Running means of the squared displacements after the first and the last but one step.
        self._heard: tuple[float, float] | None = None
        _inner_loop(optimizer)  # refuses groups that differ

    @torch.no_grad()
    def step(self) -> None:
        """After each step of the optimizer: look, and at the last but one step of a cycle set gamma for the next."""
        settings = self.optimizer.param_groups[0]
        if self.optimizer.at_center:
            return
        if settings["position"] == 1:
            self._first = 2 * self.optimizer.distance().item()
        if settings["position"] == settings["inner_steps"] - 1 and not math.isnan(self._first):
            square = 2 * self.optimizer.distance().item()
            of_w = sum(
                doubled(state["center"]).square().sum().item()
                for state in self.optimizer.state.values()
                if "center" in state
            )
            self.reached = square / 2 / of_w if of_w else float("inf")
            first_heard, heard = self._heard or (self._first, square)
            first_heard += self.gain * (self._first - first_heard)
            heard += self.gain * (square - heard)
            self._heard = (first_heard, heard)
            change, most = _inner_loop(self.optimizer).change(first_heard, heard, 2 * self.ratio * of_w)
            for group in self.optimizer.param_groups:
                group["gamma"] = min(max(0.0, float(settings["gamma"]) + self.gain**2 * change), most)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs; gamma itself is in the optimizer's groups."""
        mine = {"ratio": self.ratio, "gain": self.gain, "reached": self.reached}
        return {**mine, "first": self._first, "heard": self._heard}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        with reading("state of a TargetDistance"):
            ratio, gain = number("ratio", state_dict["ratio"], above=0), number("gain", state_dict["gain"], 0, 1)
            reached, first, heard = (state_dict[name] for name in ("reached", "first", "heard"))
            pair = None if heard is None else (value_of("heard", heard[0]), value_of("heard", heard[1]))
            reached, first = value_of("reached", reached), value_of("first", first)
            self.ratio, self.gain, self.reached, self._first, self._heard = ratio, gain, reached, first, pair


@dataclass(frozen=True)
class _InnerLoop:
    """What SGD does to a displacement on a quadratic loss, up to the last but one step of a cycle.

    Args:
        steps: l = L - 1.
        lr: eta'.
        momentum: Its momentum.
        nesterov: Nesterov's.
        noise: N eta' epsilon^2: the square that the noise of one step adds.
    """

    steps: int
    lr: float
    momentum: float
    nesterov: bool
    noise: float

    def advance(self, s: Any, g: float, x: Any, v: Any) -> tuple[Any, Any]:
        """One step, of displacement and velocity."""
        d = g + s * x
        v = self.momentum * v + d
        return x - self.lr * (d + self.momentum * v if self.nesterov else v), v

    def phi(self, s: Any) -> Any:
        """The displacement after all steps, for a gradient of -1.

        >>> round(_InnerLoop(2, 0.1, 0.0, False, 0.0).phi(1.0), 6)  # (1 - 0.9^2) / 1
        0.19
        """
        x = v = 0.0 * s
        for _ in range(self.steps):
            x, v = self.advance(s, -1.0, x, v)
        return x

    def psi(self, s: Any) -> Any:
        """What is left of the squares of the noise of all steps, each of 1."""
        x, v, total = 1.0 + 0.0 * s, 0.0 * s, 0.0 * s
        for _ in range(self.steps):
            total = total + x**2
            x, v = self.advance(s, 0.0, x, v)
        return total

    def change(self, first: float, square: float, wanted: float) -> tuple[float, float]:
        """How much larger s must be, from the squared displacements after the first and the last but one step; and the
        largest s that still brings w' nearer.
        """
        unit = self.lr * (1 + self.momentum if self.nesterov else 1.0)
        g2 = max(first - self.noise, 0.0) / unit**2
        if not (0 < first < math.inf and square < math.inf):  # nothing moved, or all is lost
            return 0.0, math.inf

        def of(s: Any) -> Any:
            return g2 * self.phi(s) ** 2 + self.noise * self.psi(s)

        most = self._end_of_fall(of)
        return _inverse(of, wanted, most, self.lr) - _inverse(of, square, most, self.lr), most

    def _end_of_fall(self, of: Callable[[Any], Any]) -> float:
        """Up to which s the displacement falls, at most 1 / eta': a stronger pull throws w' over w."""
        grid = np.linspace(0.0, 1.0 / self.lr, 401)
        rises = np.flatnonzero(np.diff(of(grid)) >= 0)
        return float(grid[rises[0]] if len(rises) else grid[-1])


def _inverse(of: Callable[[float], float], value: float, most: float, lr: float) -> float:
    """The s <= most at which a falling function has a value; ``most`` itself where it does not fall so low."""
    if value <= of(most):
        return most
    width = 1.0 / lr
    while of(most - width) < value and width < 1e6 / lr:  # curvatures may be negative
        width *= 2
    low, high = most - width, most
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) > value else (low, middle)
    return (low + high) / 2


def _inner_loop(optimizer: EntropySGD) -> _InnerLoop:
    names = ("inner_steps", "inner_lr", "momentum", "nesterov", "epsilon", "gamma")
    found = {tuple(float(group[name]) for name in names) for group in optimizer.param_groups}
    if len(found) > 1:
        raise ValueError(
            "TargetDistance sets one gamma, for all param groups; they differ in gamma, inner_lr, momentum, nesterov "
            "or epsilon"
        )
    inner_steps, lr, momentum, nesterov, epsilon, _ = found.pop()
    weights = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    return _InnerLoop(int(inner_steps) - 1, lr, momentum, bool(nesterov), weights * lr * epsilon**2)
