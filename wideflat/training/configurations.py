"""Whether two configurations are of one experiment: what a run that is on disk may go on with."""

from __future__ import annotations

import json
from typing import Any

from wideflat.checks.records import in_json

__all__ = ["as_read", "differences"]

#: Parts of a configuration that do not change the training, so that a run may go on with others.
WITHOUT_EFFECT = (
    "experiment.notes",
    "experiment.paper_error",
    "experiment.paper_spread",
    "experiment.paper_gamma1",
    "experiment.as_coded",
    "experiment.coded",
    "options.evaluate_every",
)

#: Parts of a configuration that earlier versions did not write, and what they did.
ADDED = {
    "experiment.coupling": "gradient",
    "experiment.start": "independent",
    "experiment.fork_passes": 3,
    "experiment.batch_norm": "refresh",
    "experiment.gamma_clock": "step",
    "experiment.gamma_in_lr": False,
}


def as_read(config: dict[str, Any]) -> Any:
    """A configuration as it is read back: tuples are lists."""
    return json.loads(in_json("the configuration of a run", config))


def differences(there: Any, here: Any, name: str = "") -> str:
    """What differs between two configurations, in words; empty if nothing does."""
    if isinstance(there, dict) and isinstance(here, dict):
        paths = {key: f"{name}.{key}" if name else str(key) for key in sorted({*there, *here})}
        parts = (differences(there.get(key, ADDED.get(path)), here.get(key), path) for key, path in paths.items())
        return ", ".join(part for part in parts if part)
    if there == here or name in WITHOUT_EFFECT:
        return ""
    return f"{name.removeprefix('experiment.')} is {there} there and {here} here"
