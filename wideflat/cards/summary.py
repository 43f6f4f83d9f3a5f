"""What a card says in words: one sentence about all of it, a few lines about each measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from wideflat.cards.measures import AtTheWeights
from wideflat.energy.eigenvalues import Spectrum
from wideflat.energy.profile import LocalEnergy
from wideflat.energy.shift import ShiftProfile
from wideflat.energy.slices import Slice
from wideflat.entropy.volumes import FreeEntropy

__all__ = ["amount", "headline", "lines_of"]

#: A rounded network is called harmed where its metric has grown by more than this, by two standard errors.
HARMLESS = 0.01


def amount(value: float, stderr: float | None, metric: str) -> str:
    """A value with its error bar: the error in per cent, others as they are.

    Example:
        >>> amount(0.0312, 0.0021, "error"), amount(1.5, None, "loss")
        ('3.12 ± 0.21 %', '1.5')
    """
    if stderr is not None and abs(value) < 1e-4 * stderr:
        value = 0.0  # rounding errors of a sum
    if metric == "error":
        return f"{100 * value:.3g}" + (f" ± {100 * stderr:.2g} %" if stderr is not None else " %")
    return f"{value:.4g}" + (f" ± {stderr:.2g}" if stderr is not None else "")


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
        grown = amount(float(profile.mean[k]), float(profile.stderr[k]), metric)
        parts.append(f"{grown} more under relative noise of sigma = {profile.sigmas[k]:g}")
    shifts: dict[str, ShiftProfile] | None = results.get("shift")
    if shifts is not None:
        parts.append(_bits(shifts["quantize"]))
    if not parts:
        return "nothing was measured"
    return ", ".join(parts)


def _bits(found: ShiftProfile) -> str:
    limit = HARMLESS * (1 if found.conventions.get("metric") == "error" else max(abs(found.baseline), 1e-12))
    last = None
    for k in np.argsort(-found.positions):
        if not found.mean[k] - 2 * found.stderr[k] <= limit:
            break
        last = k
    if last is None:
        return f"harmed by rounding to {found.positions.max():g} bits"
    bar = amount(float(found.mean[last]), float(found.stderr[last]), found.conventions.get("metric", "error"))
    return f"no harm is seen from rounding down to {found.positions[last]:g} bits ({bar})"


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
    lines = [f"sigma {s:g}: {amount(float(m), float(e), metric)}" for s, m, e in rows]
    step = 0.05 if metric == "error" else 0.1
    return [*lines, reach(found, step), *([unmoved] if (unmoved := _unmoved(found)) else [])]


def reach(found: LocalEnergy, step: float) -> str:
    """Where a profile has grown by a step, in words."""
    metric = found.conventions.get("metric", "error")
    words = f"{metric} grows by {amount(step, None, metric)}"
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
        f"{amount(float(found[name].mean[0]), float(found[name].stderr[0]), found[name].conventions['metric'])}"
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
            here = amount(float(shift.mean[k]), float(shift.stderr[k]), metric)
            noise = amount(float(shift.noise_mean[k]), float(shift.noise_stderr[k]), metric)
            lines.append(f"{what}: {here} (noise of the same length, sigma {shift.sigmas[k]:.2g}: {noise})")
    return lines


def _slice(found: Slice) -> list[str]:
    return str(found).splitlines()[:1]


def _entropy(found: FreeEntropy) -> list[str]:
    lines = []
    for point in found.points:
        llc = f"; LLC {point.llc[-1]:.3g} ± {point.llc_stderr[-1]:.1g}" if point.llc else ""
        lines.append(
            f"sigma {point.sigma:g}: log Z between {point.lower:.4g} ± {point.lower_stderr:.1g} and {point.upper:.4g} "
            f"± {point.upper_stderr:.1g}{llc}"
        )
        lines += [reason for name, reason in zip(point.flags, point.reasons, strict=True) if name != "quick"]
    return lines


_LINES: dict[str, Callable[[Any], list[str]]] = {
    "at_w": _at_w, "relative": _profile, "filter": _profile, "layers": _layers, "shift": _shift, "worst": _worst,
    "spectrum": _spectrum, "slice": _slice, "entropy": _entropy,
}  # fmt: skip
