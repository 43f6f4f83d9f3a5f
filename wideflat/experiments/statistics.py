"""What tables of results say about samples: mean ± spread, the paper's error, differences, correlations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from wideflat.checks import number as checked_number
from wideflat.checks import whole
from wideflat.checks.options import value_of
from wideflat.checks.records import array
from wideflat.experiments.table import Table
from wideflat.presets import Preset

__all__ = [
    "Correlation",
    "Shown",
    "difference_within",
    "mean_and_spread",
    "number",
    "paper_error",
    "partial",
    "pearson",
    "percent",
    "share",
    "spearman",
]


class Shown(str):
    """An entry of a table: the text that is printed, and the numbers that it was made of.

    Args:
        text: What is printed.
        **numbers: What it says, by name: ``value`` is the number itself, others are about it.

    Example:
        >>> entry = Shown("6.7 ± 0.3", value=6.71, spread=0.32)
        >>> print(entry, entry.record("error"))
        6.7 ± 0.3 {'error': 6.71, 'error_spread': 0.32}
    """

    numbers: dict[str, float | None]

    def __new__(cls, text: str, **numbers: float | None) -> Shown:
        """A text with its numbers."""
        shown = super().__new__(cls, text)
        shown.numbers = numbers
        return shown

    def record(self, key: str) -> dict[str, Any]:
        """Its numbers for JSON, under ``key`` and ``key_NAME``; null where there is none."""
        return {
            key if name == "value" else f"{key}_{name}": None if value is None or math.isnan(value) else value
            for name, value in self.numbers.items()
        }


def number(value: float | None, style: str = "g", dash: str = "-") -> Shown:
    """A number in a format, or a dash.

    Example:
        >>> number(0.005), number(None)
        ('0.005', '-')
    """
    if value is None or math.isnan(value):
        return Shown(dash, value=None)
    return Shown(format(value, style), value=float(value))


def mean_and_spread(values: np.ndarray, digits: int = 2, dash: str = "–") -> Shown:
    """Mean ± standard deviation of the finite values; a dash where there are none.

    Example:
        >>> mean_and_spread(np.array([1.0, 3.0, np.nan])), mean_and_spread(np.array([]))
        ('2.00 ± 1.41', '–')
    """
    values = values[np.isfinite(values)]
    if not len(values):
        return Shown(dash, value=None, spread=None)
    mean, spread = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None
    text = f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")
    return Shown(text, value=mean, spread=spread)


def percent(fractions: np.ndarray, digits: int = 2) -> Shown:
    """Mean ± standard deviation of fractions, in percent; a dash where there are none.

    Example:
        >>> percent(np.array([0.10, 0.12])), percent(np.array([0.1])), percent(np.array([np.nan]))
        ('11.00 ± 1.41', '10.00', '-')
    """
    return mean_and_spread(100 * fractions, digits, dash="-")


def share(flags: np.ndarray) -> Shown:
    """How many of all are true.

    Example:
        >>> share(np.array([True, False, True]))
        '2/3'
    """
    return Shown(f"{int(flags.sum())}/{len(flags)}", value=int(flags.sum()))


def paper_error(cell: Preset) -> Shown:
    """The number of Table 1, as printed; a dash where the table is blank.

    Example:
        >>> from wideflat.presets import preset
        >>> paper_error(preset("cifar10-resnet18", "rsgd")), paper_error(preset("cifar10-pyramidnet", "esgd"))
        ('12.4 ± 0.3', '-')
    """
    error, spread = cell.paper_error, cell.paper_spread
    if error is None:
        return Shown("-", value=None, spread=None)
    return Shown(f"{error:.1f}" + ("" if spread is None else f" ± {spread:.1f}"), value=error, spread=spread)


def difference_within(
    table: Table, setting: str, reference: str, column: str, factor: float = 1.0
) -> tuple[float, float] | None:
    """How much larger the values of a setting are than those of another, and the standard error of that.

    Means over the training subsets that have at least two values of both: subsets differ by more than settings do.
    None where there is no such subset.

    Args:
        table: Has columns ``setting``, ``subset`` and the one of the values.
        setting: Whose values.
        reference: Compared with whose.
        column: Which values.
        factor: What they are multiplied with, such as 100 for percent.
    """
    differences, variances = [], []
    for subset in table.unique("subset"):
        both = [factor * table.where(setting=name, subset=subset)[column] for name in (setting, reference)]
        both = [values[np.isfinite(values)] for values in both]
        if all(len(values) > 1 for values in both):
            differences.append(both[0].mean() - both[1].mean())
            variances.append(sum(values.var(ddof=1) / len(values) for values in both))
    if not differences:
        return None
    return float(np.mean(differences)), float(np.sqrt(np.sum(variances)) / len(variances))


# -------------------------------------------------------------------------------------------------------- correlation


@dataclass(frozen=True)
class Correlation:
    """A correlation coefficient over n points.

    Attributes:
        r: The coefficient; NaN where one of the quantities does not vary.
        p: Probability of a coefficient at least as far from zero, by either sign, if there were no correlation.
        n: How many points.
        ranks: Whether it is one of ranks, whose interval is wider.
    """

    r: float
    p: float
    n: int
    ranks: bool = False

    @classmethod
    def of(cls, r: float, n: int, ranks: bool = False) -> Correlation:
        r"""A coefficient over n points with its two-sided p-value.

        The probability of |t| beyond :math:`r \sqrt{(n-2)/(1-r^2)}` for Student's t with n - 2 degrees of freedom.

        Example:
            >>> f"{Correlation.of(0.90, 12).p:.0e}, {Correlation.of(0.90, 14).p:.0e}"
            '7e-05, 1e-05'
        """
        r, n = value_of("r", r), whole("n", n)
        if not abs(r) <= 1 and not math.isnan(r):
            raise ValueError(f"r must lie in -1 to 1, got {r:g}")
        if n < 3 or math.isnan(r):
            return cls(r, math.nan, n, ranks)
        if abs(r) == 1:
            return cls(r, 0.0, n, ranks)
        return cls(r, float(2 * special.stdtr(n - 2, -abs(r) * math.sqrt((n - 2) / ((1 - r) * (1 + r))))), n, ranks)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Confidence interval of r by Fisher's transform: atanh r is about normal with variance 1/(n - 3).

        Of ranks (1 + r^2/2)/(n - 3), by Bonett and Wright.

        Example:
            >>> [round(bound, 2) for bound in Correlation.of(0.90, 14).interval()]
            [0.71, 0.97]
        """
        confidence = checked_number("confidence", confidence, 0, 1)
        if self.n < 4 or math.isnan(self.r):
            return -1.0, 1.0
        if abs(self.r) == 1:
            return self.r, self.r
        variance = (1 + self.r**2 / 2 if self.ranks else 1) / (self.n - 3)
        half = float(special.ndtri((1 + confidence) / 2)) * math.sqrt(variance)
        return math.tanh(math.atanh(self.r) - half), math.tanh(math.atanh(self.r) + half)

    def __str__(self) -> str:
        return f"r({self.n - 2}) = {self.r:.2f}, p = {self.p:.1g}, n = {self.n}"


