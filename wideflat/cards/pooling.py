"""Two measurements of the same curve with other noise, made into one with smaller error bars."""

from __future__ import annotations

import numpy as np

from wideflat.energy.profile import LocalEnergy

__all__ = ["pooled"]


def pooled(a: LocalEnergy, b: LocalEnergy) -> LocalEnergy:
    """The mean of two profiles of the same network on the same data, weighted by their evaluations.

    Args:
        a: A profile.
        b: One of the same conventions, of another seed.

    Example:
        >>> one = LocalEnergy([0.1], [0.2], [0.02], 0.0, evaluations=[100], conventions={"seed": 0})
        >>> two = LocalEnergy([0.1], [0.4], [0.02], 0.0, evaluations=[100], conventions={"seed": 1})
        >>> both = pooled(one, two)
        >>> both.mean.round(6).tolist(), both.stderr.round(6).tolist(), both.evaluations.tolist()
        ([0.3], [0.014142], [200])
    """
    if a.conventions.get("seed") == b.conventions.get("seed"):
        raise ValueError("these profiles have the same seed, so the same noise: there is nothing to pool")
    a.compare(b)  # refuses what is not the same
    total = np.maximum(a.evaluations + b.evaluations, 1)
    shares = [profile.evaluations / total for profile in (a, b)]
    covariance = sum(np.outer(s, s) * profile.covariance for s, profile in zip(shares, (a, b), strict=True))
    parts = [s**2 * profile.stderr**2 for s, profile in zip(shares, (a, b), strict=True)]
    with np.errstate(divide="ignore", invalid="ignore"):
        below = sum(v**2 / profile.degrees_of_freedom for v, profile in zip(parts, (a, b), strict=True))
        freedom = np.where(np.asarray(below) > 0, (parts[0] + parts[1]) ** 2 / below, np.inf)
    return LocalEnergy(
        a.sigmas,
        shares[0] * a.mean + shares[1] * b.mean,
        np.sqrt(parts[0] + parts[1]),
        a.baseline,
        degrees_of_freedom=freedom,
        covariance=np.asarray(covariance),
        baseline_stderr=a.baseline_stderr,
        evaluations=a.evaluations + b.evaluations,
        passes=a.passes + b.passes,
        conventions=dict(a.conventions),
        complete=a.complete and b.complete,
    )
