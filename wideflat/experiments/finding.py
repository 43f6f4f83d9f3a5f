"""What came out, in one sentence: made of the numbers, with their uncertainty, and the opposite if they say so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from wideflat.experiments.statistics import Shown

__all__ = ["Contrast", "against", "finding", "listed", "not_told_apart", "said"]


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

    @property
    def told(self) -> int | None:
        """The sign; None where nothing is known of the uncertainty."""
        return None if math.isnan(self.low) else self.sign

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
        n = f"n = {self.n[0]} each" if self.n[0] == self.n[1] else f"n = {self.n[0]} and {self.n[1]}"
        if math.isnan(self.low):
            return f"{self.difference:+.2g}, {n}: too few to say"
        middle, low, high = (f"{value:+.{self._digits()}f}" for value in (self.difference, self.low, self.high))
        return f"{middle}, 95 % interval {low} to {high}, {n}"

    def _digits(self) -> int:
        """After the point: two of half of the interval are told, and on which side of zero it ends."""
        half = (self.high - self.low) / 2
        digits = max(0, 1 - math.floor(math.log10(half))) if half else 2
        while digits < 9 and any(value and not round(value, digits) for value in (self.low, self.high)):
            digits += 1
        return digits


def finding(
    name: str, reference: str, flatness: Mapping[str, Contrast | None], error: Mapping[str, Contrast | None]
) -> str:
    """One sentence: in which networks is ``name`` flatter than ``reference``, and in which does it generalise better?

    Numbers stand where there is a difference; :func:`not_told_apart` has the others.

    Args:
        name: Of the algorithm.
        reference: Of the one it is compared with.
        flatness: Its error under noise minus that of the reference, in points, for each network; less is flatter.
        error: Its test error minus that of the reference, in points.

    Example:
        >>> clear, even = Contrast(-2.0, -3.0, -1.0, (3, 3)), Contrast(0.5, -1.0, 2.0, (3, 3))
        >>> finding("Entropy-SGD", "SGD", {"the MLP": clear}, {"the MLP": even})
        'In the MLP Entropy-SGD ends in flatter minima than SGD (noise on its weights costs 2.0 ± 1.0 points of error
        less), with no clear difference in test error.'
    """
    groups: dict[tuple[int | None, int | None], list[str]] = {}
    for where, flat in flatness.items():
        if flat is not None:
            groups.setdefault((flat.told, _told(error.get(where))), []).append(where)
    if not groups:
        return f"Nothing is known yet about {name} against {reference}."
    clauses: list[str] = []
    for signs in sorted(groups, key=lambda signs: (not signs[0], not signs[1], signs[0] or 0)):  # clear findings first
        places = groups[signs]
        noise = _costs([flatness[where] for where in places], " points" + " of error" * (not clauses))
        errors = _costs([error.get(where) for where in places], " points")
        names = ("it", "") if clauses else (name, f" than {reference}")
        clauses.append(f"in {listed(places)} {_clause(*names, signs, noise, errors, reference)}")
    return said(*clauses)


def _told(contrast: Contrast | None) -> int | None:
    return None if contrast is None else contrast.told


def _clause(who: str, than: str, signs: tuple[int | None, int | None], noise: str, errors: str, reference: str) -> str:
    """What was found in networks that agree; ``than`` is empty where the reference has been named already."""
    flat, wrong = {-1: "flatter", 1: "sharper"}, {-1: "fewer", 1: "more"}
    if signs[0] not in flat and signs[1] in wrong:
        return f"{who} makes {wrong[signs[1]]} test errors{than} ({errors}), in minima no clearly flatter"
    if signs[0] not in flat:
        between = f" between {who} and {reference}" if than else ""
        return f"no difference shows{between}" if signs[0] == 0 else f"there are too few trainings to say{between}"
    text = f"{who} ends in {flat[signs[0]]} minima{than} (noise on its weights costs {noise})"
    if signs[1] in wrong:
        return f"{text} and makes {wrong[signs[1]]} test errors ({errors})"
    return text if signs[1] is None else f"{text}, with no clear difference in test error"


def not_told_apart(what: Mapping[str, Mapping[str, Contrast | None]]) -> str:
    """The differences whose interval holds zero, with it; empty where there are none.

    Args:
        what: For each quantity its differences, by network, in points.

    Example:
        >>> even = Contrast(0.5, -1.0, 2.0, (3, 3))
        >>> not_told_apart({"noise": {"the MLP": even}, "test error": {"the MLP": even, "the tree": even}})
        'Not told apart: in the MLP noise costs 0.5 ± 1.5 points more, test error 0.5 ± 1.5 points more; in the tree
        test error 0.5 ± 1.5 points more.'
    """
    unclear: dict[str, list[str]] = {}
    for quantity, contrasts in what.items():
        for where, contrast in contrasts.items():
            if contrast is not None and not contrast.told:
                verb = f"{quantity} costs" if quantity == "noise" else quantity
                unclear.setdefault(where, []).append(f"{verb} {contrast.brief(' points')}")
    places = [f"in {where} {', '.join(parts)}" for where, parts in unclear.items()]
    return f"Not told apart: {'; '.join(places)}." if places else ""


def _costs(contrasts: Sequence[Contrast | None], unit: str) -> str:
    """Differences as less or more; the unit is said once."""
    known = [contrast for contrast in contrasts if contrast is not None]
    return listed([each.brief(unit * (not number)) for number, each in enumerate(known)]) if known else ""


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
        "test error is lower than SGD's for eSGD (-2.0 points, -3.0 to -1.0, n = 3 each) and cannot be told from it for
        rSGD (+0.5 points, -1.0 to +2.0, n = 3 each) (95 % intervals)"
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
