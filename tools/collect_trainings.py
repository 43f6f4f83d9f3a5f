"""Take finished trainings over into results/, and write their table into results/table1.md.

    python tools/collect_trainings.py [--commit COMMIT] [RUN ...]

A run is a folder named WAY-seedN. Its configuration, metrics, local energy and record of the network are kept, its
weights are not. Without runs only the table is written, from what is there: one line a way, its errors by seed, mean
and standard deviation, the local energy (mean over seeds), and the difference to SGD with Welch's 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from wideflat.presets import preset

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # whose tables go into documents in the same way
from machine import into_document

RESULTS = Path(__file__).parent.parent / "results"
FILES = ("config.json", "metrics.jsonl", "local_energy.json", "model.json")
#: Ways to train, in the order of the table, and what they are called.
WAYS = {
    "sgd": "SGD",
    "rsgd": "rSGD",
    "esgd": "eSGD",
    "rsgdxy": "rSGD x y",
    "sgd-3e-4": "SGD, weight decay 3e-4",
    "esgd-3e-4": "eSGD, weight decay 3e-4",
    "rsgd-coded": "rSGD as coded",
    "rsgd-one": "rSGD from one start",
    "rsgd-fork": "rSGD from a fork",
    "sgd-5e-4": "SGD, weight decay 5e-4",
    "sgd-pixels": "SGD, the program's normalisation",
    "sgd-dropout": "SGD, dropout 0.5",
}


@dataclass(frozen=True)
class Found:
    """What one training ended with, in percent."""

    test_error: float
    train_error: float
    energies: dict[float, float]


def collect(run: Path, folder: Path, commit: str | None) -> None:
    """Copy what is kept of a run; where it was trained is left out."""
    about = json.loads((run / "model.json").read_text())["about"]
    if about["epoch"] != json.loads((run / "config.json").read_text())["experiment"]["epochs"]:
        raise ValueError(f"{run} is at epoch {about['epoch']}: not finished")
    target = folder / run.name
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(run / name, target / name)
    lines = [json.loads(line) for line in (run / "environment.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**line, "host": "", "commit": line["commit"] or commit}) + "\n" for line in lines)
    (target / "environment.jsonl").write_text(text)


def found_in(folder: Path) -> dict[str, list[Found]]:
    """The trainings of each way, by seed."""
    ways: dict[str, list[Found]] = {}
    for run in sorted(folder.iterdir()):
        name = re.fullmatch(r"(.+)-seed\d+", run.name)
        if name is not None:
            about = json.loads((run / "model.json").read_text())["about"]
            profile = json.loads((run / "local_energy.json").read_text())
            energies = {s: 100 * e for s, e in zip(profile["sigmas"], profile["mean"], strict=True)}
            ways.setdefault(name[1], []).append(Found(100 * about["test_error"], 100 * about["train_error"], energies))
    return {way: ways[way] for way in sorted(ways, key=list(WAYS).index)}


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """Of the means, with its 95 % interval where both have a spread."""
    mean = np.mean(values) - np.mean(others)
    if min(len(values), len(others)) < 2:
        return f"{mean:+.2f}"
    interval = stats.ttest_ind(values, others, equal_var=False).confidence_interval(0.95)
    return f"{mean:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"


def table(folder: Path, row: str) -> str:
    """The lines of the table."""
    ways = found_in(folder)
    sigmas = list(next(iter(ways.values()))[0].energies)
    lines = [
        f"| | paper | test error %, by seed | mean ± sd | minus SGD | training error % | "
        f"δE % at σ {', '.join(f'{sigma:g}' for sigma in sigmas)} |",
        "|---|---|---|---|---|---|---|",
    ]
    baseline = [found.test_error for found in ways["sgd"]]
    for way, trainings in ways.items():
        errors = [found.test_error for found in trainings]
        cell = preset(row, way) if way in ("sgd", "rsgd", "esgd", "rsgdxy") else None
        paper = "" if cell is None else f"{cell.paper_error:.1f} ± {cell.paper_spread:.1f}"
        spread = f" ± {np.std(errors, ddof=1):.2f}" if len(errors) > 1 else ""
        energies = ", ".join(f"{np.mean([found.energies[sigma] for found in trainings]):.2f}" for sigma in sigmas)
        by_seed = ", ".join(f"{error:.2f}" for error in errors)
        lines.append(
            f"| {WAYS[way]} | {paper} | {by_seed} | {np.mean(errors):.2f}{spread} | "
            f"{'' if way == 'sgd' else difference(errors, baseline)} | "
            f"{np.mean([found.train_error for found in trainings]):.2f} | {energies} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Collect, then write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--commit", help="of runs whose environment does not know it")
    parser.add_argument("--name", default="table1-original", help="folder in results/, and name of the table")
    parser.add_argument("--row", default="cifar10-smallconvnet", help="row of Table 1")
    options = parser.parse_args()
    folder = RESULTS / options.name
    for run in options.runs:
        collect(run, folder, options.commit)
    into_document(RESULTS / "table1.md", options.name, table(folder, options.row))


if __name__ == "__main__":
    main()
