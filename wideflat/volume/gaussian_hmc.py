r"""Hamiltonian Monte Carlo that rotates its Gaussian exactly: chains that sample exp(-\|xi\|^2/2 - beta V(xi)).

The Gaussian part of H = \|xi\|^2/2 + \|p\|^2/2 + beta V is solved exactly by a rotation of (xi, p), so that a
trajectory costs no more in a million dimensions than V demands:

.. code-block:: text

    p ~ N(0, 1),  angle ~ U(pi/8, pi/2),  l = angle/eps rounded up
    l times:    p  <- p - eps/2 beta grad V
                xi <- xi cos eps + p sin eps,   p <- p cos eps - xi sin eps
                p  <- p - eps/2 beta grad V
    accept with probability min(1, exp(-dH))
    dH = beta (V_1 - V_0) + sum over kicks delta of (delta . p + |delta|^2/2)

dH is summed from these increments in float64: \|xi\|^2 + \|p\|^2, of the order of the number of weights, never enters.

**Angles.** A mode of frequency f = sqrt(1 + beta h) remembers xi^2 by (1 + E cos 2 f angle)/2 from one trajectory to
the next. Angles near pi/2 alone bring a mode of f = 2 back to where it was; over this wide range 0.57 is remembered at
most, whatever f >= 1.

**Steps.** During the burn-in of a node log eps moves by (exp(-\|dH\|) - 0.7)/(1 + 0.15 t). It is \|dH\|, not the
acceptance: while V still falls, a step that is too long gains energy and would be accepted and lengthened. After it
eps is the geometric mean over its second half, and frozen. Entering the next node 1/eps^2 = 1/1.2^2 + beta kappa, with
kappa as the node before had it.

**Waiting.** V, dH and the products that are kept stay on the device along a trajectory; the host reads them once at its
end, to accept or not and to adapt the step.

A chain is a value: `advance` makes the next state from one, with random numbers that depend on the seed of the chain,
the node and the trajectory alone. A state that was saved goes on bit for bit.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from wideflat.kernels.float64 import fetched, has_float64, number, summed
from wideflat.noise.shared_noise import fill_normal
from wideflat.seeds import derive_seed

__all__ = ["Chain", "Energy", "Plan", "Trace", "advance", "in_float64", "launched", "normal", "start", "trajectory"]

#: The longest step: without V a trajectory is one or two rotations.
LONGEST_STEP = 1.2
#: The mean of exp(-|dH|) that the step is adapted to.
TARGET = 0.7


class Energy(Protocol):
    """V, a fixed function of xi ~ N(0, 1).

    One that has a method ``launched``, as ``gradient`` but with V as a tensor, is asked for that: nobody waits for V.

    Attributes:
        size: Number of components of xi.
        dtype: Of xi.
        device: Of xi.
    """

    size: int
    dtype: torch.dtype
    device: torch.device

    def value(self, xi: Tensor) -> float:
        """V(xi)."""
        ...

    def gradient(self, xi: Tensor) -> tuple[float, Tensor]:
        """V(xi) and its gradient with respect to xi."""
        ...


@dataclass(frozen=True)
class Plan:
    """What a chain is to do.

    Attributes:
        betas: The nodes, in the order in which they are walked.
        burn: Trajectories before those that are kept, one number a node.
        keep: Trajectories that are kept, one number a node.
        seed: Of this chain alone.
        cap: Most leapfrog steps of a trajectory.
        ends: Whether the last xi of each node is kept too, to go on from there.
    """

    betas: tuple[float, ...]
    burn: tuple[int, ...]
    keep: tuple[int, ...]
    seed: int
    cap: int = 100
    ends: bool = False

    @property
    def trajectories(self) -> int:
        """Of the whole chain."""
        return sum(self.burn) + sum(self.keep)


@dataclass(frozen=True)
class Trace:
    """What a chain has seen at one node.

    Attributes:
        beta: The node.
        values: V after each kept trajectory.
        pull: xi . grad V.
        virial: |xi|^2 - N + beta xi . grad V, whose mean is zero.
        accept: Probability of acceptance.
        error: dH.
        short: Whether the steps, at most ``cap``, covered less than 0.7 of the angle.
        step: eps while these were kept.
        gradients: How many the node took, burn-in included.
        before: V after each trajectory of the burn-in.
        end: The last xi, if the plan says so.
    """

    beta: float
    values: tuple[float, ...] = ()
    pull: tuple[float, ...] = ()
    virial: tuple[float, ...] = ()
    accept: tuple[float, ...] = ()
    error: tuple[float, ...] = ()
    short: tuple[bool, ...] = ()
    step: float = math.nan
    gradients: int = 0
    before: tuple[float, ...] = ()
    end: Tensor | None = field(default=None, compare=False)

    def saved(self) -> dict[str, Any]:
        """The trace as plain values; ``Trace(**saved)`` is the trace again."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def extended(self, other: Trace) -> Trace:
        """This trace followed by another of the same node."""
        names = ("values", "pull", "virial", "accept", "error", "short")
        joined: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(other, gradients=self.gradients + other.gradients, before=self.before, **joined)


