r"""Errors of means over a few short chains.

All chains of a node are taken about one common mean: samples about the mean of their own chain would hide what the lag
of a chain adds. With tau the integrated autocorrelation time, n = samples/tau independent samples are left, the
variance of their mean is s^2/(n - 1) with n - 1 degrees of freedom, and no tau is taken below the mean of all nodes:
one that is short by chance makes the error small and its degrees of freedom many at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["autocorrelation_time", "split_r_hat", "variances"]


def autocorrelation_time(values: np.ndarray) -> float:
    """Integrated autocorrelation time by Geyer's initial positive sequence, for values of shape (samples, chains).

    Example:
        >>> autocorrelation_time(np.array([[1.0], [-1.0], [1.0], [-1.0]]))
        1.0
    """
    deviation, samples = values - values.mean(), len(values)
    f = np.array([(deviation[: samples - k] * deviation[k:]).sum() for k in range(samples)])
    if f[0] <= 0:
        return 1.0
    even = samples // 2 * 2
    pairs = (f[:even:2] + f[1:even:2]) / f[0]
    stop = int(np.argmax(pairs < 0)) if (pairs < 0).any() else len(pairs)
    return max(1.0, 2 * float(pairs[:stop].sum()) - 1)


def variances(nodes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Variance of the mean of each array (samples, chains), its degrees of freedom, and the tau it was found with."""
    tau = np.array([autocorrelation_time(values) for values in nodes])
    tau = np.maximum(tau, tau.mean())
    n = np.maximum(2.0, np.array([values.size for values in nodes]) / tau)
    return np.array([values.var() for values in nodes]) / (n - 1), n - 1, tau


def split_r_hat(values: np.ndarray) -> float:
    """Gelman and Rubin's ratio for values (samples, chains), every chain cut into two; 1 if all halves agree."""
    half = len(values) // 2
    if half < 2:
        return float("nan")
    parts = np.concatenate([values[:half], values[-half:]], axis=1)
    within = parts.var(0, ddof=1).mean()
    if within == 0:
        return 1.0 if parts.mean(0).var() == 0 else float("inf")
    return float(np.sqrt((half - 1) / half + parts.mean(0).var(ddof=1) / within))
