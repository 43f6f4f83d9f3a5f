r"""The sigma at which a profile has grown by a given amount, with a confidence interval: the inverse of dE(w, sigma).

PAC-Bayes bounds take such a sigma as the width of a minimum. Between the points of a profile dE is taken as linear in
sigma^2 (exact for a quadratic loss), from dE = 0 at sigma = 0:

.. code-block:: text

    m(u) = (1 - u) m_0 + u m_1,     s(u)^2 = (1 - u)^2 v_0 + 2 u (1 - u) c + u^2 v_1,     u linear in sigma^2

    sigma      where m first reaches the amount
    interval   all sigmas that a test does not exclude, |m(u) - amount| <= t s(u): the roots of a quadratic (Fieller)

The interval is about the noise of the measurement. That a curve has other values between its points than a line is not
in it: measure at more sigmas where the interval is shorter than their distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wideflat.checks import number
from wideflat.checks.records import share
from wideflat.energy.stratified import student_quantile

__all__ = ["SigmaAt", "crossing"]


@dataclass(frozen=True)
class SigmaAt:
    """A sigma with its interval; infinite where the profile does not get so far.

    Attributes:
        sigma: Where the mean has grown by ``amount``.
        lower: End of the confidence interval.
        upper: Its other end.
        amount: The growth that was asked for.
        confidence: Of the interval.
    """

    sigma: float
    lower: float
    upper: float
    amount: float
    confidence: float

    def __str__(self) -> str:
        return f"sigma = {self.sigma:.4g} [{self.lower:.4g}, {self.upper:.4g}] at dE = {self.amount:g}"


def crossing(
    sigmas: np.ndarray,
    mean: np.ndarray,
    covariance: np.ndarray,
    freedom: np.ndarray,
    amount: float,
    confidence: float,
) -> SigmaAt:
    """Where a curve first reaches an amount, by the rule at the head of this module.

    Args:
        sigmas: Shape (S,), in any order.
        mean: dE at each, shape (S,); points that are NaN were not measured.
        covariance: Of the means, shape (S, S).
        freedom: Degrees of freedom of each variance.
        amount: Positive.
        confidence: Between 0 and 1.

    Example:
        dE = sigma^2, known exactly, is 0.09 at 0.3.

        >>> s = np.array([0.2, 0.4])
        >>> round(crossing(s, s**2, np.zeros((2, 2)), np.full(2, np.inf), 0.09, 0.95).sigma, 12)
        0.3
    """
    amount, confidence = number("amount", amount, above=0), share("confidence", confidence)
    order = [k for k in np.argsort(sigmas, kind="stable") if sigmas[k] > 0 and not np.isnan(mean[k])]
    if not order:
        raise ValueError("the profile has no point with sigma > 0")
    s = np.concatenate([[0.0], sigmas[order]])
    m = np.concatenate([[0.0], mean[order]])
    v = np.zeros((len(s), len(s)))
    v[1:, 1:] = covariance[np.ix_(order, order)]
    t = np.array([0.0, *(student_quantile(confidence, freedom[k]) for k in order)])
    known = int(np.argmax(~np.isfinite(m))) if not np.isfinite(m).all() else len(m)
    found = [_first(m[k], m[k + 1], amount) for k in range(known - 1)]
    points = [_between(s[k], s[k + 1], u) for k, u in enumerate(found) if u is not None]
    if known < len(m) and not points:
        raise ValueError(
            f"the profile is {m[known - 1]:.3g} at sigma = {s[known - 1]:g} and has overflown at {s[known]:g}: measure "
            "at sigmas in between"
        )
    kept: list[float] = []
    for k in range(known - 1):
        quantile = max(t[k], t[k + 1]) if k else t[1]
        ends = _accepted(m[k] - amount, m[k + 1] - amount, v[k, k], v[k, k + 1], v[k + 1, k + 1], quantile)
        kept += [_between(s[k], s[k + 1], u) for u in ends]
    sigma = points[0] if points else math.inf
    beyond = s[-1] in kept  # the last point itself is not excluded, nor is what comes after it
    lower = min([*kept, sigma if points else s[known - 1]])
    return SigmaAt(sigma, lower, math.inf if beyond or not points else max([*kept, sigma]), amount, confidence)


def _between(a: float, b: float, u: float) -> float:
    """The sigma at a share u of the way from a to b, in sigma^2."""
    return float(b) if u == 1 else math.sqrt(a**2 + u * (b**2 - a**2))


def _first(a: float, b: float, amount: float) -> float | None:
    """The share of the way from a to b at which the line reaches the amount from below."""
    return (amount - a) / (b - a) if a < amount <= b else None


def _accepted(a: float, b: float, v: float, c: float, w: float, t: float) -> list[float]:
    """Ends of the parts of [0, 1] where (a + u (b - a))^2 <= t^2 ((1 - u)^2 v + 2 u (1 - u) c + u^2 w)."""
    if math.isinf(t):
        return [0.0, 1.0]
    t2 = t * t
    p = (b - a) ** 2 - t2 * (v - 2 * c + w)
    q = 2 * a * (b - a) - 2 * t2 * (c - v)
    r = a * a - t2 * v
    ends = [u for u, value in ((0.0, r), (1.0, p + q + r)) if value <= 0]
    if not all(map(math.isfinite, (p, q, r))):  # an amount whose square is none: nothing is near it
        return ends
    return ends + [float(root.real) for root in np.roots([p, q, r]) if abs(root.imag) < 1e-12 and 0 < root.real < 1]