@dataclass(frozen=True)
class Chain:
    """The state of a chain between two trajectories.

    Attributes:
        plan: What it is to do.
        xi: Where it is.
        value: V there.
        gradient: Of V there.
        products: xi . grad V and |xi|^2 there; None where they have not been needed yet.
        step: eps now.
        node: Number of the node it is at.
        trajectory: Number of the next trajectory there.
        stiffness: kappa of the last node; None before the first has ended.
        tried: log eps after each trajectory of the burn-in.
        current: What it has seen at this node.
        finished: What it has seen at those before.
    """

    plan: Plan
    xi: Tensor
    value: float
    gradient: Tensor
    step: float
    node: int = 0
    trajectory: int = 0
    stiffness: float | None = None
    tried: tuple[float, ...] = ()
    current: Trace = field(default_factory=lambda: Trace(math.nan))
    finished: tuple[Trace, ...] = ()
    products: tuple[float, ...] | None = None

    @property
    def done(self) -> bool:
        """Whether all nodes are walked."""
        return self.node == len(self.plan.betas)

    def saved(self) -> dict[str, Any]:
        """The state as tensors and plain values. V and its gradient are not among them: they follow from xi."""
        names = ("xi", "step", "node", "trajectory", "stiffness", "tried")
        record: dict[str, Any] = {name: getattr(self, name) for name in names}
        return {**record, "traces": [trace.saved() for trace in (*self.finished, self.current)]}

    @classmethod
    def restored(cls, record: dict[str, Any], plan: Plan, energy: Energy) -> Chain:
        """The state that ``saved`` describes."""
        *finished, current = (Trace(**trace) for trace in record["traces"])
        rest = {name: record[name] for name in ("step", "node", "trajectory", "stiffness", "tried")}
        xi = record["xi"].to(energy.device)
        value, gradient = energy.gradient(xi)
        return cls(plan, xi, value, gradient, current=current, finished=tuple(finished), **rest)


def normal(energy: Energy, generator: torch.Generator) -> Tensor:
    """A draw of N(0, 1) of the size of the energy's argument."""
    return fill_normal(torch.empty(energy.size, dtype=energy.dtype, device=energy.device), generator)


def start(plan: Plan, energy: Energy, xi: Tensor | None, step: float, stiffness: float | None = None) -> Chain:
    """A chain before its first trajectory.

    Args:
        plan: What it is to do.
        energy: What it is to sample.
        xi: Where it begins; None for a draw of N(0, 1).
        step: eps to begin with.
        stiffness: kappa to begin with, from which the step at the first node follows; None to take ``step``.
    """
    if xi is None:
        xi = normal(energy, torch.Generator().manual_seed(derive_seed(plan.seed, "start")))
    value, gradient = energy.gradient(xi)
    return _enter(Chain(plan, xi, value, gradient, step, stiffness=stiffness))


