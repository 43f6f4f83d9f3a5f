"""Do the intervals of the free entropy hold what they say? The table of docs/free_entropy.md.

    python benchmarks/free_entropy_coverage.py closed --runs 208            fresh instances with a closed form
    python benchmarks/free_entropy_coverage.py closed --runs 100 --chains 4
    python benchmarks/free_entropy_coverage.py traps --runs 40              where chains may agree by chance, and others
    python benchmarks/free_entropy_coverage.py networks --runs 20           an MLP and a transformer, against long runs
    python benchmarks/free_entropy_coverage.py table                        the table alone, also into the document

Every run is appended to a file (docs/free_entropy_coverage.csv, docs/free_entropy_traps.csv) as soon as it is done and
never computed twice, so the work can be stopped and taken up again, or divided. The instances come from seeds that no
threshold was chosen on.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, into_document
from torch import nn
from torch.nn import functional as F

from wideflat.volume.free_entropy import free_entropy
from wideflat.volume.volume import Integration
from wideflat.volume.walks import Effort, Walk

ROOT = Path(__file__).parent.parent
CASES, TRAPS = (ROOT / "docs" / f"free_entropy_{name}.csv" for name in ("coverage", "traps"))
COLUMNS = ["family", "chains", "seed", "exact", "exact_stderr", "log_z", "stderr", "dof", "low68", "high68", "low95"]
COLUMNS += ["high95", "gap", "flags", "gradients", "seconds", "machine"]
FIRST_SEED = 500_000  # fresh: the tests and every choice of a threshold used other numbers
FIRST_TRAP = 700_000  # since the descents: before their thresholds were chosen the traps were looked at up to here


def closed_forms() -> Any:
    """The families of the tests."""
    path = ROOT / "tests" / "volume" / "closed_forms.py"
    spec = importlib.util.spec_from_file_location("closed_forms", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(path: Path = CASES) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(
    family: str,
    chains: int,
    seed: int,
    exact: float,
    error: float,
    found: Integration,
    begun: float,
    path: Path = CASES,
) -> None:
    new = not path.exists()
    low68, high68 = found.interval(0.68)
    low95, high95 = found.interval(0.95)
    values = [family, chains, seed, exact, error, found.log_z, found.stderr, found.dof, low68, high68, low95, high95]
    values = [f"{value:.6g}" if isinstance(value, float) else value for value in values]
    values += [
        f"{found.gap:.4g}",
        " ".join(found.flags),
        found.gradients,
        f"{time.process_time() - begun:.2f}",
        MACHINE,
    ]
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(values)


def closed(options: argparse.Namespace) -> None:
    forms = closed_forms()
    walk({**forms.FAMILIES, "solutions": forms.hard}, options, CASES)


def traps(options: argparse.Namespace) -> None:
    """Families in which a few chains may agree by chance, and other forms, which must not be refused for it."""
    forms = closed_forms()
    others = {
        "funnel": lambda rng: forms.funnel(rng, rng.uniform(1, 5), rng.uniform(0, 45)),
        "heavy tail": lambda rng: forms.heavy_tail(rng, rng.uniform(1, 4)),
        "stiff directions": lambda rng: forms.stiff_directions(rng, 10 ** rng.uniform(2, 4)),
    }
    every = {**{f"trap: {name}": make for name, make in forms.TRAPS.items()}, **forms.OTHERS, **others}
    walk(every, options, TRAPS, FIRST_TRAP)


def walk(
    families: dict[str, Callable[..., Any]], options: argparse.Namespace, path: Path, first: int = FIRST_SEED
) -> None:
    """So many instances of each family, those that are not in the file yet."""
    begun, known = time.monotonic(), {(row["family"], row["chains"], row["seed"]) for row in rows(path)}
    for k in range(options.runs):
        for family, make in families.items():
            if options.only not in family:
                continue
            # others for another number of chains: its rows are independent
            seed = first + 1000 * options.chains + k
            if (family, str(options.chains), str(seed)) in known:
                continue
            if time.monotonic() - begun > 60 * options.minutes:
                return
            energy, start = make(np.random.default_rng([seed, len(family)])), time.process_time()
            effort = Effort(chains=options.chains, seed=seed)
            found = Walk(energy, 1.0, energy.beta, effort, energy.solutions).run()
            append(family, options.chains, seed, energy.exact, 0.0, found, start, path)


class Transformer(nn.Module):
    """One block of attention on short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of three classes."""
        return self.head(self.block(self.embed(x)).mean(1))


def networks() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], float]]:
    """Trained networks, their data, and a sigma at which they have to be walked around."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 8), torch.randint(3, (60,))
    x = x + 1.5 * torch.randn(3, 8)[y]
    tokens = torch.randint(8, (60, 4))
    found = {}
    for name, model, data, sigma in (
        ("MLP", nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)), (x, y), 1.5),
        ("transformer", Transformer(), (tokens, tokens.sum(1) % 3), 0.3),
    ):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(300):
            optimizer.zero_grad()
            F.cross_entropy(model(data[0]), data[1]).backward()
            optimizer.step()
        found[name] = model.eval(), data, sigma
    return found


