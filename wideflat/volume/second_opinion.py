r"""What independent points say of log Z where a few of them still count at beta: no chain can be stuck in them.

.. code-block:: text

    log Z     = log of the mean of exp(-beta V),                    for solutions log of the share with V = 0
    stderr^2  = 1/n_eff - 1/n,   n_eff = (sum w)^2/sum w^2          n_eff = the number of solutions

With 128 points this is rough, but they are a third of the price of a gradient: where at least 4 of 128 count, more are
drawn until 64 do (1,024 at most). Chains in a few wells of few dimensions may agree by chance, all in the same well;
points visit every well that has a share worth speaking of. In many dimensions hardly ever 4 of 128 count, and there is
no second opinion.

Points that miss the low tail of V give too low a value and do not know it. So an opinion counts only if the chains at
beta are where points are too: most of their samples must not lie below the third lowest point. The other way round
there is no such condition: points that lie well below every sample of the chains, and would by themselves make up half
of Z, are in a place that the chains have not met. (Were the chains right, the mean of that share would be what they
leave out, a few per cent at most, and by Markov's inequality it is hardly ever a half.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["Opinion", "more_points", "outlying", "worth_asking"]

#: The share of the first points that must count for more to be drawn, and how many at least.
FIRST_SHARE, FIRST = 1 / 32, 4
#: How many shall count, how many points are drawn for it at most, and how many must count for an opinion.
ENOUGH, MOST_ASKED, FEWEST = 64, 1024, 16
#: Points are where the chains are if no larger share of the chains' samples is below the third lowest point.
BELOW = 0.5
#: How far below every sample of the chains, in beta V, a point is somewhere else, and the share of Z such may make up.
DEEPER, UNMET = 3.0, 0.5


@dataclass(frozen=True, eq=False)
class Opinion:
    r"""Log Z from points alone.

    Attributes:
        values: V at the points.
        beta: Inverse temperature.
        solutions: Whether log P(V = 0) is meant in place of log Z(beta).

    Example:
        >>> opinion = Opinion(np.full(64, 2.0), 1.5)
        >>> opinion.log_z, opinion.stderr, opinion.count
        (-3.0, 0.0, 64.0)
    """

    values: np.ndarray
    beta: float
    solutions: bool = False

    @cached_property
    def weights(self) -> np.ndarray:
        """exp(-beta V) up to a factor, or [V = 0]."""
        if self.solutions:
            return (self.values == 0).astype(float)
        return np.exp(-self.beta * (self.values - self.values.min()))

    @cached_property
    def count(self) -> float:
        """How many points count."""
        squares = float((self.weights**2).sum())
        return float(self.weights.sum()) ** 2 / squares if squares > 0 else 0.0

    @cached_property
    def log_z(self) -> float:
        """Log Z, or log P of all examples being right."""
        if self.count == 0:
            return -math.inf
        return math.log(self.weights.mean()) - (0.0 if self.solutions else self.beta * float(self.values.min()))

    @property
    def stderr(self) -> float:
        """Its error."""
        return math.sqrt(max(0.0, 1 / self.count - 1 / len(self.values))) if self.count else math.inf

    def against(self, log_z: float, stderr: float, samples: np.ndarray) -> tuple[float, bool]:
        """What it adds to the error of a value that was found with chains, and whether it contradicts it.

        Args:
            log_z: The value.
            stderr: Its error.
            samples: V of the chains at beta.
        """
        deep = self.beta * (float(samples.min()) - self.values) > DEEPER
        unmet = float(self.weights[deep].mean() * deep.mean()) / float(self.weights.mean()) if deep.any() else 0.0
        contradicts = unmet > 0 and math.log(unmet) + self.log_z - log_z > math.log(UNMET)
        third = np.partition(self.values, 2)[2]
        if self.count < FEWEST or float((samples < third).mean()) > BELOW:
            return 0.0, contradicts
        apart, error = abs(self.log_z - log_z), math.hypot(self.stderr, stderr)
        return max(0.0, apart - error), contradicts or apart > 3 * error


def worth_asking(values: np.ndarray, beta: float, solutions: bool = False) -> bool:
    """Whether enough of the first points count at beta."""
    return Opinion(values, beta, solutions).count >= max(FIRST, FIRST_SHARE * len(values))


def more_points(values: np.ndarray, beta: float, solutions: bool = False) -> int:
    """How many points there shall be next; as many as there are if they suffice.

    Example:
        >>> more_points(np.r_[np.zeros(16), np.full(112, 1e3)], 1.0), more_points(np.zeros(128), 1.0)
        (512, 128)
    """
    count, now = Opinion(values, beta, solutions).count, len(values)
    if count >= ENOUGH or now >= MOST_ASKED:
        return now
    return min(MOST_ASKED, math.ceil(now * min(4.0, max(1.25, ENOUGH / max(count, 1.0)))))


def outlying(values: np.ndarray, beta: float) -> bool:
    """Whether one of the points is far below the others: the brink of a well that the others have missed.

    Example:
        >>> outlying(np.r_[-0.5, np.tile([0.0, 0.01], 64)], 1.0), outlying(np.linspace(0, 1, 128), 1.0)
        (True, False)
    """
    finite = values[np.isfinite(values)]
    depth = float(finite.mean() - finite.min())
    return beta * depth > 0.1 and depth > 5 * float(finite.std())
