"""The algorithms side by side: what each trains, how it steps, and where its center is.

=========  ====================  =====================================  =======================================
algorithm  networks              one iteration                          center
=========  ====================  =====================================  =======================================
sgd        1                     a step of SGD or RMSprop               the network
sam        1                     the same, with the gradient at the     the network
                                 worst point of a small ball
ema        1                     a step of SGD or RMSprop               a running mean of the network's weights
esgd       1                     an inner step of Entropy-SGD; each     w, where the outer steps lead
                                 L-th also an outer one (Algorithm 1)
lookahead  1                     the same, epsilon = alpha = gamma = 0  w
rsgd(xy)   y                     a step for every replica; each K-th    the barycenter
                                 with K gamma (w_a - w_bar) (Alg. 2)
easgd      y and a center        a step for every replica; each K-th    the center variable
                                 pulls replicas and center together
parle      y                     esgd in every replica, replicas        the barycenter of the w's
                                 coupled at the outer steps
=========  ====================  =====================================  =======================================

Each is a record (:class:`Algorithm`) in a file of its own. To add one: write the file, with its ``ALGORITHM``, and add
its name to the list below. `wideflat train --algorithm`, presets, trainings on ranks and the tests of all algorithms
follow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from wideflat.algorithms.algorithm import Algorithm
from wideflat.checks import perhaps

if TYPE_CHECKING:
    from wideflat.presets import Preset

__all__ = ["ALGORITHMS", "Algorithm", "check", "having"]

#: The files, in the order in which the algorithms are listed: the columns of Table 1, then the others.
FILES = (
    "sgd",
    "rsgd",
    "esgd",
    "rsgdxy",
    "lookahead",
    "easgd",
    "parle",
    "sam",
    "ema",
)

#: Every algorithm, by name.
ALGORITHMS: dict[str, Algorithm] = {
    record.name: record for record in (import_module(f"{__name__}.{file}").ALGORITHM for file in FILES)
}


def having(feature: str) -> str:
    """The names of the algorithms with something that not all have, for a sentence.

    Example:
        >>> having("elastic")
        'rsgd and rsgdxy'
    """
    *names, last = [name for name, algorithm in ALGORITHMS.items() if getattr(algorithm, feature)]
    return f"{', '.join(names)} and {last}" if names else last


def check(preset: Preset) -> None:
    """Refuse an algorithm that is not there, and settings that an algorithm does not have."""
    name = preset.algorithm
    if name not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ValueError(f"algorithm must be one of {known}, got {name!r}{perhaps(name, ALGORITHMS)}")
    algorithm = ALGORITHMS[name]
    if preset.num_replicas != 1 and not algorithm.replicated:
        raise ValueError(
            f"--num-replicas is for {having('replicated')}; {name} trains one network, got {preset.num_replicas}"
        )
    if preset.inner_steps != 1 and not algorithm.inner:
        raise ValueError(f"--inner-steps is for {having('inner')}; {name} has no inner loop, got {preset.inner_steps}")
    if preset.coupling != "gradient" and not algorithm.modes:
        raise ValueError(f"--coupling is for {having('modes')}, not for {name}, got {preset.coupling!r}")
    if preset.start not in algorithm.starts:
        fitting = [other for other, record in ALGORITHMS.items() if preset.start in record.starts]
        raise ValueError(f"start={preset.start!r} is for {', '.join(fitting)}, not for {name}")
