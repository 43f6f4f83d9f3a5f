"""Means of a fixed set of blocks that are evaluated repeatedly with independent noise, with honest error bars.

Block j (a share a_j of the data) is evaluated c_j times and has the mean m_j and the variance v_j over these. Then

.. code-block:: text

    mean      = sum_j a_j m_j
    stderr^2  = sum_j a_j^2 v_j / c_j           degrees of freedom by Satterthwaite, for Student's t in intervals

A block that was evaluated once takes the mean v_j of the others. In the first pass there is none; then v is taken
between blocks, which adds the variance between their data: an upper bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

__all__ = ["Estimate", "stratified", "student_quantile"]


@dataclass
class Estimate:
    """Means of the columns of a table of blocks, with their covariance and degrees of freedom."""

    mean: np.ndarray
    covariance: np.ndarray
    degrees_of_freedom: np.ndarray


def stratified(table: np.ndarray, sizes: np.ndarray) -> Estimate:
    """Estimate from repeated evaluations of blocks (the estimator at the head of this module).

    Args:
        table: Shape (passes, blocks, S): what block j gave in pass p; NaN where it was not evaluated. The passes over
            a block have independent noise; the noise of different blocks is independent.
        sizes: Examples of each block, shape (blocks,).

    Example:
        Two blocks of equal size, two passes: variances 2 and 0 over the passes, so stderr^2 = (1/4) 2/2 + 0 = 1/4.

        >>> estimate = stratified(np.array([[[1.0], [5.0]], [[3.0], [5.0]]]), np.array([10, 10]))
        >>> estimate.mean.tolist(), estimate.covariance.tolist(), estimate.degrees_of_freedom.tolist()
        ([3.5], [[0.25]], [1.0])
    """
    seen = ~np.isnan(table)
    c = seen.sum(0)  # (blocks, S)
    filled = np.where(seen, table, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        m = filled.sum(0) / c
        a = np.where(c > 0, sizes[:, None], 0.0)
        a = a / a.sum(0)
    mean = np.where(c > 0, a * np.where(c > 0, m, 0.0), 0.0).sum(0)
    covariance = np.full((len(mean), len(mean)), np.nan)
    freedom = np.full(len(mean), np.nan)
    within = ((c >= 1).all(0) & (c >= 2).any(0)) if len(table) else np.zeros(len(mean), bool)
    columns = np.flatnonzero(within)
    if len(columns):
        covariance[np.ix_(columns, columns)], freedom[columns] = _within(
            filled[:, :, columns], seen[:, :, columns], m[:, columns], c[:, columns], a[:, columns]
        )
    columns = np.flatnonzero(~within & ((c > 0).sum(0) >= 2))
    if len(columns):
        covariance[np.ix_(columns, columns)], freedom[columns] = _between(m[:, columns], c[:, columns], a[:, columns])
    mean = np.where((c > 0).any(0), mean, np.nan)
    return Estimate(mean, covariance, freedom)


def _within(
    filled: np.ndarray, seen: np.ndarray, m: np.ndarray, c: np.ndarray, a: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Covariance of the means from the variance over passes of each block; blocks seen once take the average one."""
    deviation = np.where(seen, filled - m, 0.0)
    both = np.einsum("pjs,pjt->jst", seen.astype(float), seen.astype(float))  # passes in which s and t share z
    sums = np.einsum("pjs,pjt->jst", deviation, deviation)
    freedom = np.maximum(both - 1, 0)
    pooled = sums.sum(0) / np.maximum(freedom.sum(0), 1)
    v = np.where(both >= 2, sums / np.maximum(freedom, 1), pooled)
    term = a[:, :, None] * a[:, None, :] * v * both / (c[:, :, None] * c[:, None, :])
    diagonal = np.einsum("jss->js", term) * (c >= 2)
    squares = (diagonal**2 / (c + 1)).sum(0)  # E v_hat^2 = v^2 (1 + 2/(c-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        nu = np.where(squares > 0, diagonal.sum(0) ** 2 / squares - 2, (np.maximum(c, 1) - 1).sum(0))
    return term.sum(0), np.clip(nu, 1, None)


def _between(m: np.ndarray, c: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Upper bound of the covariance of the means, from the variance between blocks."""
    weighted = np.where(c > 0, a * (np.where(c > 0, m, 0.0) - (a * np.where(c > 0, m, 0.0)).sum(0)), 0.0)
    k = (c > 0).sum(0)
    joint = np.minimum.outer(k, k)
    return weighted.T @ weighted * joint / np.maximum(joint - 1, 1), (k - 1).astype(float)


def student_quantile(confidence: float, freedom: float) -> float:
    """Half-width of a two-sided interval of Student's t, in standard errors (Hill 1970; relative error below 1e-3).

    Example:
        >>> round(student_quantile(0.95, 10), 3), round(student_quantile(0.95, float("inf")), 3)
        (2.228, 1.96)
    """
    if math.isnan(freedom) or freedom <= 0:
        return math.inf
    p = 1 - confidence
    normal = NormalDist().inv_cdf(1 - p / 2)
    if freedom > 1e6:
        return normal
    n = max(freedom, 1.0)
    if n == 1:
        return 1 / math.tan(p * math.pi / 2)
    if n == 2:
        return math.sqrt(2 / (p * (2 - p)) - 2)
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * p) ** (2 / n)
    if y > 0.05 + a:
        x = -normal
        y = x * x
        if n < 5:
            c += 0.3 * (n - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1) * (n + 1) / (
            n + 2
        ) + 1 / y
    return math.sqrt(n * y)
