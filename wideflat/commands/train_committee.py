"""``wideflat train committee-...``: a setting of the committee machine (App. B.1)."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wideflat import committee
from wideflat.commands import UsageError, usage
from wideflat.commands.answers import answer
from wideflat.data import dress_coat
from wideflat.experiments.statistics import mean_and_spread
from wideflat.training.runs import Run

__all__ = ["train_committee"]


def train_committee(
    preset: str,
    seed: int,
    restarts: int,
    draw: str,
    patterns: int,
    changes: Sequence[str],
    make_out: Callable[[str, dict[str, Any]], Path],
    say: Callable[[str], object],
    json: bool,
) -> int:
    """Train restarts of a setting together, print what came out, and return the exit code.

    Args:
        preset: ``committee-`` and the name of the setting.
        seed: Of the training patterns, and of all restarts.
        restarts: How many.
        draw: How the training patterns are drawn.
        patterns: How many.
        changes: Of the setting, as NAME=VALUE.
        make_out: The run directory, from the preset and what was changed.
        say: Where messages go.
        json: Print JSON.
    """
    if restarts < 1:
        raise UsageError(f"--restarts must be >= 1, got {restarts}")
    name = preset.removeprefix("committee-")
    with usage():
        changed = committee.changes_from(changes)
        setting = committee.SETTINGS[name].replace(**changed)
    seeds = range(seed * 1_000_000, seed * 1_000_000 + restarts)
    options = {"seed": seed, "seeds": [seeds[0], seeds[-1]], "draw": draw, "patterns": patterns}
    run = Run.create(
        make_out(preset, {"restarts": restarts, **changed, **_drawn(draw, patterns)}),
        {"experiment": {"name": preset, **dataclasses.asdict(setting)}, "options": options},
    )
    result = run.path / "solutions.npz"
    with run.locked():
        if result.exists():
            say(f"{run.path} is finished already")
            solutions = committee.Solutions.load(result)
        else:
            run.record_environment()
            training = dress_coat.load(patterns, draw, seed)
            try:
                solutions = committee.train(
                    setting if changed else name,
                    training.inputs,
                    training.targets,
                    seeds,
                    test_inputs=training.test_inputs,
                    test_targets=training.test_targets,
                    checkpoint=run.path / "checkpoint.npz",
                    source=training.source,
                )
            except committee.Interrupted as interruption:
                print(f"wideflat: {interruption}; start the same command again to go on", file=sys.stderr)
                return 130
            solutions.save(result)
            (run.path / "checkpoint.npz").unlink(missing_ok=True)
    if json:
        answer({"run": run.path, "solutions": result, **solutions.summary()})
    else:
        print(f"{result}: {len(solutions)} restarts")
        for words, value in _in_words(solutions):
            print(f"  {words:<28}{value}")
        # Around a restart that kept errors Belief Propagation takes long, and may not converge.
        measure = "local-entropy" if all(solutions.solved) else "local-energy"
        print(f"  next: wideflat {measure} {shlex.quote(str(run.path))}")
    return 0


def _in_words(solutions: committee.Solutions) -> list[tuple[str, str]]:
    """What came out: counts of restarts as counts, errors in percent as everywhere."""
    n, errors, balanced = len(solutions), np.array(solutions.test_error), np.array(solutions.balanced_test_error)
    rule = sum(solutions.reached)
    clean = sum(count == 0 for count in solutions.errors_before)
    return [
        ("ended by their rule", f"{rule} of {n}"),
        ("solved", f"{clean} of {n}"),
        ("solved with polish", f"{sum(solutions.solved)} of {n}"),
        ("epochs", f"{np.mean(solutions.epochs):.0f} ({min(solutions.epochs)} to {max(solutions.epochs)})"),
        ("test error %", mean_and_spread(100 * errors)),
        ("balanced test error %", mean_and_spread(100 * balanced)),
    ]


def _drawn(draw: str, patterns: int) -> dict[str, int]:
    """What the name of the run says about its patterns, if they are not the usual ones."""
    if draw != "balanced":
        return {draw: patterns}
    return {"patterns": patterns} if patterns != 500 else {}
