r"""Ascent in a ball without a step size to choose: gradients with momentum, steps that are halved, the best point kept.

.. code-block:: text

    u       = direction of steepest ascent: g / |g| in the l2 ball, sign g in the linf ball
    z       = P(x + eta u),         P the projection onto the ball, eta = 2 radius at first
    x_next  = P(x + alpha (z - x) + (1 - alpha) (x - x_before)),        alpha = 0.75

At checkpoints, which become closer, eta is halved and x goes back to the best point if less than 3/4 of the steps went
up, or if neither eta nor the best value has changed since the last one (Croce and Hein 2020, "Auto-PGD").

From the center the first step is radius times u: the perturbation of SAM.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from wideflat.kernels.float64 import has_float64

__all__ = ["BALLS", "Ball", "Climbed", "checkpoints", "climb"]

#: The balls that there are.
BALLS = ("l2", "linf")
#: Weight of the new direction against the last step, and the share of steps that have to go up.
ALPHA, RISING = 0.75, 0.75

#: The objective at a point, and its gradient; the gradient may be asked not to be computed.
Objective: TypeAlias = Callable[[Tensor, bool], tuple[float, Tensor | None]]


@dataclass(frozen=True)
class Ball:
    """All delta with |delta|_2 <= radius, or with |delta_i| <= radius for all i.

    Args:
        kind: ``"l2"`` or ``"linf"``.
        radius: Its radius.

    Example:
        >>> Ball("l2", 1.0).project(torch.tensor([3.0, 4.0])), Ball("linf", 1.0).project(torch.tensor([3.0, 0.5]))
        (tensor([0.6000, 0.8000]), tensor([1.0000, 0.5000]))
    """

    kind: str
    radius: float

    def project(self, delta: Tensor) -> Tensor:
        """The nearest point of the ball."""
        if self.kind == "linf":
            return delta.clamp(-self.radius, self.radius)
        length = _length(delta)
        return torch.where((length > self.radius).to(delta.device), delta * (self.radius / length), delta)

    def steepest(self, gradient: Tensor) -> Tensor:
        """The unit vector along which a linear function with this gradient grows fastest."""
        if self.kind == "linf":
            return gradient.sign()
        length = _length(gradient)
        has_one = ((length > 0) & (length < math.inf)).to(gradient.device)
        return torch.where(has_one, gradient / length, 0.0)

    def random(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """A point of it: of uniform direction and distance (l2), or uniform (linf)."""
        if self.kind == "linf":
            return self.radius * (2 * torch.rand(like.shape, generator=generator) - 1).to(like)
        z = torch.randn(like.shape, generator=generator).to(like)
        return z * (self.radius * float(torch.rand((), generator=generator)) / _length(z))


@dataclass
class Climbed:
    """Where an ascent has come: the best point, the objective there, and the last point."""

    best: Tensor
    value: float
    last: Tensor


def climb(
    objective: Objective, ball: Ball, start: Tensor, steps: int, first: tuple[float, Tensor] | None = None
) -> Climbed:
    """The best point that so many steps find.

    Args:
        objective: What is to be large.
        ball: Where.
        start: A point of it.
        steps: How many steps; the objective is computed once more than that.
        first: Objective and gradient at the start, where they are known.

    Example:
        The largest value of x + 2 y in the unit ball is that along the gradient.

        >>> slope = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> found = climb(lambda x, _: (float(slope @ x), slope), Ball("l2", 1.0), 0 * slope, 3)
        >>> round(found.value, 6) == round(5**0.5, 6)
        True
    """
    value, gradient = first or objective(start, True)
    x, before, eta = start, start, 2 * ball.radius
    best, best_value, best_gradient = start, value, gradient
    looks = checkpoints(steps)
    rises, last_look, last_eta, last_best = 0, 0, eta, value
    for step in range(1, steps + 1):
        assert gradient is not None
        z = ball.project(x + eta * ball.steepest(gradient))
        new = z if step == 1 else ball.project(x + ALPHA * (z - x) + (1 - ALPHA) * (x - before))
        before, x = x, new
        old = value
        value, gradient = objective(x, step < steps)
        rises += value > old
        if value > best_value or math.isnan(best_value):
            best, best_value, best_gradient = x, value, gradient
        if step == steps or not math.isfinite(value):
            break
        if step in looks:
            if rises < RISING * (step - last_look) or (eta == last_eta and best_value == last_best):
                eta, x, before, value, gradient = eta / 2, best, best, best_value, best_gradient
                last_eta = 2 * eta
            else:
                last_eta = eta
            rises, last_look, last_best = 0, step, best_value
    return Climbed(best, best_value, x)


def checkpoints(steps: int) -> list[int]:
    """After which steps it is decided whether eta is halved: at 22 %, 41 %, 57 %, 70 % of them, and then every 6 %.

    Example:
        >>> checkpoints(100)
        [22, 41, 57, 70, 80, 87, 93, 99]
    """
    found, before, now = [], 0.0, 0.22
    while now < 1:
        found.append(math.ceil(now * steps - 1e-9))
        before, now = now, now + max(now - before - 0.03, 0.06)
    return list(dict.fromkeys(found))


def _length(vector: Tensor) -> Tensor:
    """The length, where the vector is: the host does not wait for it. In float64, where there is that.

    Elsewhere of the vector over its largest number, whose squares neither overflow nor vanish.
    """
    if has_float64(vector.device):
        return vector.double().norm()
    largest = vector.abs().amax()
    return largest * (vector / torch.where(largest > 0, largest, 1.0)).norm()
