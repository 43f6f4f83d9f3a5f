"""How far apart are Belief Propagation, TAP, expectation propagation and sampling? The table of docs/local_entropy.md.

    python benchmarks/entropy_methods.py random                         H in {1, 3, 5, 9}, N in {20, 100, 784}
    python benchmarks/entropy_methods.py real NAME=FILE.npz ...         trained references on real patterns
    python benchmarks/entropy_methods.py table                          the markdown tables

Each case is appended to a file (docs/local_entropy_methods.csv) as soon as it is done and never computed twice, so the
work can be stopped and taken up again, or divided.

The random cases have P = N/2 patterns (at most 100), labelled by the reference itself, a committee of random weights.
Correlated patterns agree with a common one on a random 80% of the inputs and are random on the rest: their overlap is
0.64 in the mean, as that of the images. Delta = 0.5.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from pathlib import Path

import numpy as np
import torch
from machine import describe

from wideflat.entropy.measure import local_entropy
from wideflat.files import atomic_write

CASES = Path(__file__).parent.parent / "docs" / "local_entropy_methods.csv"
COLUMNS = ["case", "kind", "hidden", "inputs", "patterns", "delta", "bp", "tap", "ep", "ep-vector"]
COLUMNS += ["sample", "stderr", "not_converged", "seconds", "particles", "runs", "sweeps", "machine"]
PASSED = ("bp", "tap", "ep", "ep-vector")
MACHINE = describe()  # at the start: the commit of the code that runs, whatever is checked out later


def random_case(hidden: int, num_inputs: int, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights (H, N), inputs (P, N) and targets (P,)."""
    generator = torch.Generator().manual_seed(seed)
    patterns = min(num_inputs // 2, 100)
    x = torch.rand(patterns, num_inputs, generator=generator) < 0.5
    if kind == "correlated":
        common = torch.rand(num_inputs, generator=generator) < 0.5
        x = torch.where(torch.rand(patterns, num_inputs, generator=generator) < 0.8, common, x)
    x = torch.where(x, 1.0, -1.0).double()
    w = torch.randn(hidden, num_inputs, dtype=torch.float64, generator=generator)
    return w, x, (w @ x.T).sign().sum(0).sign()


def done(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(row["case"], row["delta"]): row for row in csv.DictReader(file)}


def compute(
    path: Path,
    case: str,
    kind: str,
    problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    delta: float,
    particles: int,
    runs: int,
    sweeps: int,
) -> None:
    if (case, f"{delta:g}") in done(path):
        return
    w, x, y = problem
    deltas = [d for d in (0.01, 0.03, 0.1, 0.3, 1.0) if d < delta] + [delta]
    passed = {method: local_entropy(w, x, y, deltas, method) for method in PASSED}
    start = time.perf_counter()
    judge = local_entropy(w, x, y, [delta], "sample", particles=particles, runs=runs, sweeps=sweeps)
    row = {"case": case, "kind": kind, "hidden": f"{w.shape[0]}", "inputs": f"{w.shape[1]}"}
    row |= {"patterns": f"{len(x)}", "delta": f"{delta:g}"}
    row |= {method: f"{curve.log_z[-1]:.4f}" for method, curve in passed.items()}
    row |= {"sample": f"{judge.log_z[0]:.4f}", "stderr": f"{judge.log_z_stderr[0]:.4f}"}
    row |= {"not_converged": " ".join(method for method, curve in passed.items() if not curve.converged[-1])}
    row |= {"seconds": f"{time.perf_counter() - start:.0f}", "machine": MACHINE}
    row |= {"particles": f"{particles}", "runs": f"{runs}", "sweeps": f"{sweeps}"}
    rows = [*done(path).values(), row]
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print({name: row[name] for name in COLUMNS[:13]}, flush=True)


def table(path: Path) -> None:
    rows = list(done(path).values())
    for title, kinds in (("Random patterns", ("independent", "correlated")), ("Real patterns", ("real",))):
        chosen = [row for row in rows if row["kind"] in kinds]
        if kinds == ("real",):
            chosen.sort(key=lambda row: (row["case"], float(row["delta"])))
        else:
            chosen.sort(key=lambda row: (kinds.index(row["kind"]), int(row["hidden"]), int(row["inputs"])))
        if not chosen:
            continue
        print(f"\n{title}, log Z:\n")
        heads = ["patterns", "H", "N", "P", "Delta", "sampler", "rBP", "TAP", "EP", "EP-vector"]
        heads += ["rBP / sampler", "EP / sampler", "EP-vector / sampler"]
        print(f"| {' | '.join(heads)} |")
        print("|---" * len(heads) + "|")
        for r in chosen:
            name = r["case"] if r["kind"] == "real" else r["kind"]
            sampled = float(r["sample"])
            failed = r["not_converged"].split()
            good = [method for method in PASSED if method not in failed]
            size = f"{r['hidden']} | {r['inputs']} | {r['patterns']} | {r['delta']}"
            digits = 2 if abs(sampled) > 0.5 else 4
            values = " | ".join(f"{float(r[m]):.{digits}f}" if m in good else "not converged" for m in PASSED)
            ratios = " | ".join(f"{float(r[m]) / sampled:.2f}" if m in good else "" for m in ("bp", "ep", "ep-vector"))
            print(f"| {name} | {size} | {sampled:.{digits}f} ± {float(r['stderr']):.{digits}f} | {values} | {ratios} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["random", "real", "table"], nargs="?", default="table")
    parser.add_argument("files", nargs="*", help="for real: NAME=FILE.npz with weights, inputs, targets")
    parser.add_argument("--file", type=Path, default=CASES, help="the cases that are done")
    parser.add_argument("--deltas", type=float, nargs="+", default=[0.1, 1.0, 3.0], help="for real")
    parser.add_argument("--reference", type=int, default=0, help="for real: which of the references without errors")
    parser.add_argument("--particles", type=int, default=256)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--sweeps", type=int, default=30)
    options = parser.parse_intermixed_args()
    sampling = (options.particles, options.runs, options.sweeps)
    if options.what == "table":
        table(options.file)
    elif options.what == "random":
        for kind, hidden, num_inputs in itertools.product(("independent", "correlated"), (1, 3, 5, 9), (20, 100, 784)):
            problem = random_case(hidden, num_inputs, kind, seed=hidden)
            compute(options.file, f"{kind} H={hidden} N={num_inputs}", kind, problem, 0.5, *sampling)
    else:
        for name, path in (entry.split("=", 1) for entry in options.files):
            with np.load(path, allow_pickle=False) as file:
                w, x, y = (torch.from_numpy(file[key]).double() for key in ("weights", "inputs", "targets"))
            solved = ((y * (w @ x.T).sign().sum(1)) > 0).all(1).nonzero().squeeze(1)
            if len(solved) <= options.reference:
                raise SystemExit(f"{path} has {len(solved)} references without training errors")
            for delta in options.deltas:
                compute(options.file, name, "real", (w[solved[options.reference]], x, y), delta, *sampling)


if __name__ == "__main__":
    main()
