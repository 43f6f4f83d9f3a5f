"""What the benchmarks run on: a description for beside the numbers, and the measured peak of floating-point work."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch


def describe() -> str:
    """One line: processor, threads, torch version, commit."""
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, commit {_commit()}"


def peak_flops(
    dtype: torch.dtype = torch.float32,
    size: int = 2048,
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The highest rate of a square matrix product seen here, in floating-point operations a second."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    out = a @ b
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        torch.mm(a, b, out=out)
        best = min(best, clock() - start)
    return 2 * size**3 / best


def into_document(path: Path, name: str, text: str) -> None:
    """Put a table into a document, between its lines ``<!-- name -->`` and ``<!-- end of name -->``."""
    first, last = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(first)
    _, closed, after = rest.partition(last)
    if not found or not closed:
        raise ValueError(f"{path} has no place for a table named {name!r}")
    path.write_text(f"{before}{first}{text}{last}{after}", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    print(describe())
    for dtype in (torch.float32, torch.float64):
        print(f"peak {dtype}: {peak_flops(dtype) / 1e9:.0f} Gflop/s")
