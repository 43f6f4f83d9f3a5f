"""What a card says in words: one sentence about all of it, a few lines about each measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from wideflat.cards.measures import AtTheWeights
from wideflat.energy.profile import LocalEnergy
from wideflat.hessian.eigenvalues import Spectrum
from wideflat.landscape.shift import ShiftProfile
from wideflat.landscape.slices import Slice
from wideflat.volume.volume import Integration
from wideflat.volume.volumes import FreeEntropy

__all__ = ["amount", "bounds", "crossed", "growth", "headline", "lines_of", "reach", "with_bar"]


def amount(value: float, stderr: float | None, metric: str) -> str:
    """A value with its error bar: the error in per cent, others as they are.

    Example:
        >>> amount(0.03119, 0.0021, "error"), amount(1.5, None, "loss"), amount(1.9971, 0.0349, "loss")
        ('3.12 ± 0.21 %', '1.5', '1.997 ± 0.035')
    """
    return _in_units(value, stderr, (100.0, " %") if metric == "error" else (1.0, ""))


def growth(value: float, stderr: float | None, metric: str) -> str:
    """A difference with its error bar: that of an error in points, which are not per cent of it.

    Example:
        >>> growth(0.05, None, "error"), growth(0.054, 0.0031, "error"), growth(0.1, None, "loss")
        ('5 points', '5.40 ± 0.31 points', '0.1')
    """
    return _in_units(value, stderr, (100.0, " points") if metric == "error" else (1.0, ""))


def _in_units(value: float, stderr: float | None, units: tuple[float, str]) -> str:
    factor, unit = units
    if stderr is None:
        return f"{factor * value:.4g}{unit}"
    return f"{with_bar(factor * value, factor * stderr)}{unit}"


def with_bar(value: float, bar: float) -> str:
    """A number and its error bar, both to the second digit of the bar.

    Example:
        >>> with_bar(4.02, 1.0), with_bar(-0.01113, 0.3975), with_bar(6.08e-6, 1.5e-6), with_bar(2.5, 0.0)
        ('4.0 ± 1.0', '-0.01 ± 0.40', '6.08e-06 ± 1.5e-06', '2.5 ± 0')
    """
    exact = as_exact_as(value, bar)
    digits = len(exact.partition(".")[2])
    return f"{exact} ± {f'{bar:.{digits}f}' if 'e' not in exact and 1e-4 <= bar < 1e6 else f'{bar:.2g}'}"


def as_exact_as(value: float, bar: float) -> str:
    """A number to the second digit of its error bar.

    Example:
        >>> as_exact_as(-0.01113, 0.14), as_exact_as(416.02, 3.0), as_exact_as(2.5, 0.0), as_exact_as(1e-9, 0.2)
        ('-0.01', '416.0', '2.5', '0.00')
        >>> as_exact_as(6.08e-6, 1.5e-6)
        '6.08e-06'
    """
    if not (math.isfinite(value) and math.isfinite(bar) and bar > 0) or abs(value) > 1e6 or bar < 1e-4:
        return f"{value:.4g}"
    digits = max(0, 1 - math.floor(math.log10(float(f"{bar:.2g}"))))
    return f"{round(value, digits) + 0.0:.{digits}f}"


def headline(results: dict[str, Any]) -> str:
    """One sentence about what was measured: error, noise, bits.

    Args:
        results: By the names of the measures.
    """
    parts = []
    at_w: AtTheWeights | None = results.get("at_w")
    if at_w is not None:
        value = amount(at_w.metric, at_w.metric_stderr, at_w.metric_name)
        parts.append(f"{at_w.metric_name} {value} at the weights")
    profile: LocalEnergy | None = results.get("relative")
    if profile is not None:
        k = len(profile.sigmas) // 2
        metric = profile.conventions.get("metric", "error")
        grown = _more(float(profile.mean[k]), float(profile.stderr[k]), metric)
        parts.append(f"{grown} under relative noise of sigma = {profile.sigmas[k]:g}")
    shifts: dict[str, ShiftProfile] | None = results.get("shift")
    if shifts is not None:
        parts.append(_bits(shifts["quantize"]))
    if not parts:
        return "nothing was measured"
    return ", ".join(parts)


def _bits(found: ShiftProfile) -> str:
    """What rounding to 4 bits adds, or to what is nearest to that."""
    k = int(np.argmin(np.abs(found.positions - 4)))
    grown = _more(float(found.mean[k]), float(found.stderr[k]), found.conventions.get("metric", "error"))
    return f"{grown} when rounded to {found.positions[k]:g} bits"


def _more(value: float, stderr: float, metric: str) -> str:
    """A growth as one says it.

    >>> _more(0.1, 0.02, "error"), _more(-0.1, 0.02, "loss")
    ('10.0 ± 2.0 points more', '0.100 ± 0.020 less')
    """
    return f"{growth(abs(value), stderr, metric)} {'less' if value < 0 else 'more'}"


def lines_of(name: str, result: Any) -> list[str]:
    """A few lines about the result of one measure."""
    return _LINES[name](result)


def _at_w(found: AtTheWeights) -> list[str]:
    return [
        f"{found.metric_name} {amount(found.metric, found.metric_stderr, found.metric_name)}",
        f"{found.loss_name} {amount(found.loss, found.loss_stderr, found.loss_name)} ({found.examples} examples)",
    ]


def _profile(found: LocalEnergy) -> list[str]:
    metric = found.conventions.get("metric", "error")
    rows = zip(found.sigmas, found.mean, found.stderr, strict=True)
    lines = [f"sigma {s:g}: {growth(float(m), float(e), metric)}" for s, m, e in rows]
    step = 0.05 if metric == "error" else 0.1
    return [*lines, reach(found, step), *([unmoved] if (unmoved := _unmoved(found)) else [])]


def reach(found: LocalEnergy, step: float) -> str:
    """Where a profile has grown by a step, in words."""
    metric = found.conventions.get("metric", "error")
    words = f"{metric} grows by {growth(step, None, metric)}"
    try:
        at = found.sigma_at(step)
    except ValueError as error:
        return f"{words}: {error}"
    if math.isinf(at.sigma):
        return f"{words} nowhere up to sigma = {found.sigmas.max():g}"
    return f"{words} at sigma = {at.sigma:.3g} [{at.lower:.3g}, {at.upper:.3g}]"


def _unmoved(found: LocalEnergy) -> str:
    c = found.conventions
    return f"{c['unmoved']} of {c['perturbed']} weights cannot move" if c.get("unmoved") else ""


def _layers(found: dict[str, LocalEnergy]) -> list[str]:
    order = sorted(found, key=lambda name: -found[name].mean[0])
    return [
        f"{name or '(the network itself)'}: "
        f"{growth(float(found[name].mean[0]), float(found[name].stderr[0]), found[name].conventions['metric'])}"
        for name in order
    ]


def _worst(found: dict[str, LocalEnergy]) -> list[str]:
    return [
        f"sigma {s:g}: at least {found['l2'].mean[k]:.4g} (l2), {found['linf'].mean[k]:.4g} (linf); "
        f"on average {found['average'].mean[k]:.4g} ± {found['average'].stderr[k]:.2g}"
        for k, s in enumerate(found["l2"].sigmas)
    ]


def _spectrum(found: Spectrum) -> list[str]:
    return str(found).splitlines()[:2] + list(found.conventions.get("notes", []))


def _shift(found: dict[str, ShiftProfile]) -> list[str]:
    lines = []
    for kind, shift in found.items():
        metric = shift.conventions["metric"]
        for k, position in enumerate(shift.positions):
            what = f"{position:g} bits" if kind == "quantize" else f"{100 * position:g} % pruned"
            here = growth(float(shift.mean[k]), float(shift.stderr[k]), metric)
            noise = growth(float(shift.noise_mean[k]), float(shift.noise_stderr[k]), metric)
            lines.append(f"{what}: {here} (noise of the same length, sigma {shift.sigmas[k]:.2g}: {noise})")
    return lines


def _slice(found: Slice) -> list[str]:
    return str(found).splitlines()[:1]


def crossed(point: Integration) -> str:
    """What to say of bounds that are the wrong way round; nothing of others."""
    if not point.lower > point.upper:
        return ""
    if point.lower - point.upper <= 3 * math.hypot(point.lower_stderr, point.upper_stderr):
        return "the two bounds are closer to each other than their errors are large"
    return "the lower bound is above the upper one by more than their errors: measure the free entropy itself"


def bounds(point: Integration) -> tuple[str, str]:
    """Both bounds of log Z, each to the second digit of its error."""
    return (
        with_bar(point.lower, point.lower_stderr),
        with_bar(point.upper, point.upper_stderr),
    )


def _entropy(found: FreeEntropy) -> list[str]:
    lines = []
    for point in found.points:
        llc = f"; LLC {with_bar(point.llc[-1], point.llc_stderr[-1])}" if point.llc else ""
        at_least, at_most = bounds(point)
        lines.append(f"sigma {point.sigma:g}: log Z at least {at_least}, at most {at_most}{llc}")
        lines += [words] if (words := crossed(point)) else []
        lines += [reason for name, reason in zip(point.flags, point.reasons, strict=True) if name != "quick"]
    return lines


_LINES: dict[str, Callable[[Any], list[str]]] = {
    "at_w": _at_w, "relative": _profile, "filter": _profile, "layers": _layers, "shift": _shift, "worst": _worst,
    "spectrum": _spectrum, "slice": _slice, "entropy": _entropy,
}  # fmt: skip
