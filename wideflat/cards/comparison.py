r"""How two cards compare, in one sentence that is computed.

The flatness of a profile is its mean over sigma; with c the weights of that mean, m and C the points and covariances of
the two profiles,

.. code-block:: text

    difference = c . (m_1 - m_2),        stderr^2 = c^T C_1 c + c^T C_2 c

The noise of the two is not paired here, so the standard error is not too small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from wideflat.cards.summary import with_bar
from wideflat.energy.profile import LocalEnergy

__all__ = ["Comparison", "compared"]

#: Conventions of a card without which a difference means nothing, besides those of the profiles.
DECISIVE = ("architecture", "data", "examples", "batch_norm", "parameters")
#: Standard errors from which a difference is called one.
SEEN = 2.0


@dataclass
class Comparison:
    """The difference in flatness of two minima; negative where the first is flatter.

    Attributes:
        sentence: In words.
        mean: The difference of the mean dE over sigma, by scale.
        stderr: Its standard error.
    """

    sentence: str
    mean: dict[str, float]
    stderr: dict[str, float]

    def __str__(self) -> str:
        return self.sentence


def compared(
    profiles: dict[str, tuple[LocalEnergy | None, LocalEnergy | None]],
    conventions: tuple[dict[str, Any], dict[str, Any]],
    titles: tuple[str, str],
    force: bool = False,
) -> Comparison:
    """Compare the profiles of two cards.

    Args:
        profiles: By scale, of both; None where there is none.
        conventions: Of both cards.
        titles: Of both.
        force: In spite of other conventions.

    Raises:
        ValueError: If that would mean nothing.
    """
    ours, theirs = conventions
    reasons = [
        f"{name} is {ours.get(name)!r} for one and {theirs.get(name)!r} for the other"
        for name in DECISIVE
        if ours.get(name) != theirs.get(name)
    ]
    if reasons and not force:
        raise ValueError(f"these cards are not comparable: {'; '.join(reasons)}. force=True compares them anyway")
    mean, stderr = {}, {}
    for scale, (a, b) in profiles.items():
        if a is not None and b is not None:
            mean[scale], stderr[scale] = _difference(a, b, force)
    if not mean:
        raise ValueError("these cards are not comparable: they have no local energy in common")
    some = next(a for a, b in profiles.values() if a is not None and b is not None)
    return Comparison(_sentence(mean, stderr, some, titles), mean, stderr)


def _difference(a: LocalEnergy, b: LocalEnergy, force: bool) -> tuple[float, float]:
    """Of the mean over sigma."""
    points = a.compare(b, force=force)
    used = np.flatnonzero((points.sigmas > 0) & np.isfinite(points.mean))
    if not len(used):
        raise ValueError("these cards are not comparable: their local energies have no finite point in common")
    variance = (a.covariance + b.covariance)[np.ix_(used, used)].mean()
    return float(points.mean[used].mean()), math.sqrt(max(float(variance), 0.0))


def _sentence(mean: dict[str, float], stderr: dict[str, float], a: LocalEnergy, titles: tuple[str, str]) -> str:
    unit, factor = (" points", 100.0) if a.conventions.get("metric", "error") == "error" else ("", 1.0)
    metric = a.conventions.get("metric", "error")
    parts, signs = [], set()
    for scale, value in mean.items():
        bar = stderr[scale]
        deviations = value / bar if bar > 0 else math.copysign(math.inf, value) if value else 0.0
        signs.add(0 if abs(deviations) < SEEN else int(math.copysign(1, value)))
        parts.append(
            f"under {scale} noise its {metric} grows by {with_bar(factor * abs(value), factor * bar)}{unit} "
            f"{'less' if value < 0 else 'more'} ({abs(deviations):.1f} standard errors)"
        )
    low, high = a.sigmas[a.sigmas > 0].min(), a.sigmas.max()
    if signs == {0}:
        verdict = f"No difference in flatness to {titles[1]} is seen"
    elif signs <= {-1, 0}:
        verdict = f"Flatter than {titles[1]}"
    elif signs <= {1, 0}:
        verdict = f"Sharper than {titles[1]}"
    else:
        verdict = f"Neither flatter nor sharper than {titles[1]}: the scales disagree"
    where = f"averaged over sigma = {low:g} to {high:g}"
    return f"{verdict}: {' and '.join(parts)}, {where}. The errors are those of the noise, on the same examples."