def pearson(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Correlation:
    r"""Pearson's r of points (x, y), and its two-sided p-value (:meth:`Correlation.of`).

    .. math:: r = \frac{\sum_i (x_i - \bar x)(y_i - \bar y)}{\sqrt{\sum_i (x_i - \bar x)^2 \sum_i (y_i - \bar y)^2}}

    Args:
        x: The first quantity. Points in which one of the two is NaN are left out.
        y: The second one, as many.

    Example:
        >>> print(pearson([1, 2, 3, 4], [1, 3, 2, 4]))
        r(2) = 0.80, p = 0.2, n = 4
    """
    from scipy import stats  # takes longer to import than all of wideflat

    a, b = _whole_points(x, y)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Correlation(math.nan, math.nan, len(a))
    return Correlation.of(float(stats.pearsonr(a, b).statistic), len(a))


def spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Correlation:
    """Spearman's rank correlation: Pearson's r of the ranks, ties sharing the mean of theirs.

    Example:
        >>> spearman([1, 2, 3, 4], [1, 8, 27, 64]).r
        1.0
    """
    from scipy import stats  # takes longer to import than all of wideflat

    a, b = _whole_points(x, y)
    found = pearson(stats.rankdata(a), stats.rankdata(b))
    return Correlation.of(found.r, found.n, ranks=True)


def partial(
    x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, *given: Sequence[float] | np.ndarray
) -> Correlation:
    """Pearson's r of what is left of x and y when their best linear fits by other quantities are taken away.

    Each quantity takes one degree of freedom: ``n`` of the result is the number of points less that of the quantities.

    Args:
        x: The first quantity. Points in which one of all is NaN are left out.
        y: The second one, as many.
        *given: What both may depend on, as many each. One that does not vary takes nothing away.

    Example:
        >>> z = np.arange(8.0)
        >>> e, f = np.array([1, -1, -1, 1, 1, -1, -1, 1]), np.array([1, 1, -1, -1, -1, -1, 1, 1])
        >>> round(pearson(z + e, z + f).r, 2), round(abs(partial(z + e, z + f, z).r), 2)
        (0.84, 0.0)
    """
    points = np.stack([array("the values of a quantity", values) for values in (x, y, *given)])
    points = points[:, np.isfinite(points).all(axis=0)]
    count = points.shape[1]
    if not count:
        return Correlation(math.nan, math.nan, 0)
    others = np.stack([np.ones(count), *(row for row in points[2:] if np.ptp(row) > 0)])
    left = points[:2] - points[:2] @ np.linalg.pinv(others) @ others
    freedom = count + 1 - len(others)
    if (np.abs(left).max(axis=1) <= 1e-9 * np.abs(points[:2]).max(axis=1)).any():  # nothing but rounding is left of one
        return Correlation(math.nan, math.nan, freedom)
    return Correlation.of(pearson(*left).r, freedom)


def _whole_points(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points of which both quantities are there."""
    a, b = array("x", x), array("y", y)
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"x and y must be two sequences of the same length, got shapes {a.shape} and {b.shape}")
    whole = np.isfinite(a) & np.isfinite(b)
    return a[whole], b[whole]