def advance(chain: Chain, energy: Energy) -> Chain:
    """The chain after one more trajectory."""
    plan, node, t = chain.plan, chain.node, chain.trajectory
    beta, burn = plan.betas[node], plan.burn[node]
    generator = torch.Generator().manual_seed(derive_seed(plan.seed, node, t))
    angle = math.pi / 8 * (1 + 3 * torch.rand((), generator=generator).item())
    # the last quarter of a step is not worth another gradient
    steps = min(plan.cap, max(1, math.ceil(angle / chain.step - 0.25)))
    p = normal(energy, generator)
    end, error, used = trajectory(energy, chain, p, beta, min(chain.step, angle / steps), steps, seen=t >= burn)
    accept = math.exp(-max(error, 0.0))
    if torch.rand((), generator=generator).item() < accept:
        chain = end
    current = replace(chain.current, gradients=chain.current.gradients + used)
    if t < burn:
        step = min(LONGEST_STEP, chain.step * math.exp((math.exp(-abs(error)) - TARGET) / (1 + 0.15 * t)))
        tried = (*chain.tried, math.log(step))
        if t == burn - 1:
            step = math.exp(float(np.mean(tried[len(tried) // 2 :])))
        current = replace(current, before=(*current.before, chain.value))
        chain = replace(chain, step=step, tried=tried, current=current, trajectory=t + 1)
    else:
        if chain.products is None:
            chain = replace(chain, products=_numbers(_products(chain.xi, chain.gradient)))
        short = steps * chain.step < 0.7 * angle
        chain = replace(chain, current=_seen(current, chain, beta, accept, error, short), trajectory=t + 1)
    return chain if t + 1 < burn + plan.keep[node] else _leave(chain)


def trajectory(
    energy: Energy, chain: Chain, p: Tensor, beta: float, step: float, steps: int, seen: bool = False
) -> tuple[Chain, float, int]:
    """Leapfrog from the chain's place with momentum p: the chain at the end, dH, gradients used.

    Where V is not finite dH is infinite, so that the trajectory is refused. (So it would be on the way back: the chain
    stays reversible.) It also ends there where the host sees V without waiting for it.

    Args:
        energy: What is sampled.
        chain: Where it begins.
        p: The momentum.
        beta: The node.
        step: eps.
        steps: How many.
        seen: Whether the products at the end are wanted, too.
    """
    xi, gradient = chain.xi, chain.gradient
    cos, sin, half = math.cos(step), math.sin(step), -0.5 * step * beta
    kick, errors, values = half * gradient, [], []
    for _ in range(steps):
        errors.append(_dot(kick, p + 0.5 * kick))
        p = p + kick
        xi, p = torch.add(cos * xi, p, alpha=sin), torch.sub(cos * p, xi, alpha=sin)
        value, gradient = launched(energy, xi)
        values.append(value)
        if value.device.type == "cpu" and not math.isfinite(value):
            return replace(chain, xi=xi, value=float(value), gradient=gradient, products=None), math.inf, len(values)
        kick = half * gradient  # of the end of this step, and of the beginning of the next
        errors.append(_dot(kick, p + 0.5 * kick))
        p = p + kick
    products = _products(xi, gradient) if seen else []
    numbers = _numbers([*errors, *values, *products])
    error = functools.reduce(operator.add, numbers[: 2 * steps], 0.0)  # sum() rounds otherwise from Python 3.12 on
    error += beta * (numbers[3 * steps - 1] - chain.value)
    if not all(map(math.isfinite, (*numbers[2 * steps : 3 * steps], error))):
        error = math.inf
    found = tuple(numbers[3 * steps :]) if seen else None
    return replace(chain, xi=xi, value=numbers[3 * steps - 1], gradient=gradient, products=found), error, steps


def _enter(chain: Chain) -> Chain:
    """The chain at the door of its next node."""
    if chain.done:
        return chain
    beta, step = chain.plan.betas[chain.node], chain.step
    if chain.stiffness is not None:
        step = (LONGEST_STEP**-2 + beta * chain.stiffness) ** -0.5
    return replace(chain, step=step, trajectory=0, tried=(), current=Trace(beta))


def _leave(chain: Chain) -> Chain:
    """The chain when a node is finished."""
    trace = replace(chain.current, step=chain.step, end=chain.xi.cpu() if chain.plan.ends else None)
    stiffness = max(0.0, chain.step**-2 - LONGEST_STEP**-2) / chain.current.beta
    return _enter(replace(chain, node=chain.node + 1, stiffness=stiffness, finished=(*chain.finished, trace)))


def _seen(trace: Trace, chain: Chain, beta: float, accept: float, error: float, short: bool) -> Trace:
    """The trace with one more sample, that at which the chain is."""
    assert chain.products is not None
    pull, square = chain.products
    virial = square - len(chain.xi) + beta * pull
    return replace(
        trace,
        values=(*trace.values, chain.value),
        pull=(*trace.pull, pull),
        virial=(*trace.virial, virial),
        accept=(*trace.accept, accept),
        error=(*trace.error, error),
        short=(*trace.short, short),
    )


def launched(energy: Energy, xi: Tensor) -> tuple[Tensor, Tensor]:
    """V as a tensor of no axis (two parts without float64), where nobody has to wait for it, and its gradient."""
    value, gradient = getattr(energy, "launched", energy.gradient)(xi)
    return in_float64(value), gradient


def in_float64(value: float | Tensor) -> Tensor:
    """A value as a tensor of float64; as it is where that cannot be."""
    if isinstance(value, Tensor) and not has_float64(value.device):
        return value
    return torch.as_tensor(value, dtype=torch.float64)


def _products(xi: Tensor, gradient: Tensor) -> list[Tensor]:
    """The products that are kept: xi . grad V and |xi|^2."""
    return [_dot(xi, gradient), _dot(xi, xi)]


def _numbers(tensors: Sequence[Tensor]) -> tuple[float, ...]:
    """Sums, in one part or two, as numbers; the host waits once."""
    return tuple(map(number, fetched(tensors)))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The product of two vectors, summed in float64 (in two parts where the device knows no float64)."""
    return summed(a * b)
