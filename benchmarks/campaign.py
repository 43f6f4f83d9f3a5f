"""Ways to train, compared: rates tuned alike, several seeds, one JSON file a training, tables against a baseline.

What ``language_models.py`` and ``leaderboard.py`` share. A training that is there is not done again; several processes
share the work; the tables are made from the files alone.
"""

from __future__ import annotations

import fcntl
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from machine import describe, into_document
from scipy import stats

from wideflat.files import atomic_write

TUNING_SEED = 1000


def rate(step: int, steps: int, constant: bool, least: float) -> float:
    """What a rate is multiplied with: warm-up over 5 %, then constant, or cosine down to ``least``."""
    warm = max(steps // 20, 1)
    if step < warm:
        return (step + 1) / warm
    return 1.0 if constant else least + (1 - least) / 2 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


class Way(Protocol):
    """What a campaign has to know of a way to train."""

    @property
    def lr(self) -> float:
        """In the middle of the grid of rates."""

    @property
    def of(self) -> str | None:
        """Whose rate it has, times ``times``; None: its own, tuned."""

    @property
    def times(self) -> float:
        """See ``of``."""


class Campaign:
    """A folder with one JSON file a training; a file that another process has begun is left to it.

    Args:
        folder: Of the results.
        ways: What is compared, by name; the first is the baseline.
        train: Trains and measures a way at a rate with a seed; with ``TUNING_SEED`` only what the choice of the rate
            needs, with ``score`` in it.
        score: What a good rate makes small.
        seeds: How many, besides the one for tuning.
    """

    def __init__(
        self,
        folder: Path,
        ways: Mapping[str, Way],
        train: Callable[[str, float, int], dict[str, Any]],
        score: str,
        seeds: int,
    ) -> None:
        self.ways, self.train, self.score, self.seeds = ways, train, score, seeds
        self.runs = folder / "runs"
        self.runs.mkdir(parents=True, exist_ok=True)

    def path(self, name: str, lr: float, seed: int) -> Path:
        """The file of one training."""
        words = name.replace(", ", "_").replace(" ", "-").replace("+", "and")
        return self.runs / f"{words}__{lr:.6g}__{seed}.json"

    def result(self, name: str, lr: float, seed: int) -> dict[str, Any] | None:
        """What a finished training gave."""
        path = self.path(name, lr, seed)
        return json.loads(path.read_text()) if path.exists() else None

    def do(self, name: str, lr: float, seed: int) -> bool:
        """Train and measure, unless it is there or under way elsewhere; whether it is there now."""
        path = self.path(name, lr, seed)
        if path.exists():
            return True
        with open(path.with_suffix(".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            if path.exists():
                return True
            start = time.process_time()
            row = {"way": name, "lr": lr, "seed": seed, **self.train(name, lr, seed)}
            row |= {"seconds": time.process_time() - start, "on": describe(), "python": sys.version.split()[0]}
            with atomic_write(path) as file:
                json.dump(row, file, indent=1)
            print(f"{name}, lr {lr:g}, seed {seed}: done in {row['seconds']:.0f} s", flush=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
        return True

    def rate(self, name: str, train: bool) -> float | None:
        """The best of three neighbours on a grid of factors 2; None while trainings that it hangs on are missing.

        Raises:
            RuntimeError: If the best rate is a thousand times off the first guess: then something else is wrong.
        """
        way = self.ways[name]
        if way.of is not None:
            lr = self.rate(way.of, train)
            return None if lr is None else lr * way.times
        center = way.lr
        while True:
            trio = [center / 2, center, center * 2]
            if train and not all(self.do(name, lr, TUNING_SEED) for lr in trio):
                return None
            found = [self.result(name, lr, TUNING_SEED) for lr in trio]
            if any(row is None for row in found):
                return None
            scores = [row[self.score] if math.isfinite(row[self.score]) else math.inf for row in found if row]
            if scores[1] <= min(scores):
                return center
            center = trio[int(np.argmin(scores))]
            if abs(math.log2(center / way.lr)) > 10:
                raise RuntimeError(f"{name}: the grid of rates has no end, {center:g} from {way.lr:g} on")

    def run(self) -> None:
        """All that is missing; waits for what other processes have under way."""
        while True:
            missing = False
            for name in self.ways:
                lr = self.rate(name, train=True)
                done = lr is not None and all(self.do(name, lr, seed) for seed in range(self.seeds))
                missing = missing or not done
            if not missing:
                return
            time.sleep(5)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Finished trainings by way, seed by seed; of ways that are finished for every seed."""
        found: dict[str, list[dict[str, Any]]] = {}
        for name in self.ways:
            lr = self.rate(name, train=False)
            results = [] if lr is None else [self.result(name, lr, seed) for seed in range(self.seeds)]
            if results and all(row is not None for row in results):
                found[name] = results  # type: ignore[assignment]
        return found


# ---- tables


@dataclass(frozen=True)
class Layout:
    """What the tables show.

    Args:
        head: Above the column of the score.
        score: What is compared first.
        measures: Columns beside it.
        lengths: The baseline's shorter training, itself and its longer one.
        equal: What is equal where a measure is compared with the baseline's own curve.
        words: What the baseline is called.
    """

    head: str
    score: str
    measures: Sequence[str]
    lengths: tuple[str, str, str]
    equal: str
    words: str


def values(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    """One number a seed."""
    return np.array([row[key] for row in rows])


def interval(differences: np.ndarray) -> str:
    """Mean and half the width of its 95 % interval."""
    n = len(differences)
    if n < 2:
        return f"{differences.mean():+.3f}"
    half = stats.t.ppf(0.975, n - 1) * differences.std(ddof=1) / math.sqrt(n)
    return f"{differences.mean():+.3f} ± {half:.3f}"


def at_equal(curve: list[list[dict[str, Any]]], rows: list[dict[str, Any]], equal: str, name: str) -> np.ndarray:
    """A measure minus the baseline's own where ``equal`` is the same: a line through its three lengths, by seed."""
    differences = []
    for seed, row in enumerate(rows):
        x, y = ([length[seed][key] for length in curve] for key in (equal, name))
        slope, offset = np.polyfit(x, y, 1)
        differences.append(row[name] - (offset + slope * row[equal]))
    return np.array(differences)


def tables(found: dict[str, list[dict[str, Any]]], layout: Layout, pairs: Sequence[tuple[str, str]] = ()) -> str:
    """Markdown: against the baseline at equal gradients, at equal loss, and differences of single pairs."""
    x, (_, baseline, _) = layout, layout.lengths
    if baseline not in found:
        return "The baseline is not finished."
    lines = [f"| way | lr | {x.head} | against {x.words} | " + " | ".join(x.measures) + " |"]
    lines += ["|" + "---|" * (4 + len(x.measures))]
    for name, rows in found.items():
        cells = [name, f"{rows[0]['lr']:g}", f"{values(rows, x.score).mean():.3f}"]
        cells.append("" if name == baseline else interval(values(rows, x.score) - values(found[baseline], x.score)))
        cells += [f"{values(rows, key).mean():.3f}" for key in x.measures]
        lines.append("| " + " | ".join(cells) + " |")
    if all(name in found for name in x.lengths):
        curve = [found[name] for name in x.lengths]
        lines += ["", f"At equal {x.equal}, minus the line through {x.words} at three lengths:", ""]
        others = [key for key in x.measures if key != x.equal]
        lines += ["| way | " + " | ".join(others) + " |", "|" + "---|" * (1 + len(others))]
        for name, rows in found.items():
            if name not in x.lengths:
                cells = [interval(at_equal(curve, rows, x.equal, key)) for key in others]
                lines.append("| " + " | ".join([name, *cells]) + " |")
    there = [(a, b) for a, b in pairs if a in found and b in found]
    if there:
        lines += ["", f"| difference: {x.score} | |", "|---|---|"]
        lines += [
            f"| {a} minus {b} | {interval(values(found[a], x.score) - values(found[b], x.score))} |" for a, b in there
        ]
    return "\n".join(lines)


def write_page(folder: Path, title: str, design: str, text: str) -> None:
    """Put the tables into the README of a folder; what was written around them by hand stays."""
    path = folder / "README.md"
    if not path.exists():
        with atomic_write(path) as file:
            file.write(f"# {title}\n\n```\n{design.strip()}\n```\n\n<!-- tables -->\n\n<!-- end of tables -->\n")
    into_document(path, "tables", text)
