r"""When a measurement that was given a target for its error bar may end, and what bar it may state then.

Looking again and again and stopping when the bar is small enough stops when the bar *happens* to be small: what is then
stated is too short (by 2 to 12 %, so that two bars cover the truth in 0.92 to 0.945 of cases and not in 0.95). So it is
a pilot that decides how long a measurement is, as in Stein's two-stage procedure (1945): enough evaluations to know the
variance V0 of their mean with nu degrees of freedom. From then on the *number* of evaluations is looked at. With a_j
the share of block j and c_j how often it was evaluated,

.. code-block:: text

    V(c) = V0 spread(c) / spread(c0),    spread(c) = sum_j a_j^2 / c_j        stop when (1 + delta) sqrt(V(c)) <= target

The mean of Gaussian evaluations does not depend on their variances, given c, and sqrt(V(c)) is a multiple of its true
deviation that depends on V0 alone: so (mean - truth) / sqrt(V(c)) is Student's t with nu degrees of freedom, whatever c
a rule chooses that looks at variances. That allows one thing more: to go on until the bar from all evaluations reaches
the target too. The wider of the two is stated, and is right also where the pilot was lucky (nothing went wrong in it,
or a block that matters was quiet).

**Skewed and heavy-tailed noise.** Then a variance is known worse than its degrees of freedom say, and it is small when
the mean is. With gamma and kappa the skewness and excess kurtosis of one evaluation, m evaluations behind the variance
and N behind the mean, z = 1.96, and v the variance of V0 over its expectation,

.. code-block:: text

    W = (mean - truth) / sqrt(V):  k1 = -gamma / (2 sqrt(N)),                   k2 = 1 + v - kappa / N + 7 gamma^2 / 4N,
                                   k3 = -2 gamma / sqrt(N),                     k4 = 3 v - 5 kappa / N + 12 gamma^2 / N,
    v = 2 / nu + kappa / m

are its cumulants to the order 1/N, and Edgeworth's expansion of P(|W| <= z) says by how much a bar must be longer for
1.96 of it to be an interval of 0.95:

.. code-block:: text

    delta = (v - kappa / N + 2 gamma^2 / N) / 2 + (3 v - 5 kappa / N + 16 gamma^2 / N) (z^2 - 3) / 24
            + (gamma^2 / 18 N) (z^4 - 10 z^2 + 15)

For Gaussian noise that is the beginning of Student's t (which is taken in its place), and for m = N what Hall (1987)
found for Student's statistic. gamma and kappa are those of :mod:`wideflat.energy.shape`. A bar that ended a measurement
has all this in it: its degrees of freedom count as infinite.

Over 16 drawn cases of 1,000 measurements each (skewness up to 2.3, blocks of different noise, 8 to 457 of them) two
bars covered the truth in 0.940 to 0.981, 0.958 in the mean; ``tests/energy/test_stopping.py`` has 16 others.

Before every block was evaluated, variances are those between blocks, and after it those within blocks
(:mod:`wideflat.energy.stratified`): another pilot, since it is another variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wideflat.energy.shape import shape_of
from wideflat.energy.stratified import Estimate, student_quantile

__all__ = ["StoppingRule", "lengthening"]

#: Evaluations of a pilot beyond the first (between blocks) or beyond the first of each block (within them): with fewer
#: the skewness of noise is not seen well enough to be corrected for.
PILOT_FREEDOM = 48
#: Fewest effective degrees of freedom of a pilot, since a few blocks may carry most of the variance.
LEAST_FREEDOM = 24
#: Two-sided 95 % of the normal distribution.
NORMAL = 1.96


@dataclass(frozen=True)
class _Known:
    """What evaluations say of the variance of their mean.

    Attributes:
        variance: Of the mean.
        freedom: Degrees of freedom of it, were the noise Gaussian.
        count: Evaluations.
        spread: sum_j a_j^2 / c_j.
        within: Whether it is the noise within blocks, or that between them.
        skewness: Of one evaluation.
        kurtosis: Beyond that of a Gaussian, of one evaluation.
    """

    variance: float
    freedom: float
    count: int
    spread: float
    within: bool
    skewness: float
    kurtosis: float

    def bar(self, count: int, spread: float, extra: float = 0.0) -> float:
        """The bar of the mean of ``count`` evaluations, as long as it must be for 1.96 of it to be 95 %."""
        longer = lengthening(self.freedom, self.count, count, self.skewness, self.kurtosis)
        return longer * math.sqrt(self.variance * spread / self.spread + extra)


def lengthening(freedom: float, known: int, count: int, skewness: float, kurtosis: float) -> float:
    """By what a standard error must be multiplied for 1.96 of it to be an interval of 95 %: t_nu / 1.96 (1 + delta).

    Args:
        freedom: Degrees of freedom of the variance.
        known: Evaluations that it was found from.
        count: Evaluations that the mean is taken over.
        skewness: Of one evaluation.
        kurtosis: Excess kurtosis of one evaluation.

    Example:
        >>> round(lengthening(30, 31, 100, 0.0, 0.0), 4)  # Student's t
        1.042
        >>> round(lengthening(1e9, 200, 200, 2.0, 6.0) - 1, 4)  # 200 exponential numbers
        0.0195
    """
    z2 = NORMAL**2
    of_v, of_kurtosis = 0.5 + (z2 - 3) / 8, -0.5 - 5 * (z2 - 3) / 24
    of_skewness = 1 + 2 * (z2 - 3) / 3 + (z2**2 - 10 * z2 + 15) / 18
    delta = of_v * kurtosis / known + of_kurtosis * kurtosis / count + of_skewness * skewness**2 / count
    return student_quantile(0.95, freedom) / NORMAL * (1 + max(delta, 0.0))


class StoppingRule:
    """Decides for every column of a table of evaluations when its error bar is as small as the target.

    Args:
        target: The standard error that is wanted.
        columns: Number of columns.

    Example:
        One block whose values are -1 and +1 in turn. The pilot ends after 49 of them, with the variance 1.0204 of one
        value and t_48 = 2.011; for a bar of 0.1 it asks for (2.011 / 1.96)^2 1.0204 / 0.1^2 = 108.

        >>> from wideflat.energy.stratified import stratified
        >>> rule, sizes = StoppingRule(0.1, 1), np.ones(1)
        >>> table = np.tile([-1.0, 1.0], 100).reshape(200, 1, 1)
        >>> next(n for n in range(2, 201) if rule.reached(table[:n], sizes, stratified(table[:n], sizes))[0])
        108
    """

    def __init__(self, target: float, columns: int) -> None:
        self.target = target
        self._pilots: list[_Known | None] = [None] * columns
        self._reached = np.zeros(columns, dtype=bool)

    def reached(
        self, table: np.ndarray, sizes: np.ndarray, estimate: Estimate, extra: np.ndarray | None = None
    ) -> np.ndarray:
        """Which columns may end, shape (S,); what was reached stays so.

        Args:
            table: Shape (passes, blocks, S), as :func:`~wideflat.energy.stratified.stratified` takes it.
            sizes: Examples of each block, shape (blocks,).
            estimate: What ``stratified`` made of them.
            extra: Added to the variance of each column.
        """
        extra = np.zeros(len(self._reached)) if extra is None else extra
        freedom = _freedom(table)
        for s, known in zip(*self._known(table, sizes, estimate, ~self._reached), strict=True):
            pilot = self._pilots[s]
            if pilot is None or pilot.within != known.within:
                enough = freedom[s] >= PILOT_FREEDOM and known.freedom >= LEAST_FREEDOM
                self._pilots[s] = pilot = known if enough else None
            if pilot is not None:
                bars = (basis.bar(known.count, known.spread, extra[s]) for basis in (pilot, known))
                self._reached[s] = all(bar <= self.target for bar in bars)
        return self._reached.copy()

    def widened(self, table: np.ndarray, sizes: np.ndarray, estimate: Estimate) -> Estimate:
        """The estimate with the bars that may be stated where a column was ended: the wider of two, made longer."""
        factor, freedom = np.ones(len(self._reached)), estimate.degrees_of_freedom.copy()
        for s, known in zip(*self._known(table, sizes, estimate, self._reached), strict=True):
            pilot = self._pilots[s]
            assert pilot is not None
            freedom[s] = np.inf
            if known.variance > 0:
                bar = max(basis.bar(known.count, known.spread) for basis in (pilot, known))
                factor[s] = bar / math.sqrt(known.variance)
        return Estimate(estimate.mean, estimate.covariance * np.outer(factor, factor), freedom)

    def _known(
        self, table: np.ndarray, sizes: np.ndarray, estimate: Estimate, wanted: np.ndarray
    ) -> tuple[list[int], list[_Known]]:
        """What all evaluations so far say, for the wanted columns."""
        columns = np.flatnonzero(wanted)
        table = table[:, :, columns]
        c = (~np.isnan(table)).sum(0)  # (blocks, S)
        a = np.where(c > 0, sizes[:, None], 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            spreads = np.where(c > 0, (a / a.sum(0)) ** 2 / np.maximum(c, 1), 0.0).sum(0)
        within = _within(c)
        shapes = zip(*shape_of(table, sizes, within), strict=True)
        variances, freedom = np.diag(estimate.covariance)[columns], estimate.degrees_of_freedom[columns]
        counts = c.sum(0)
        known = [
            _Known(variances[i], freedom[i], int(counts[i]), spreads[i], bool(within[i]), *map(float, shape))
            for i, shape in enumerate(shapes)
        ]
        return columns.tolist(), known


def _within(c: np.ndarray) -> np.ndarray:
    """Whether evaluations c (blocks, S) show the noise within blocks."""
    return np.asarray((c >= 1).all(0) & (c >= 2).any(0))


def _freedom(table: np.ndarray) -> np.ndarray:
    """Evaluations to spare of each column: beyond the first of each block, or beyond the first at all."""
    c = (~np.isnan(table)).sum(0)
    return np.where(_within(c), np.maximum(c - 1, 0).sum(0), (c > 0).sum(0) - 1)
