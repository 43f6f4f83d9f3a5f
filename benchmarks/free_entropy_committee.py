"""The free entropy of committee machines, 9 x 784 on real patterns, against the sampler, EP and BP.

    python benchmarks/free_entropy_committee.py             computes what is missing, writes the table of the docs

Two solutions of 100 images of dresses and coats (SGD fast and SGD slow, seed 0), three Delta. The committee is a
network whose output is the median of the fields of its hidden units: positive where the majority votes +1, and with a
gradient. ``measure="error"`` with ``scale="absolute"`` and sigma = sqrt(Delta) is then Eq. 3. Sampler: subset
simulation, its scatter over runs is its error. Every case is appended to docs/free_entropy_committee.csv and never
computed twice.
"""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import torch
from machine import describe, into_document
from torch import Tensor, nn

from wideflat.committee.training import train
from wideflat.data import dress_coat
from wideflat.entropy.measure import local_entropy
from wideflat.volume.free_entropy import free_entropy

CASES = Path(__file__).parent.parent / "docs" / "free_entropy_committee.csv"
SOLUTIONS, DELTAS, PATTERNS = ("sgd-fast", "sgd-slow"), (0.3, 1.0, 3.0), 100
METHODS = ("ep-vector", "ep", "bp")
COLUMNS = ["solution", "delta", "log_z", "stderr", "flags", "distance", "gradients", "seconds", "sample"]
COLUMNS += ["sample_stderr", "sample_distance", *METHODS, "machine"]


class Committee(nn.Module):
    """The median over hidden units of their fields: positive where the majority votes +1."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights)

    def forward(self, x: Tensor) -> Tensor:
        """One number a pattern."""
        return (x @ self.weights.T / math.sqrt(x.shape[1])).median(1).values


def solution(setting: str, x: Tensor, y: Tensor) -> Tensor:
    """Weights without training errors, every hidden unit of norm sqrt N."""
    w = train(setting, x, y, seeds=[0], progress=False).weights[0].float()
    return w * math.sqrt(w.shape[1]) / w.norm(dim=1, keepdim=True)


def done() -> dict[tuple[str, str], dict[str, str]]:
    """The cases that are there."""
    if not CASES.exists():
        return {}
    with CASES.open(newline="") as file:
        return {(row["solution"], row["delta"]): row for row in csv.DictReader(file)}


def compute(name: str, w: Tensor, x: Tensor, y: Tensor, delta: float) -> None:
    """One case, appended."""
    begun = time.process_time()
    point = free_entropy(
        Committee(w.clone()), (x, y), math.sqrt(delta), "error", scale="absolute", progress=False
    ).points[0]
    row: dict[str, object] = {"solution": name, "delta": f"{delta:g}", "seconds": f"{time.process_time() - begun:.0f}"}
    row |= {"log_z": f"{point.log_z:.3f}", "stderr": f"{point.stderr:.3f}", "flags": " ".join(point.flags)}
    row |= {"distance": f"{point.relative_distance:.4f}", "gradients": point.gradients, "machine": describe()}
    judge = local_entropy(w.double(), x.double(), y.double(), [delta], "sample", runs=4)
    row |= {"sample": f"{judge.log_z[0]:.3f}", "sample_stderr": f"{judge.log_z_stderr[0]:.3f}"}
    row["sample_distance"] = f"{judge.relative_distance[0]:.4f}"
    ladder = [d for d in (0.1, 0.3, 1.0) if d < delta] + [delta]
    for method in METHODS:
        curve = local_entropy(w.double(), x.double(), y.double(), ladder, method)
        row[method] = f"{curve.log_z[-1]:.3f}" if curve.converged[-1] else ""
    new = not CASES.exists()
    with CASES.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def table() -> str:
    """Markdown."""
    heads = ["solution", "Delta", "free entropy", "sampler", "apart (errors)", "d*/N, both", "EP-vector", "EP", "BP"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in done().values():
        value, error, judge, spread = (float(row[k]) for k in ("log_z", "stderr", "sample", "sample_stderr"))
        cells = [
            row["solution"],
            row["delta"],
            f"{value:.2f} ± {error:.2f}" + (f" ({row['flags']})" if row["flags"] else ""),
        ]
        cells += [f"{judge:.2f} ± {spread:.2f}", f"{(value - judge) / math.hypot(error, spread):+.1f}"]
        cells += [f"{float(row['distance']):.3f}, {float(row['sample_distance']):.3f}"]
        cells += [f"{float(row[m]):.2f}" if row[m] else "not converged" for m in METHODS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    patterns = dress_coat.load(PATTERNS)
    inputs, targets = torch.as_tensor(patterns.inputs).float(), torch.as_tensor(patterns.targets).float()
    for setting in SOLUTIONS:
        left = [delta for delta in DELTAS if (setting, f"{delta:g}") not in done()]
        if left:
            weights = solution(setting, inputs, targets)
            for delta in left:
                compute(setting, weights, inputs, targets, delta)
    print(table())
    into_document(CASES.with_name("free_entropy.md"), "committee", table())
