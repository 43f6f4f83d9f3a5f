"""The points and the chains of one sigma: what is walked in which order, how it is extended, saved and gone on with.

.. code-block:: text

    128 independent points                               V alone, no gradient
    R chains down from beta, started at the weights      12 + 18 trajectories a node, three times the burn-in at first
    R chains up from beta_low, started from N(0, 1)      12 + 18 trajectories a node
    up to 1,024 points where a few of 128 count at beta  a second opinion (:mod:`wideflat.volume.second_opinion`)
    up to 64 descents from random points                 wells that no chain has met (:mod:`wideflat.volume.descents`)

Where the error of the rule makes the value useless there are twice as many nodes. With ``target_stderr`` it goes on in
rounds. A round does what lowers the error most: more points, twice as many nodes where the error of the rule dominates,
else longer chains at the nodes, in proportion to sqrt(variance/price) of each.

Everything that was seen is kept by its name, and what a round does follows from what was seen before it. So a
measurement that was interrupted walks the same way again without walking it, up to where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wideflat.checks import flag, number, whole
from wideflat.kernels.float64 import fetched
from wideflat.kernels.float64 import number as number_of
from wideflat.seeds import derive_seed
from wideflat.volume.descents import DEEPER, Descent, descend, most_gradients
from wideflat.volume.descents import MOST as MOST_DESCENTS
from wideflat.volume.gaussian_hmc import Chain, Energy, Plan, Trace, advance, in_float64, normal, start
from wideflat.volume.integration import bracket, integrate
from wideflat.volume.second_opinion import MOST_ASKED, Opinion, more_points, outlying, worth_asking
from wideflat.volume.temperatures import FORMER_ORDERS, ORDERS, Grid, Orders, Prior
from wideflat.volume.volume import Integration

__all__ = ["Effort", "Walk", "cheapest_lengths", "first_trajectories"]

#: More chains, samples or points are never meant.
MOST = 10**6

#: Rounds after which a target is given up.
MOST_ROUNDS = 16
#: Bytes that the last places of all chains may take, to go on from where more nodes are needed.
ENDS_BYTES = 2**28
#: Points for which the host waits at once.
POINTS_AT_ONCE = 16
#: Points after which more are not drawn.
MOST_POINTS = 2**16

#: Trajectories after which a chain from the weights counts where points alone give the value.
LOOK_AFTER = 4

_Traces = dict[Fraction, Trace]  # of one chain, by the place of the node in the grid: 0 is beta_low, 1 is beta


@dataclass(frozen=True)
class Effort:
    """How much is walked.

    Attributes:
        chains: In each direction.
        samples: Trajectories kept at a node.
        burn: Trajectories before these; three times as many where chains start from the weights.
        points: Independent points.
        seed: Of everything random.
        cap: Most leapfrog steps of a trajectory.
        target_stderr: Go on until the error is below this.
        quick: The bracket alone.
    """

    chains: int = 2
    samples: int = 18
    burn: int = 12
    points: int = 128
    seed: int = 0
    cap: int = 100
    target_stderr: float | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        for name, least in (("chains", 1), ("samples", 4), ("burn", 2), ("points", 8), ("cap", 1)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least, MOST))
        object.__setattr__(self, "quick", flag("quick", self.quick))
        if self.target_stderr is not None:
            number("target_stderr", self.target_stderr, above=0)

    def trajectories(self, nodes: int) -> int:
        """Of all chains, before any extension, at so many walked nodes."""
        return self.chains * 2 * (nodes * (self.burn + self.samples) + self.burn)


class Walk:
    """The measurement at one sigma, for any energy.

    Args:
        energy: V, a fixed function of xi.
        sigma: Strength of the noise; V is already that at this sigma.
        beta: Inverse temperature.
        effort: How much is walked.
        solutions: Whether log P(V = 0) is wanted in place of log Z(beta).
        tick: Called after every point and trajectory with what was done; may raise to stop.
    """

    def __init__(
        self,
        energy: Energy,
        sigma: float = 1.0,
        beta: float = 1.0,
        effort: Effort | None = None,
        solutions: bool = False,
        tick: Callable[[str], None] | None = None,
    ) -> None:
        self.energy, self.sigma, self.beta, self.solutions = energy, float(sigma), float(beta), solutions
        self.effort = effort or Effort()
        self.tick = tick or (lambda what: None)
        self.values: list[float] = []
        self.finished: dict[str, tuple[Trace, ...]] = {}
        self.descents: dict[str, tuple[float, int]] = {}  # U at the end of each, and its gradients
        self.orders: Orders = ORDERS
        self.running: tuple[str, Chain] | None = None
        self._pending: tuple[str, dict[str, Any]] | None = None
        self.forecast: Callable[[Grid | None], None] = lambda grid: None

    # ---- on disk

    def saved(self) -> dict[str, Any]:
        """What was seen so far, as tensors and plain values."""
        running = self._pending if self.running is None else (self.running[0], self.running[1].saved())
        return {
            "values": list(self.values),
            "finished": {name: [trace.saved() for trace in traces] for name, traces in self.finished.items()},
            "descents": dict(self.descents),
            "orders": [list(pair) for pair in self.orders],
            "running": None if running is None else list(running),
        }

    def restore(self, record: dict[str, Any]) -> None:
        """Go on from what ``saved`` described."""
        self.values = [float(value) for value in record["values"]]
        self.finished = {name: tuple(Trace(**trace) for trace in traces) for name, traces in record["finished"].items()}
        self.descents = {name: (float(u), int(used)) for name, (u, used) in record.get("descents", {}).items()}
        self.orders = tuple((float(most), int(order)) for most, order in record.get("orders", FORMER_ORDERS))
        self._pending = None if record["running"] is None else tuple(record["running"])

    # ---- the way

    def run(self) -> Integration:
        """Walk, and say what was found."""
        self._points(self.effort.points)
        prior = Prior.of(np.array(self.values[: self.effort.points]), self.beta)
        if self.effort.quick:
            self.forecast(None)
            trace = self._chain("down 0", (self.beta,), (3 * self.effort.burn,), self._at_weights)
            return bracket(prior, trace, **self._about())
        if prior.low == self.beta and outlying(prior.values, self.beta):
            self._points(MOST_ASKED)
            prior = Prior.of(np.array(self.values[: max(MOST_ASKED, self.effort.points)]), self.beta)
        if prior.low == self.beta:
            return self._points_alone(prior)
        grid = Grid.of(prior.low, self.beta, self.orders)
        self.forecast(grid)
        sides = self._both_sides(grid)
        found = self._integrate(prior, grid, sides)
        for round_ in range(MOST_ROUNDS):
            if self._too_coarse(grid, found):
                grid = grid.finer
                self._add_nodes(round_, grid, sides)
            elif found.stderr > (self.effort.target_stderr or math.inf):
                prior = self._more(round_, prior, grid, sides, found)
            else:
                break
            found = self._integrate(prior, grid, sides)
        if self._ends:
            self._look_for_wells(found, sides)
        return found

    def _both_sides(self, grid: Grid) -> dict[str, list[_Traces]]:
        """All chains of the first round."""
        return {side: [self._first(side, r, grid) for r in range(self.effort.chains)] for side in ("down", "up")}

    @property
    def _ends(self) -> bool:
        """Whether chains can be gone on with: with a target, or where that takes little memory."""
        needed = 2 * self.effort.chains * 8 * self.energy.size * torch.finfo(self.energy.dtype).bits // 8
        return self.effort.target_stderr is not None or needed <= ENDS_BYTES

    def _too_coarse(self, grid: Grid, found: Integration) -> bool:
        """Whether there should be more nodes: the rule makes the value useless, or is what misses the target."""
        target = self.effort.target_stderr or math.inf
        dominant = found.stderr > target and found.quadrature > 0.5 * target
        return self._ends and grid.order < 32 and ("quadrature" in found.flags or dominant)

    def share_at(self, beta: float) -> float:
        """The share of solutions that a chain from the weights meets at beta."""
        (trace,) = self._chain(f"probe {beta:g}", (beta,), (3 * self.effort.burn,), self._at_weights)
        return float(np.mean(np.array(trace.values) == 0))

    def _points_alone(self, prior: Prior) -> Integration:
        """No integral is needed: points, and chains from the weights that look for what they may have missed.

        All but their first few trajectories are kept: a well at the weights shows as long as they have not left it.
        """
        self.forecast(None)
        burn = min(LOOK_AFTER, self.effort.burn)
        keep = (self.effort.burn - burn + self.effort.samples,)
        checks = [
            self._chain(f"down {r}", (self.beta,), (burn,), self._at_weights, keep) for r in range(self.effort.chains)
        ]
        while True:
            found = integrate(prior, None, [], checks, **self._about())
            target = self.effort.target_stderr
            if target is None or found.stderr <= target or len(prior.values) >= MOST_POINTS:
                return found
            more = math.ceil(len(prior.values) * min(4.0, max(1.1, (found.stderr / target) ** 2)))
            prior = self._more_points(prior, more)

    # ---- wells that no chain has met

    def _look_for_wells(self, found: Integration, sides: dict[str, list[_Traces]]) -> None:
        """Descents from random points against those from the chains; a deeper well that lasts is refused."""
        tops = [traces[Fraction(1)] for chains in sides.values() for traces in chains]
        step = min(trace.step for trace in tops) ** 2
        low, used, most = (math.inf, 0), 0, most_gradients(found.gradients, self.energy.size)
        for k in range(MOST_DESCENTS):
            low = min(low, (self._descent(f"random {k}", k, step), k))
            used += self.descents[f"random {k}"][1]
            if used >= most:
                break
        places = [*(trace.end for trace in tops), torch.zeros(self.energy.size, dtype=self.energy.dtype)]
        met = math.inf
        for k, place in enumerate(places):
            met = min(met, self._descent(f"met {k}", place, step))
            if met <= low[0] + DEEPER:
                break
        else:
            self._stay(found, low[1], step, met, float(np.mean([trace.values for trace in tops])))
        found.gradients += sum(count for _, count in self.descents.values())

    def _stay(self, found: Integration, best: int, step: float, met: float, mean: float) -> None:
        """Whether a chain from that descent stays below what the others have met."""
        begin = lambda plan: start(plan, self.energy, self._descended(best, step).xi, math.sqrt(step))  # noqa: E731
        burn, keep = (2 * self.effort.burn, 0, 0, 0), (max(4, self.effort.samples // 3),) * 4
        traces = self._chain("lowest", (self.beta,) * 4, burn, begin, keep)
        found.gradients += sum(trace.gradients for trace in traces)
        deeper = min(met - self._descent(f"lowest {k}", trace.end, step) for k, trace in enumerate(traces))
        below = self.beta * (mean - float(np.mean([trace.values for trace in traces])))
        if deeper > DEEPER and below > 0:
            found.flags["wells"] = f"{deeper:.3g} deeper, beta V lower by {below:.3g}"

    def _descent(self, name: str, begin: int | Tensor | None, step: float) -> float:
        """U at the end of the descent of this name: as it was seen, or walked now."""
        if name not in self.descents:
            found = self._descended(begin, step)
            self.descents[name] = found.potential, found.gradients
            self.tick("descent")
        return self.descents[name][0]

    def _descended(self, begin: int | Tensor | None, step: float) -> Descent:
        """The descent from a place, or from a random point by its number."""
        assert begin is not None
        if isinstance(begin, int):
            seed = derive_seed(self.effort.seed, "descent", repr(self.sigma), begin)
            begin = normal(self.energy, torch.Generator().manual_seed(seed))
        return descend(self.energy, self.beta, begin.to(self.energy.device), step)

    def _integrate(self, prior: Prior, grid: Grid, sides: dict[str, list[_Traces]]) -> Integration:
        up, down = ([list(traces.values()) for traces in sides[name]] for name in ("up", "down"))
        return integrate(prior, grid, up, down, opinion=self._opinion(prior), **self._about())

    def _opinion(self, prior: Prior) -> Opinion:
        """What points alone say at beta: the usual ones, and more where that is worth asking."""
        asked, count = (self.beta, self.solutions), len(prior.values)
        if worth_asking(prior.values, *asked):
            while (more := more_points(np.array(self.values[:count]), *asked)) > count:
                self._points(more)
                count = more
        return Opinion(np.array(self.values[:count]), *asked)

    def _about(self) -> dict[str, Any]:
        moving = getattr(self.energy, "moving", None)
        options = {"sigma": self.sigma, "beta": self.beta, "size": self.energy.size, "solutions": self.solutions}
        return {**options, "moving": moving}

    def _points(self, count: int) -> None:
        """V at independent points, up to so many; the host waits for some of them at once."""
        evaluate = getattr(self.energy, "launched_value", self.energy.value)
        while len(self.values) < count:
            together = min(count - len(self.values), 1 if self.energy.device.type == "cpu" else POINTS_AT_ONCE)
            launched = []
            for k in range(together):
                seed = derive_seed(self.effort.seed, "point", repr(self.sigma), len(self.values) + k)
                value = evaluate(normal(self.energy, torch.Generator().manual_seed(seed)))
                launched.append(in_float64(value))
            for value in map(number_of, fetched(launched)):
                self.values.append(value if math.isfinite(value) else math.inf)
                self.tick("point")

    def _more_points(self, prior: Prior, count: int) -> Prior:
        """The prior with so many points; beta_low stays."""
        count = min(count, MOST_POINTS)
        self._points(count)
        return Prior(np.array(self.values[:count]), prior.low)

    def _first(self, side: str, r: int, grid: Grid) -> _Traces:
        """A chain through all nodes of the first grid."""
        places = [Fraction(k, grid.order) for k in range(1, grid.order + 1)]
        betas, burn = grid.betas[1:].tolist(), [self.effort.burn] * grid.order
        if side == "down":
            places, betas, burn[0] = places[::-1], betas[::-1], 3 * self.effort.burn
        begin = self._at_weights if side == "down" else self._at_random
        keep = [self.effort.samples] * grid.order
        if self.solutions:  # the share of solutions is counted at the top: twice as many there
            keep[0 if side == "down" else -1] *= 2
        traces = self._chain(f"{side} {r}", tuple(betas), tuple(burn), begin, tuple(keep))
        return dict(zip(places, traces, strict=True))

    def _at_weights(self, plan: Plan) -> Chain:
        zero = torch.zeros(self.energy.size, dtype=self.energy.dtype, device=self.energy.device)
        return start(plan, self.energy, zero, 0.1)

    def _at_random(self, plan: Plan) -> Chain:
        return start(plan, self.energy, None, 1.0)

    def _chain(
        self,
        name: str,
        betas: tuple[float, ...],
        burn: tuple[int, ...],
        begin: Callable[[Plan], Chain],
        keep: tuple[int, ...] | None = None,
    ) -> tuple[Trace, ...]:
        """The chain of this name: as it was seen, or walked now."""
        if name in self.finished:
            return self.finished[name]
        seed = derive_seed(self.effort.seed, "chain", repr(self.sigma), name)
        keep = keep or (self.effort.samples,) * len(betas)
        plan = Plan(betas, burn, keep, seed, self.effort.cap, self._ends)
        if self._pending is not None and self._pending[0] == name:
            chain = Chain.restored(self._pending[1], plan, self.energy)
        else:
            chain = begin(plan)
        self.running, self._pending = (name, chain), None
        while not chain.done:
            chain = advance(chain, self.energy)
            self.running = name, chain
            self.tick("trajectory")
        self.finished[name], self.running = chain.finished, None
        return chain.finished

    # ---- rounds

    def _more(
        self, number: int, prior: Prior, grid: Grid, sides: dict[str, list[_Traces]], found: Integration
    ) -> Prior:
        """More points where they miss the target, and longer chains; the sides are extended in place."""
        target, points = self.effort.target_stderr or math.inf, prior.stderr(grid.weights[0])
        if points > 0.5 * target:
            prior = self._more_points(prior, 2 * len(prior.values))
        walked = max(found.statistical**2 - points**2, 1e-12)
        others = found.stderr**2 - walked
        self._extend(number, grid, sides, found, max(0.5 * target**2, 0.9 * target**2 - others) / walked)
        return prior

    def _add_nodes(self, number: int, grid: Grid, sides: dict[str, list[_Traces]]) -> None:
        """Walk the nodes of the finer grid that are new, each from the node before it on the way of its chain."""
        for side, chains in sides.items():
            for r, traces in enumerate(chains):
                for k in range(1, grid.order, 2):
                    place = Fraction(k, grid.order)
                    before = Fraction(k + 1 if side == "down" else max(k - 1, 2), grid.order)
                    trace = self._continued(f"{side} {r} node {place} round {number}", traces[before], grid.betas[k])
                    traces[place] = trace

    def _continued(self, name: str, before: Trace, beta: float) -> Trace:
        """The trace at a new node, from the end of another."""
        assert before.end is not None
        end, stiffness = before.end, max(0.0, before.step**-2 - 1.2**-2) / before.beta
        begin = lambda plan: start(plan, self.energy, end.to(self.energy.device), before.step, stiffness)  # noqa: E731
        return self._chain(name, (float(beta),), (self.effort.burn,), begin, (len(before.values),))[0]

    def _extend(
        self, number: int, grid: Grid, sides: dict[str, list[_Traces]], found: Integration, wanted: float
    ) -> None:
        """Longer chains, so that their variance becomes ``wanted`` of what it is, between a third and 0.8 of it."""
        places = [Fraction(k, grid.order) for k in range(1, grid.order + 1)]
        every = [traces for chains in sides.values() for traces in chains]
        now = np.array([len(every[0][place].values) for place in places], dtype=float)
        price = np.array([sum(t[place].gradients / len(t[place].values) for t in every) for place in places])
        variance = np.array(found.diagnostics["contribution"]) ** 2
        goal = variance.sum() * min(0.8, max(1 / 3, wanted))
        lengths = cheapest_lengths(variance, now, price, goal)
        for place, length, before in zip(places, lengths, now, strict=True):
            more = int(length - before)
            if more < 1:
                continue
            for side, chains in sides.items():
                for r, traces in enumerate(chains):
                    name = f"{side} {r} node {place} more {number}"
                    traces[place] = self._longer(name, traces[place], more)

    def _longer(self, name: str, trace: Trace, more: int) -> Trace:
        """A trace with so many more samples."""
        assert trace.end is not None
        end, step = trace.end, trace.step
        begin = lambda plan: start(plan, self.energy, end.to(self.energy.device), step)  # noqa: E731
        return trace.extended(self._chain(name, (trace.beta,), (0,), begin, (more,))[0])


def cheapest_lengths(variance: np.ndarray, lengths: np.ndarray, price: np.ndarray, goal: float) -> np.ndarray:
    """The lengths of chains, none shorter than now, that bring the sum of variances to ``goal`` at the least price.

    With variance_k lengths_k/m_k the variance after m_k samples, m_k = max(now, mu sqrt(variance_k lengths_k/price_k)).

    Example:
        >>> cheapest_lengths(np.array([4.0, 1.0]), np.array([10.0, 10.0]), np.array([1.0, 1.0]), 3.0).tolist()
        [20.0, 10.0]
    """
    total = variance * lengths
    share = np.sqrt(total / np.maximum(price, 1e-12))
    low, high = 0.0, 1e12
    for _ in range(200):
        mu = math.sqrt(low * high) if low > 0 else high / 1e6
        enough = (total / np.maximum(lengths, mu * share)).sum() <= goal
        low, high = (low, mu) if enough else (mu, high)
        if high <= low * (1 + 1e-9):
            break
    return np.ceil(np.maximum(lengths, high * share) - 1e-6)


def first_trajectories(effort: Effort, grid: Grid | None) -> int:
    """How many trajectories there will be, before any extension."""
    if grid is not None:
        return effort.trajectories(grid.order)
    each = effort.burn + effort.samples
    return each + 2 * effort.burn if effort.quick else effort.chains * each
