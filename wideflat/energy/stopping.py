r"""When a measurement that was given a target for its error bar may end, and what bar it may state then.

Looking again and again and stopping when the bar is small enough stops when the bar *happens* to be small: what is then
stated is too short (by 2 to 12 %, so that two bars cover the truth in 0.92 to 0.945 of cases and not in 0.95). So it is
a pilot that decides how long a measurement is, as in Stein's two-stage procedure (1945): enough evaluations to know the
variance V0 of their mean with nu degrees of freedom. From then on the *number* of evaluations is looked at. With a_j
the share of block j and c_j how often it was evaluated,

.. code-block:: text

    V(c) = V0 spread(c) / spread(c0),    spread(c) = sum_j a_j^2 / c_j         stop when t_nu sqrt(V(c)) <= 1.96 target

The mean of Gaussian evaluations does not depend on their variances, given c, and sqrt(V(c)) is a multiple of its true
deviation that depends on V0 alone: so (mean - truth) / sqrt(V(c)) is Student's t with nu degrees of freedom, whatever c
a rule chooses that looks at variances. That allows one thing more: to go on until the bar from all evaluations reaches
the target too. The wider of the two is stated, and is right also where the pilot was lucky (nothing went wrong in it,
or a block that matters was quiet).

Before every block was evaluated, variances are those between blocks, and after it those within blocks
(:mod:`wideflat.energy.stratified`): another pilot, since it is another variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wideflat.energy.stratified import Estimate, student_quantile

__all__ = ["StoppingRule"]

#: Evaluations of a pilot beyond the first (between blocks) or beyond the first of each block (within them).
PILOT_FREEDOM = 31
#: Fewest effective degrees of freedom of a pilot, since a few blocks may carry most of the variance: with 15 two bars
#: would be an interval of 93.6 %, with 30 of 94.5 %, and the wider of two bars does the rest.
LEAST_FREEDOM = 30


@dataclass(frozen=True)
class _Pilot:
    """What the first evaluations said, and of which kind their variance is."""

    variance: float
    freedom: float
    spread: float
    within: bool


class StoppingRule:
    """Decides for every column of a table of evaluations when its error bar is as small as the target.

    Args:
        target: The standard error that is wanted.
        columns: Number of columns.

    Example:
        One block whose values are -1 and +1 in turn. The pilot ends after 32 of them, with the variance 32/31 of one
        value and t_31 = 2.04; for a bar of 0.1 it asks for (2.04 / 1.96)^2 (32 / 31) / 0.1^2 = 112.

        >>> from wideflat.energy.stratified import stratified
        >>> rule, sizes = StoppingRule(0.1, 1), np.ones(1)
        >>> table = np.tile([-1.0, 1.0], 100).reshape(200, 1, 1)
        >>> next(n for n in range(2, 201) if rule.reached(table[:n], sizes, stratified(table[:n], sizes))[0])
        112
    """

    def __init__(self, target: float, columns: int) -> None:
        self.target = target
        self._pilots: list[_Pilot | None] = [None] * columns
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
        spreads, within, freedom = _design(table, sizes)
        variances = np.diag(estimate.covariance)
        for s in np.flatnonzero(~self._reached):
            pilot = self._pilots[s]
            if pilot is None or pilot.within != within[s]:
                enough = freedom[s] >= PILOT_FREEDOM and estimate.degrees_of_freedom[s] >= LEAST_FREEDOM
                pilot = _Pilot(variances[s], estimate.degrees_of_freedom[s], spreads[s], within[s]) if enough else None
                self._pilots[s] = pilot
            if pilot is not None:
                bars = (
                    (pilot.variance * spreads[s] / pilot.spread, pilot.freedom),
                    (variances[s], estimate.degrees_of_freedom[s]),
                )
                self._reached[s] = all(
                    math.sqrt(variance + extra[s]) * student_quantile(0.95, nu) <= 1.96 * self.target
                    for variance, nu in bars
                )
        return self._reached.copy()

    def widened(self, table: np.ndarray, sizes: np.ndarray, estimate: Estimate) -> Estimate:
        """The estimate with the bars of the pilot where a column was ended by it and they are the wider ones."""
        spreads, _, _ = _design(table, sizes)
        factor, freedom = np.ones(len(spreads)), estimate.degrees_of_freedom.copy()
        variances = np.diag(estimate.covariance)
        for s in np.flatnonzero(self._reached):
            pilot = self._pilots[s]
            assert pilot is not None
            variance = pilot.variance * spreads[s] / pilot.spread
            if variance > variances[s] > 0:
                factor[s], freedom[s] = math.sqrt(variance / variances[s]), pilot.freedom
        return Estimate(estimate.mean, estimate.covariance * np.outer(factor, factor), freedom)


def _design(table: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is known of a table without its values: sum a_j^2 / c_j, the kind of variance, its evaluations to spare."""
    c = (~np.isnan(table)).sum(0)  # (blocks, S)
    a = np.where(c > 0, sizes[:, None], 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        spreads = np.where(c > 0, (a / a.sum(0)) ** 2 / np.maximum(c, 1), 0.0).sum(0)
    within = (c >= 1).all(0) & (c >= 2).any(0)
    return spreads, within, np.where(within, np.maximum(c - 1, 0).sum(0), (c > 0).sum(0) - 1)
