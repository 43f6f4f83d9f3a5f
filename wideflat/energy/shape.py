"""The shape of the noise of repeated evaluations: how skewed and how heavy-tailed one of them is, pooled over blocks.

Block j was evaluated c_j times, with deviations d from its own mean. Deviations from an estimated mean are flatter than
the noise itself; for noise of variance v and cumulants k3, k4

.. code-block:: text

    E sum d^3 = k3 (c - 1)(c - 2) / c
    E sum d^4 = k4 A + 3 v^2 B,         A = c ((1 - 1/c)^4 + (c - 1)/c^4),    B = (c - 1)^2 / c

    E V^2     = v^2 (c + 1) / (c - 1) + k4 / c,          V the variance of the block's values

so sums over blocks give k3 and k4 without bias. Two or three values of a block say nothing of k4. Where no block has
four, the blocks are taken as equally noisy: a spread of their noise then counts as heavy tails, which errs on the
safe side.
"""

from __future__ import annotations

import numpy as np

__all__ = ["shape_of"]


def shape_of(table: np.ndarray, sizes: np.ndarray, within: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Skewness and excess kurtosis of one evaluation for each column: 0 where nothing can be said, kurtosis never less.

    Args:
        table: Shape (passes, blocks, S); NaN where a block was not evaluated.
        sizes: Examples of each block, shape (blocks,): a block counts by them.
        within: For which columns it is the noise over the passes of each block; else that between blocks.

    Example:
        Values 0, 0, 0, 0, 1 again and again have the skewness 1.5 and the excess kurtosis 0.25.

        >>> table = np.tile([0.0, 0.0, 0.0, 0.0, 1.0], 2000).reshape(-1, 1, 1)
        >>> skewness, kurtosis = shape_of(table, np.ones(1), np.array([True]))
        >>> round(float(skewness[0]), 2), round(float(kurtosis[0]), 2)
        (1.5, 0.25)
    """
    columns = table.shape[2]
    skewness, kurtosis = np.zeros(columns), np.zeros(columns)
    share = sizes / sizes.max() if len(sizes) and sizes.max() > 0 else sizes
    with np.errstate(invalid="ignore", divide="ignore"):
        for s in range(columns):
            values = table[:, :, s] * share
            if not within[s]:  # one value a block
                values = np.nanmean(values[:, ~np.isnan(values).all(0)], 0)[:, None]
            skewness[s], kurtosis[s] = _shape(values)
    return skewness, kurtosis


def _shape(values: np.ndarray) -> tuple[float, float]:
    """As :func:`shape_of`, of values (passes, blocks) with NaN where there is none."""
    seen = ~np.isnan(values)
    c = seen.sum(0)
    values, seen, c = values[:, c >= 2], seen[:, c >= 2], c[c >= 2]
    if not len(c):
        return 0.0, 0.0
    filled = np.where(seen, values, 0.0)
    d = np.where(seen, filled - filled.sum(0) / c, 0.0)
    variance = (d**2).sum(0) / (c - 1)
    pooled = float((d**2).sum() / (c - 1).sum())
    if not (np.isfinite(pooled) and pooled > 0):
        return 0.0, 0.0
    third = ((c - 1) * (c - 2) / c).sum()
    skewness = float((d**3).sum() / third) / pooled**1.5 if third > 0 else 0.0
    a, b = c * ((1 - 1 / c) ** 4 + (c - 1) / c**4), (c - 1) ** 2 / c
    told = c >= 4
    if told.any():
        square, weight = variance**2 * (c - 1) / (c + 1), a - 3 * b * (c - 1) / (c * (c + 1))
    else:
        told, square, weight = c >= 2, pooled**2, a
    fourth = float(((d**4).sum(0) - 3 * square * b)[told].sum() / weight[told].sum())
    return skewness, max(fourth / pooled**2, 0.0)
