"""The steps of the family without a branch: one row of operations that serves every phase of the cycle.

What is traced or captured once is run at every step. So whether a cycle begins or ends is a number here, 1 or 0, by
which things are multiplied, and every step does the work of all phases: in operations on whole lists of tensors, whose
number does not depend on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wideflat.kernels.counter import key_of, words
from wideflat.kernels.flat_blocks import is_dense
from wideflat.kernels.rounding import join, part, round_by_chance
from wideflat.kernels.shards import Place, counted

__all__ = ["Lists", "Outer", "Real", "chances", "choose_", "memory_order", "noise_scale", "phase_of", "scattered"]
__all__ += ["sgd_"]

#: Numbers that groups have, which may be tensors.
Real = float | Tensor


def phase_of(position: Tensor, inner_steps: int) -> tuple[Tensor, Tensor]:
    """1 in the first step of a cycle, else 0; and the same of the last.

    >>> [mask.item() for mask in phase_of(torch.tensor(4), inner_steps=5)]
    [0.0, 1.0]
    """
    return (position == 0).to(torch.float32), (position + 1 >= inner_steps).to(torch.float32)


def choose_(old: list[Tensor], new: list[Tensor], mask: Tensor) -> None:
    """Let the old be the new ones where the mask is 1; to the last bit, whichever it is, as long as they are finite.

    >>> old = [torch.tensor([1.0, 2.0])]
    >>> choose_(old, [torch.tensor([3.0, 4.0])], torch.tensor(1.0))
    >>> old
    [tensor([3., 4.])]
    """
    torch._foreach_mul_(old, 1 - mask)
    torch._foreach_add_(old, torch._foreach_mul(new, mask))


def sgd_(
    x: list[Tensor], d: list[Tensor], v: list[Tensor], lr: Real, momentum: Real, nesterov: bool, weight_decay: Real
) -> None:
    """A step of SGD on x along d, which is overwritten; without momentum where there are no velocities."""
    if not x:
        return
    if isinstance(weight_decay, Tensor) or weight_decay:
        torch._foreach_add_(d, torch._foreach_mul(x, weight_decay))
    if v:
        torch._foreach_mul_(v, momentum)
        torch._foreach_add_(v, d)
        d = list(torch._foreach_add(d, torch._foreach_mul(v, momentum))) if nesterov else v
    torch._foreach_sub_(x, torch._foreach_mul(d, lr))


@dataclass
class Outer:
    """What the outer step does: SGD with these settings."""

    lr: Real
    momentum: Real
    nesterov: bool
    weight_decay: Real


@dataclass
class Lists:
    """The tensors of a group that take part in a step alike, in parallel lists; empty ones where there are none.

    ``x`` is w' in full: the parameters themselves, or float32 copies of those of 16 bits that are rounded apart.
    """

    w_prime: list[Tensor] = field(default_factory=list)
    w: list[Tensor] = field(default_factory=list)
    mu: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)
    outer_velocity: list[Tensor] = field(default_factory=list)
    rest: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    x: list[Tensor] = field(default_factory=list)
    #: Are parameters of 16 bits moved in float32, and rounded at the end of a step?
    apart: bool = False

    def begin(self, start: Tensor, restarts: bool) -> None:
        """The start of a cycle: w and mu on w', at rest."""
        if not self.w_prime:
            return
        self.x = self._joined() if self.apart else self.w_prime
        taken = self._taken()
        choose_(self.w, taken, start)
        if self.apart and self.rest:
            choose_(self.x, taken, start)
        if self.mu:
            choose_(self.mu, [x.to(mean.dtype) for x, mean in zip(self.x, self.mu, strict=True)], start)
        if self.velocity and restarts:
            torch._foreach_mul_(self.velocity, 1 - start)

    def _joined(self) -> list[Tensor]:
        if self.rest:
            return [join(p, lost) for p, lost in zip(self.w_prime, self.rest, strict=True)]
        return [p.to(w.dtype) for p, w in zip(self.w_prime, self.w, strict=True)]

    def _taken(self) -> list[Tensor]:
        """What w is at the start of a cycle: w' where somebody has changed the weights of the model, else itself."""
        if all(p.dtype == w.dtype for p, w in zip(self.w_prime, self.w, strict=True)):
            return self.w_prime
        return [
            torch.where(held == p, w, p.to(w.dtype))
            for p, w, held in zip(self.w_prime, self.w, self.held(), strict=True)
        ]

    def held(self) -> list[Tensor]:
        """The center as the model holds it."""
        if not self.rest:
            return [w.to(p.dtype) for p, w in zip(self.w_prime, self.w, strict=True)]
        rounded = [torch.empty_like(p) for p in self.w_prime]
        for w, p, lost in zip(self.w, rounded, self.rest, strict=True):
            part(w, p, torch.empty_like(lost))
        return rounded

    def _origin(self) -> list[Tensor]:
        """The center from which w' has set out, in the type of x: rounded, if what is lost by that is not kept."""
        if self.rest:
            return self.w
        return [held.to(x.dtype) for held, x in zip(self.held(), self.x, strict=True)]

    def pulled(self, gamma: Real, sign: float) -> list[Tensor]:
        """Compute sign times gradient + gamma (w' - w)."""
        if not self.x:
            return []
        gradients = [g.to(x.dtype) for g, x in zip(self.gradients, self.x, strict=True)]
        d = list(torch._foreach_mul(gradients, sign))
        if isinstance(gamma, Tensor) or gamma:
            away = torch._foreach_sub(self.x, self._origin())
            torch._foreach_add_(d, torch._foreach_mul(away, gamma))
        return d

    def pull_back(self, fraction: Real) -> None:
        """Compute w' <- w' - fraction (w' - w)."""
        d = torch._foreach_sub(self.x, self._origin())
        torch._foreach_mul_(d, fraction)
        torch._foreach_sub_(self.x, d)

    def average(self, alpha: float) -> None:
        """Compute mu <- alpha mu + (1 - alpha) w'."""
        if self.mu:
            explorer = [x.to(mean.dtype) for x, mean in zip(self.x, self.mu, strict=True)]
            torch._foreach_lerp_(self.mu, explorer, 1 - alpha)

    def follow(self, close: Tensor, rule: Outer) -> None:
        """The end of a cycle: w after mu, and w' on w."""
        origin = [held.to(w.dtype) for held, w in zip(self._origin(), self.w, strict=True)]
        mu = [mean.to(w.dtype) for mean, w in zip(self.mu or self.x, self.w, strict=True)]
        d = list(torch._foreach_sub(origin, mu))
        if isinstance(rule.weight_decay, Tensor) or rule.weight_decay:
            torch._foreach_add_(d, torch._foreach_mul(self.w, rule.weight_decay))
        if self.outer_velocity:
            v = torch._foreach_mul(self.outer_velocity, rule.momentum)
            torch._foreach_add_(v, d)
            d = list(torch._foreach_add(d, torch._foreach_mul(v, rule.momentum)) if rule.nesterov else v)
            choose_(self.outer_velocity, list(v), close)
        d = list(torch._foreach_mul(d, rule.lr))
        torch._foreach_mul_(d, close)  # not lr times close, which is a float32 number
        torch._foreach_sub_(self.w, d)
        choose_(self.x, [w.to(x.dtype) for w, x in zip(self.w, self.x, strict=True)], close)

    def only(self, number: int) -> Lists:
        """One of the tensors alone."""
        one = Lists(apart=self.apart)
        for mine, its in (
            *((self.w_prime, one.w_prime), (self.w, one.w), (self.mu, one.mu), (self.velocity, one.velocity)),
            *((self.outer_velocity, one.outer_velocity), (self.rest, one.rest), (self.x, one.x)),
        ):
            its += mine[number : number + 1]
        return one

    def store(self, drawn: list[Tensor] | None = None) -> None:
        """Round what was moved in float32: by chance, if random whole numbers are given."""
        if not self.apart:
            return
        for k, (x, p) in enumerate(zip(self.x, self.w_prime, strict=True)):
            if self.rest:
                part(x, p, self.rest[k])
            elif drawn is not None:
                round_by_chance(x, p, drawn[k])
            else:
                p.copy_(x)