def real(runs: int, chains: int, minutes: float, only: str) -> None:
    """Short runs against one that is ten times as long."""
    begun = time.monotonic()
    known = rows()
    for name, (model, data, sigma) in networks().items():
        if only not in name:
            continue
        truth = next((row for row in known if row["family"] == f"{name}, long"), None)
        if truth is None:
            start = time.process_time()
            long = free_entropy(model, data, sigma, samples=180, burn=48, seed=1, progress=False).points[0]
            append(f"{name}, long", 2, 1, math.nan, math.nan, long, start)
            exact, error = long.log_z, long.stderr
        else:
            exact, error = float(truth["log_z"]), float(truth["stderr"])
        for k in range(runs):
            seed = FIRST_SEED + 1000 * chains + k
            if any((row["family"], row["chains"], row["seed"]) == (name, str(chains), str(seed)) for row in known):
                continue
            if time.monotonic() - begun > 60 * minutes:
                return
            start = time.process_time()
            found = free_entropy(model, data, sigma, chains=chains, seed=seed, progress=False).points[0]
            append(name, chains, seed, exact, error, found, start)


def table(path: Path = CASES) -> str:
    """Coverage, scatter and stated errors a family and number of chains."""
    groups: dict[tuple[str, int], list[dict[str, str]]] = {}
    for row in rows(path):
        if not row["family"].endswith(", long"):
            groups.setdefault((row["family"], int(row["chains"])), []).append(row)
    header = ["family", "chains", "runs, accepted", "interval(0.68)", "interval(0.95)", "beyond 3", "scatter, stderr"]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for (family, chains), group in sorted(groups.items()):
        passed = [row for row in group if not row["flags"]]
        number = lambda name, among=passed: np.array([float(row[name]) for row in among])  # noqa: E731
        exact, log_z, stderr = number("exact"), number("log_z"), number("stderr")
        inside = [np.mean((number(f"low{p}") <= exact) & (exact <= number(f"high{p}"))) for p in (68, 95)]
        # what is taken for the truth has an error too
        far = int((np.abs(log_z - exact) > 3 * np.hypot(stderr, number("exact_stderr"))).sum())
        scatter, median = np.sqrt(np.mean((log_z - exact) ** 2)), np.median(stderr)
        cells = [
            family,
            chains,
            f"{len(group)}, {len(passed) / len(group):.3f}",
            f"{inside[0]:.3f}",
            f"{inside[1]:.3f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} | {far} | {scatter:.2f}, {median:.2f} |")
    return "\n".join(lines)


def trap_table() -> str:
    """How many runs are accepted, and how many of those are wrong."""
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows(TRAPS):
        name = row["family"] if row["family"].startswith("trap: ") else "other forms"
        groups.setdefault(name.removeprefix("trap: "), []).append(row)
    lines = ["| | runs | accepted | interval(0.95) | beyond 2.5 | beyond 3 | worst |", "|" + "---|" * 7]
    for name, group in groups.items():
        passed = [row for row in group if not row["flags"]]
        inside = sum(float(row["low95"]) <= float(row["exact"]) <= float(row["high95"]) for row in passed)
        far = [abs(float(row["log_z"]) - float(row["exact"])) / float(row["stderr"]) for row in passed]
        beyond = [sum(d > limit for d in far) for limit in (2.5, 3)]
        cells = [name, len(group), len(passed), f"{inside} of {len(passed)}", *beyond]
        lines.append(f"| {' | '.join(map(str, cells))} | {f'{max(far):.1f}' if far else '-'} |")
    return "\n".join(lines)


MACHINE = describe()  # at the start: the commit of the code that runs, whatever is checked out later

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["closed", "traps", "networks", "table"], nargs="?", default="table")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "closed":
        closed(options)
    elif options.what == "traps":
        traps(options)
    elif options.what == "networks":
        real(options.runs, options.chains, options.minutes, options.only)
    for mark, text in (("coverage", table()), ("traps", trap_table())):
        print(text, end="\n\n")
        into_document(ROOT / "docs" / "free_entropy.md", mark, text)
