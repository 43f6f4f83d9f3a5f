"""The update of EntropySGD in two versions of wideflat, which take turns: what one costs in units of the other.

    git archive COMMIT | tar -x -C OLD
    python benchmarks/against.py OLD [NEW] [--rounds 11] [--busy]
        about two minutes; with CC=nonexistent-cc without a compiler; --busy: one thread and its processor time, for a
        machine that others use as well

OLD and NEW are source trees (NEW is this one by default). Each runs in a process of its own; in every round each takes
its calls, in turn, so that a machine that slows down between rounds does not show. A ratio is the median (and the
quartiles) over rounds of the time of NEW against that of OLD in the same round. Nesterov momentum 0.9 and weight decay
1e-4.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe

CALLS = {"ResNet-18": 10, "SmallConvNet": 50, "tiny tensors": 100}
KINDS = {"torch's SGD (foreach)": None, "EntropySGD, epsilon = 0": 0.0, "EntropySGD, with noise": 1e-4}
TINY = 1e-9


def work(clock: Callable[[], float]) -> None:
    """Read the numbers of a network, of an optimizer and of calls, line by line; answer with the seconds of a call."""
    from optimizers import SETTINGS, tiny_tensors, with_gradients

    import wideflat
    from wideflat.models import resnet18, smallconvnet

    networks = (lambda: resnet18(num_classes=10), lambda: smallconvnet(num_classes=10), tiny_tensors)
    settings = SETTINGS["Nesterov 0.9, weight decay 1e-4"]
    steps = {}
    for line in sys.stdin:
        network, kind, calls = map(int, line.split())
        if (network, kind) not in steps:
            params, epsilon = with_gradients(networks[network]()), list(KINDS.values())[kind]
            if epsilon is None:
                opt: torch.optim.Optimizer = torch.optim.SGD(params, lr=TINY, foreach=True, **settings)
            else:
                opt = wideflat.EntropySGD(params, lr=TINY, inner_lr=TINY, epsilon=epsilon, **settings)
            steps[network, kind] = opt.step
        step = steps[network, kind]
        for _ in range(5):
            step()
        start = clock()
        for _ in range(calls):
            step()
        print((clock() - start) / calls, flush=True)


def ask(worker: subprocess.Popen[str], *numbers: int) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(" ".join(map(str, numbers)) + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="OLD, and NEW if it is not this one")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--busy", action="store_true", help="one thread, and its processor time instead of the clock")
    options = parser.parse_args()
    if options.busy:
        torch.set_num_threads(1)
    if options.worker:
        work(time.process_time if options.busy else time.perf_counter)
        return
    old, new = (*options.trees, Path(__file__).parents[1])[:2]
    command = [sys.executable, __file__, "--worker", *(["--busy"] * options.busy)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(tree.resolve())}, **pipes) for tree in (old, new)
    ]
    print(describe() + (", processor time" if options.busy else ""))
    print("| | OLD | NEW | NEW / OLD | quartiles |\n|---|---|---|---|---|")
    for network, (name, calls) in enumerate(CALLS.items()):
        for kind, title in enumerate(KINDS):
            times: list[list[float]] = [[], []]
            for turn in range(options.rounds + 1):
                for which in (0, 1) if turn % 2 else (1, 0):
                    times[which].append(ask(workers[which], network, kind, calls))
            before, now = times[0][1:], times[1][1:]
            low, middle, high = statistics.quantiles([b / a for a, b in zip(before, now, strict=True)], n=4)
            spent = " | ".join(f"{1e3 * statistics.median(each):.3f} ms" for each in (before, now))
            print(f"| {name}, {title} | {spent} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)
    for worker in workers:
        worker.communicate()


if __name__ == "__main__":
    main()