def memory_order(numbers: Tensor, like: Tensor) -> Tensor:
    """Numbers that stand in the order of the memory of a tensor, in its shape; in that of its indices if it has gaps.

    >>> memory_order(torch.arange(4), torch.empty(2, 2).t()).tolist()
    [[0, 2], [1, 3]]
    """
    if like.is_contiguous() or not is_dense(like):
        return numbers.view(like.shape)
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda d: (-strides[d], d))
    return numbers.view([like.shape[d] for d in order]).permute([order.index(d) for d in range(like.dim())])


def scattered(numbers: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """One number for each element of tensors that follow each other, in their shapes."""
    pieces = numbers.split([tensor.numel() for tensor in tensors])
    return [memory_order(piece, tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def chances(tensors: list[Tensor], places: Sequence[Place], seed: int, step: Tensor) -> list[Tensor]:
    """Random whole numbers to round tensors by, a function of the place as the noise is."""
    key = key_of(seed, step, stream=1)
    drawn = [words(counted(place, p.numel(), p.device), key) for p, place in zip(tensors, places, strict=True)]
    return [memory_order(numbers, p) for numbers, p in zip(drawn, tensors, strict=True)]


def noise_scale(lr: Real, epsilon: Real) -> Real:
    """Compute sqrt(lr) epsilon."""
    return (lr.sqrt() if isinstance(lr, Tensor) else math.sqrt(lr)) * epsilon
