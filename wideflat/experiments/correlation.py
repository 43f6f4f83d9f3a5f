"""Correlation of two measured quantities: Pearson's r, Spearman's rank correlation, and their significance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

__all__ = ["Correlation", "pearson", "spearman"]


@dataclass(frozen=True)
class Correlation:
    """A correlation coefficient over n points.

    Attributes:
        r: The coefficient; NaN where one of the quantities does not vary.
        p: Probability of a coefficient at least as far from zero, by either sign, if there were no correlation.
        n: How many points.
    """

    r: float
    p: float
    n: int

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Confidence interval of r by Fisher's transform: atanh r is about normal with variance 1/(n - 3).

        Example:
            >>> [round(bound, 2) for bound in Correlation(r=0.90, p=1e-5, n=14).interval()]
            [0.71, 0.97]
        """
        if self.n < 4 or math.isnan(self.r):
            return -1.0, 1.0
        if abs(self.r) == 1:
            return self.r, self.r
        half = NormalDist().inv_cdf((1 + confidence) / 2) / math.sqrt(self.n - 3)
        return math.tanh(math.atanh(self.r) - half), math.tanh(math.atanh(self.r) + half)

    def __str__(self) -> str:
        return f"r({self.n - 2}) = {self.r:.2f}, p = {self.p:.1g}, n = {self.n}"


def pearson(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Correlation:
    r"""Pearson's r of points (x, y), and its two-sided p-value.

    .. math:: r = \frac{\sum_i (x_i - \bar x)(y_i - \bar y)}{\sqrt{\sum_i (x_i - \bar x)^2 \sum_i (y_i - \bar y)^2}}
              \qquad p = I_{1 - r^2}\left(\frac{n - 2}{2}, \frac12\right)

    The second is the probability of |t| beyond :math:`r \sqrt{(n-2)/(1-r^2)}` for Student's t with n - 2 degrees of
    freedom, written with the regularised incomplete beta function, so that small p keep their digits.

    Args:
        x: The first quantity. Points in which one of the two is NaN are left out.
        y: The second one, as many.

    Example:
        >>> print(pearson([1, 2, 3, 4], [1, 3, 2, 4]))
        r(2) = 0.80, p = 0.2, n = 4
    """
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"x and y must be two sequences of the same length, got shapes {a.shape} and {b.shape}")
    whole = np.isfinite(a) & np.isfinite(b)
    a, b = a[whole], b[whole]
    n = len(a)
    if n < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Correlation(math.nan, math.nan, n)
    a, b = a - a.mean(), b - b.mean()
    r = float(np.clip((a / np.linalg.norm(a)) @ (b / np.linalg.norm(b)), -1, 1))
    p = math.nan if n == 2 else incomplete_beta((n - 2) / 2, 0.5, (1 - r) * (1 + r))
    return Correlation(r, p, n)


def spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Correlation:
    """Spearman's rank correlation: Pearson's r of the ranks, ties sharing the mean of theirs.

    Example:
        >>> spearman([1, 2, 3, 4], [1, 8, 27, 64]).r
        1.0
    """
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    whole = np.isfinite(a) & np.isfinite(b) if a.shape == b.shape else slice(None)
    return pearson(_ranks(a[whole]), _ranks(b[whole]))


def _ranks(values: np.ndarray) -> np.ndarray:
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    return below + (equal + 1) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    r"""The regularised incomplete beta function :math:`I_x(a, b)` by its continued fraction (modified Lentz).

    Example:
        >>> round(incomplete_beta(2, 2, 0.25), 12)      # 3 x^2 - 2 x^3
        0.15625
    """
    if not 0 <= x <= 1 or a <= 0 or b <= 0:
        raise ValueError(f"I_x(a, b) needs 0 <= x <= 1 and a, b > 0, got x = {x}, a = {a}, b = {b}")
    if x in (0, 1):
        return float(x)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 1000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            c = 1 + numerator / c
            d = 1 / (d if abs(d) > tiny else tiny)
            c = c if abs(c) > tiny else tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * value / a
