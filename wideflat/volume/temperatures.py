r"""The inverse temperatures of a thermodynamic integration: what independent points give, and the nodes beyond.

.. code-block:: text

    log Z(beta)   = log E exp(-beta V(xi)),   xi ~ N(0, 1)
    d log Z/dbeta = -<V>_beta
    log Z(beta)   = log Z(beta_low) - integral of lambda d log beta from beta_low to beta,     lambda = beta <V>_beta

Up to beta_low, the largest beta at which two thirds of the independent points still count, they give log Z by
themselves. (Half of 64 points were not enough: their weights miss what lies in the tail of low V, and log Z came out
too low by more than three stated errors in 2 % of cases for a Gaussian V, in 9 % for one skewed to low values.)
From there the integral over log beta is taken by the rule of Clenshaw and Curtis with 4, 6 or 8 intervals. Four over
three powers of e are right within 0.06 nats, but state up to 1: their third coefficient, which adds nothing to the
integral and does not fall with more chains. Six over five powers of e are right within 0.02, and state 0.02.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["FORMER_ORDERS", "ORDERS", "Grid", "Orders", "Prior", "clenshaw_curtis", "effective"]

#: The share of the points that must count.
COUNTING = 2 / 3
Orders = tuple[tuple[float, int], ...]
#: Over how many powers of e at most how many intervals do.
ORDERS: Orders = ((2.0, 4), (5.0, 6), (math.inf, 8))
#: What they were for checkpoints that do not say it; such a measurement goes on as it began.
FORMER_ORDERS: Orders = ((3.0, 4), (math.inf, 8))


def effective(values: np.ndarray, beta: float) -> float:
    """How many of the points count at beta: (sum w)^2 / sum w^2 with w = exp(-beta V). It falls as beta grows."""
    w = np.exp(-beta * (values - values.min()))
    return float(w.sum() ** 2 / (w**2).sum())


@dataclass(frozen=True)
class Prior:
    r"""V at independent points, and what follows from it.

    Attributes:
        values: V at each point; infinite where the network has none.
        low: beta_low.

    Example:
        V the same everywhere: every point counts at every beta, and log Z = -beta V.

        >>> prior = Prior.of(np.full(64, 2.0), beta=1.5)
        >>> prior.low, prior.log_z
        (1.5, -3.0)
    """

    values: np.ndarray
    low: float

    @classmethod
    def of(cls, values: np.ndarray, beta: float) -> Prior:
        """The points with beta_low, the largest beta at which enough of them count, found by bisection."""
        finite = int(np.isfinite(values).sum())
        if finite < 0.55 * len(values):
            raise ValueError(
                f"the energy is finite at {finite} of {len(values)} random points only: sigma is too large for this "
                "network (or its weights are not finite); take a smaller one"
            )
        enough = COUNTING * finite
        if effective(values, beta) >= enough:
            return cls(values, beta)
        high, low = beta, beta
        while effective(values, low) < enough:
            high, low = low, low / 2
        for _ in range(40):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if effective(values, middle) >= enough else (low, middle)
        return cls(values, low)

    @cached_property
    def weights(self) -> np.ndarray:
        """exp(-beta_low V), divided by its mean."""
        w = np.exp(-self.low * (self.values - self.values.min()))
        return w / w.mean()

    @property
    def log_z(self) -> float:
        """Log Z(beta_low) = log of the mean of exp(-beta_low V)."""
        least = float(self.values.min())
        return math.log(np.exp(-self.low * (self.values - least)).mean()) - self.low * least

    @property
    def mean(self) -> float:
        """<V> at beta_low."""
        return float((self.weights * self._finite).mean())

    @property
    def _finite(self) -> np.ndarray:
        """V, with what is infinite, and of weight 0, put to 0."""
        return np.where(np.isfinite(self.values), self.values, 0.0)

    def stderr(self, weight: float = 0.0) -> float:
        """Error of log Z(beta_low) - weight <V>_beta_low: the same points give both terms, which have one influence."""
        influence = self.weights - weight * self.weights * (self._finite - self.mean)
        return math.sqrt(influence.var(ddof=1) / len(influence))

    @property
    def mean_stderr(self) -> float:
        """Error of ``mean``."""
        return math.sqrt((self.weights * (self._finite - self.mean)).var(ddof=1) / len(self.values))

    def curve(self, count: int = 16) -> tuple[np.ndarray, np.ndarray]:
        """Two decades of beta up to beta_low, and lambda there as the points have it."""
        betas = self.low * np.logspace(-2, 0, count)
        w = np.exp(-betas[:, None] * (self.values - self.values.min()))
        return betas, betas * (w * self._finite).sum(1) / w.sum(1)

    @property
    def free(self) -> tuple[float, float]:
        """<V> at beta = 0 with its error: n times the local energy of the loss."""
        if not np.isfinite(self.values).all():
            return math.inf, math.inf
        return float(self.values.mean()), float(self.values.std(ddof=1) / math.sqrt(len(self.values)))


def clenshaw_curtis(order: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes u_k = (1 - cos(pi k/K))/2 on [0, 1], their weights, and the matrix from f(u_k) to Chebyshev coefficients.

    Example:
        >>> nodes, weights, chebyshev = clenshaw_curtis(4)
        >>> float(np.round(weights @ nodes**3, 12)), (chebyshev @ (1 - 2 * nodes)).round(12).tolist()
        (0.25, [0.0, 1.0, 0.0, 0.0, 0.0])
    """
    k = np.arange(order + 1)
    ends = np.where((k == 0) | (k == order), 0.5, 1.0)
    chebyshev = 2 / order * ends[:, None] * np.cos(np.pi * np.outer(k, k) / order) * ends
    # the integral of T_k over [-1, 1], halved: 1/(1 - k^2) for even k, else 0
    integrals = np.where(k % 2 == 0, 1 / (1 - (k - k % 2) ** 2.0), 0.0)
    return (1 - np.cos(np.pi * k / order)) / 2, integrals @ chebyshev, chebyshev


