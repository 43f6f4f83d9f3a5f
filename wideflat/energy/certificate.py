r"""What noise certifies about any change of the weights (randomised smoothing, in the space of weights).

Let A(w) be the accuracy under Gaussian noise of scale a, the mean over examples and z of whether w + sigma a z answers
rightly. Whatever the network is, for every fixed change delta of its weights

.. code-block:: text

    A(w + delta) >= Phi( Phi^-1(A(w)) - |delta / a| / sigma )

by the lemma of Neyman and Pearson: of all functions with values in [0, 1] and a given mean under one Gaussian the least
mean under a shifted one is that of a half-space. It holds for the share of right answers at once, which is such a
function of z. With a lower confidence limit p in place of A(w) it holds with that confidence, as Phi^-1 is increasing.

It speaks of the *noisy* network at w + delta, not of the network at w + delta itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from wideflat.checks import number

__all__ = ["certified_accuracy", "lengths_of"]


def certified_accuracy(p: float, length: float, sigma: float) -> float:
    """Phi(Phi^-1(p) - length / sigma): the least accuracy under noise after a change of a given length.

    Args:
        p: Accuracy under noise, or a lower limit of it.
        length: The length |delta / a| of the change in units of the scale of the noise; may be infinite.
        sigma: Strength of the noise; 0 certifies nothing but no change.

    Example:
        >>> round(certified_accuracy(0.9772, 1.0, 0.5), 3)  # Phi(2 - 2)
        0.5
    """
    p = min(max(p, 0.0), 1.0)
    if length == 0:
        return p
    if p == 0 or sigma == 0 or math.isinf(length):
        return 0.0
    quantile = math.inf if p == 1 else NormalDist().inv_cdf(p)
    return float(np.clip(NormalDist().cdf(quantile - length / sigma), 0.0, 1.0))


def lengths_of(shift: Any, profile: Mapping[str, Any]) -> np.ndarray:
    """|delta / a| of a change, or of each of several.

    Args:
        shift: A length; or what :func:`wideflat.shift_profile` has measured, with one for each position.
        profile: The conventions of the noise that is to certify it.

    Raises:
        ValueError: If the change was measured for another scale, network or other weights than the noise moves.
    """
    if not hasattr(shift, "scaled_lengths"):
        endless = isinstance(shift, float) and shift == math.inf
        return np.array([shift if endless else number("shift, a length,", shift, 0)])
    theirs = shift.conventions
    for name in ("scale", "architecture"):
        if theirs.get(name) != profile.get(name, theirs.get(name)):
            raise ValueError(f"{name} is {theirs.get(name)!r} for the shift and {profile.get(name)!r} for the noise")
    if profile.get("parameters", "all") not in ("all", theirs.get("parameters")):
        raise ValueError(
            f"the shift moves {theirs.get('parameters')} and the noise {profile['parameters']}: of what the noise does "
            'not move it says nothing; measure it with parameters="all"'
        )
    return np.asarray(shift.scaled_lengths)
