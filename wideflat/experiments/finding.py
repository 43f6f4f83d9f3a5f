"""What came out, in one sentence: made of the numbers, with their uncertainty, and the opposite if they say so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from wideflat.experiments.statistics import Shown

__all__ = ["Contrast", "against", "finding", "listed", "said"]


@dataclass(frozen=True)
class Contrast:
    """How much larger the mean of one sample is than that of another, with a 95 % interval.

    Attributes:
        difference: Of the means.
        low: End of the interval; NaN where one of the samples has a single value, so that nothing is known.
        high: The other end.
        n: How many values the two samples have.
    """

    difference: float
    low: float
    high: float
    n: tuple[int, int]

    @classmethod
    def of(cls, first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> Contrast | None:
        """Of two samples, whose variances may differ (Welch); None where one of them is empty.

        Example:
            >>> found = Contrast.of([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
            >>> round(found.difference, 2), round(found.low, 2), round(found.high, 2), found.n
            (-3.0, -5.27, -0.73, (3, 3))
        """
        samples = [np.asarray(values, float) for values in (first, second)]
        samples = [values[np.isfinite(values)] for values in samples]
        if not all(len(values) for values in samples):
            return None
        difference, n = float(samples[0].mean() - samples[1].mean()), (len(samples[0]), len(samples[1]))
        if min(n) < 2:
            return cls(difference, math.nan, math.nan, n)
        parts = [float(values.var(ddof=1)) / len(values) for values in samples]
        if not sum(parts):
            return cls(difference, difference, difference, n)
        dof = sum(parts) ** 2 / sum(part**2 / (count - 1) for part, count in zip(parts, n, strict=True))
        half = float(special.stdtrit(dof, 0.975)) * math.sqrt(sum(parts))
        return cls(difference, difference - half, difference + half, n)

    @property
    def sign(self) -> int:
        """-1 or 1 where the interval lies on one side of zero; 0 where it does not, or is not known."""
        return -1 if self.high < 0 else 1 if self.low > 0 else 0

    def words(self, less: str, more: str, neither: str) -> str:
        """The word that the interval allows."""
        return {-1: less, 1: more, 0: neither}[self.sign]

    def shown(self, digits: int = 2) -> Shown:
        """For a table: the difference and its interval.

        Example:
            >>> Contrast(-3.0, -5.27, -0.73, (3, 3)).shown(1), Contrast(-3.0, math.nan, math.nan, (1, 3)).shown(1)
            ('-3.0 (-5.3 to -0.7)', '-3.0 (interval unknown)')
        """
        ends = "interval unknown" if math.isnan(self.low) else f"{self.low:+.{digits}f} to {self.high:+.{digits}f}"
        return Shown(f"{self.difference:+.{digits}f} ({ends})", value=self.difference, low=self.low, high=self.high)

    def brief(self, unit: str = "") -> str:
        """The difference and half of its interval, with one digit after the point, as less or more.

        Example:
            >>> Contrast(-3.0, -5.27, -0.73, (3, 3)).brief(" points")
            '3.0 ± 2.3 points less'
            >>> Contrast(0.51, math.nan, math.nan, (1, 3)).brief()
            '0.5 more, of too few trainings to say'
        """
        way = "less" if self.difference < 0 else "more"
        if math.isnan(self.low):
            return f"{abs(self.difference):.1f}{unit} {way}, of too few trainings to say"
        return f"{abs(self.difference):.1f} ± {(self.high - self.low) / 2:.1f}{unit} {way}"

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.difference:+.2g}, n = {self.n[0]} and {self.n[1]}: too few to say"
        interval = f"95 % interval {self.low:+.2g} to {self.high:+.2g}"
        return f"{self.difference:+.2g}, {interval}, n = {self.n[0]} and {self.n[1]}"


def finding(
    name: str, reference: str, flatness: Mapping[str, Contrast | None], error: Mapping[str, Contrast | None]
) -> str:
    """One sentence: in which networks is ``name`` flatter than ``reference``, and in which does it generalise better?

    Args:
        name: Of the algorithm.
        reference: Of the one it is compared with.
        flatness: Its error under noise minus that of the reference, in points, for each network; less is flatter.
        error: Its test error minus that of the reference, in points.

    Example:
        >>> clear, even = Contrast(-2.0, -3.0, -1.0, (3, 3)), Contrast(0.5, -1.0, 2.0, (3, 3))
        >>> finding("Entropy-SGD", "SGD", {"the MLP": clear}, {"the MLP": even})
        'Entropy-SGD ends in flatter minima than SGD: noise on its weights costs 2.0 ± 1.0 points of error less in the
        MLP; test errors do not differ clearly (0.5 ± 1.5 more).'
    """
    known = {where: contrast for where, contrast in flatness.items() if contrast is not None}
    errors = {where: contrast for where, contrast in error.items() if contrast is not None}
    if not known:
        return f"Nothing is known yet about {name} against {reference}."
    (sign, first), *rest = _by_sign(known)
    whose = f"{name}'s" if sign == 0 else "its"
    words = {way: f"{name} ends in {word} minima than {reference}" for way, word in ((-1, "flatter"), (1, "sharper"))}
    words[0] = f"neither {name} nor {reference} ends in clearly flatter minima"
    units = [" points of error", *[""] * (len(first) - 1)]  # once is enough
    causes = [each.brief(unit) + "," * math.isnan(each.low) for unit, each in zip(units, first.values(), strict=True)]
    if rest:  # not everywhere: where comes first
        flat = f"in {listed(list(first))} {words[sign]} (noise on {whose} weights costs {listed(causes)})"
    else:
        places = listed([f"{cause} in {where}" for cause, where in zip(causes, first, strict=True)])
        flat = f"{words[sign]}: noise on {whose} weights costs {places}"
    more = {1: "; in sharper ones in ", 0: "; no difference shows in "}
    clauses = [flat + "".join(more[sign] + _places(group) for sign, group in rest)]
    if errors and all(contrast.sign == 0 for contrast in errors.values()):
        clauses.append(f"test errors do not differ clearly ({listed([each.brief() for each in errors.values()])})")
    elif errors:
        parts = [f"{_LEVEL[sign]} in {_places(group)}" for sign, group in _by_sign(errors)]
        clauses.append(f"its test error is {listed(parts)}")
    return said(*clauses)


#: What a test error is, by the sign of its difference.
_LEVEL = {-1: "lower", 1: "higher", 0: "not clearly another"}


def _by_sign(contrasts: Mapping[str, Contrast]) -> list[tuple[int, dict[str, Contrast]]]:
    """The networks by what is found in them, the clear findings first."""
    signs = sorted({contrast.sign for contrast in contrasts.values()}, key=lambda sign: (sign == 0, sign))
    return [(sign, {where: each for where, each in contrasts.items() if each.sign == sign}) for sign in signs]


def _places(group: Mapping[str, Contrast]) -> str:
    return listed([f"{where} ({contrast.brief()})" for where, contrast in group.items()])


def against(reference: str, what: str, contrasts: Mapping[str, Contrast | None], unit: str = "points") -> str:
    """A clause: of whom ``what`` is lower than of the reference, of whom higher, of whom it cannot be told.

    Args:
        reference: Whom the others are compared with.
        what: The quantity.
        contrasts: Everybody else's value minus that of the reference; None where there is none.
        unit: Of the differences.

    Example:
        >>> low, even = Contrast(-2.0, -3.0, -1.0, (3, 3)), Contrast(0.5, -1.0, 2.0, (3, 3))
        >>> against("SGD", "test error", {"eSGD": low, "rSGD": even})
        "test error is lower than SGD's for eSGD (-2 points, -3 to -1, n = 3 and 3) and cannot be told from it for rSGD
        (+0.5 points, -1 to +2, n = 3 and 3) (95 % intervals)"
    """
    groups: dict[int, list[str]] = {}
    for name, contrast in contrasts.items():
        if contrast is not None:
            groups.setdefault(contrast.sign, []).append(f"{name} ({_points(contrast, unit=unit, brief=True)})")
    words = {-1: f"is lower than {reference}'s for", 1: f"is higher than {reference}'s for"}
    first = next((sign for sign in (-1, 1) if sign in groups), 0)
    words[0] = "cannot be told from it for" if first else f"cannot be told from {reference}'s for"
    clauses = [f"{words[sign]} {listed(groups[sign])}" for sign in (-1, 1, 0) if sign in groups]
    return f"{what} {' and '.join(clauses)} (95 % intervals)" if clauses else ""


def listed(names: Sequence[str]) -> str:
    """Names as a sentence lists them.

    Example:
        >>> listed(["SGD"]), listed(["SGD", "eSGD", "rSGD"])
        ('SGD', 'SGD, eSGD and rSGD')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def said(*clauses: str) -> str:
    """Clauses as one sentence; empty where there is nothing to say.

    Example:
        >>> said("test error is lower", "", "it is flatter"), said("")
        ('Test error is lower; it is flatter.', '')
    """
    text = "; ".join(clause for clause in clauses if clause)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _points(contrast: Contrast, measure: str = "", unit: str = "points", brief: bool = False) -> str:
    head, _, tail = str(contrast).partition(",")
    tail = tail.replace(" 95 % interval", "") if brief else tail
    return f"{measure + ': ' if measure else ''}{head} {unit},{tail}"