@dataclass(frozen=True)
class Grid:
    r"""The nodes beta_0 = beta_low to beta_K = beta of the integral over log beta.

    .. code-block:: text

        log Z(beta) = log Z(beta_low) - sum_k omega_k <V>_k,      omega_k = log(beta/beta_low) c_k beta_k

    Attributes:
        low: beta_low.
        high: beta.
        order: K.
    """

    low: float
    high: float
    order: int

    @classmethod
    def of(cls, low: float, high: float, orders: Orders = ORDERS) -> Grid:
        """Four, six or eight intervals, by how many powers of e lie between.

        Example:
            >>> [Grid.of(math.exp(-length), 1.0).order for length in (1.9, 2.1, 4.9, 5.1)]
            [4, 6, 6, 8]
        """
        length = math.log(high / low)
        return cls(low, high, next(order for most, order in orders if length <= most))

    @property
    def finer(self) -> Grid:
        """Twice as many intervals; every node of this grid is one of that."""
        return Grid(self.low, self.high, 2 * self.order)

    @property
    def length(self) -> float:
        """log(beta/beta_low)."""
        return math.log(self.high / self.low)

    @cached_property
    def betas(self) -> np.ndarray:
        """The K + 1 nodes."""
        betas = self.low * np.exp(self.length * clenshaw_curtis(self.order)[0])
        betas[-1] = self.high
        return betas

    @cached_property
    def weights(self) -> np.ndarray:
        """omega_k."""
        return self.length * clenshaw_curtis(self.order)[1] * self.betas

    def error(self, means: np.ndarray) -> float:
        """How far the rule may be off, from the last coefficients of lambda: two of 5, three of 9, five of 17."""
        last = np.abs(clenshaw_curtis(self.order)[2] @ (self.betas * means))[-(self.order // 4 + 1) :]
        return float(self.length * last.sum() / (self.order**2 - 1))
