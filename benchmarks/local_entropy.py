"""Local entropy by BP: wideflat.local_entropy against a plain NumPy transcription of the reduced form, in one run.

    python benchmarks/local_entropy.py [--solutions FILE] [--restarts 50] [--transcribed 1]

The references are restarts of "SGD fast" on the embedded Dress-vs-Coat patterns (H = 9, N = 784, P = 500), trained here
unless a file of solutions is given. A curve has 13 values of Delta up to 3. The transcription computes one reference at
a time: two matrix products and the channel (scipy's log_ndtr, NumPy's logaddexp) an iteration, warm-started over Delta,
with a ladder of damping factors where it does not converge; it is run for one reference (or more), and the time of 50
is 50 times the mean.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from machine import describe, peak_flops
from scipy.special import log_ndtr

from wideflat.committee import SETTINGS, train
from wideflat.data import dress_coat
from wideflat.entropy.belief_propagation import Problem, RelaxedBP
from wideflat.entropy.fixed_point import Iteration, accelerate
from wideflat.entropy.measure import DELTAS, local_entropy

LADDER = (0.5, 0.8, 0.9, 0.95, 0.97, 0.985, 0.993)


def references(path: Path | None, restarts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if path is not None:
        with np.load(path, allow_pickle=False) as file:
            w, x, y = (torch.from_numpy(file[name]).double() for name in ("weights", "inputs", "targets"))
        return w[:restarts], x, y
    patterns = dress_coat.load(500)
    solutions = train(SETTINGS["sgd-fast"], patterns.inputs, patterns.targets, seeds=range(restarts))
    return solutions.weights.double(), patterns.inputs.double(), patterns.targets.double()


class Transcription:
    """The reduced form of relaxed BP as one would write it down, for one reference."""

    def __init__(self, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        self.num_inputs = w.shape[1]
        self.w = w * np.sqrt(self.num_inputs) / np.linalg.norm(w, axis=1, keepdims=True)
        self.x, self.y = x, y
        self.iterations = 0

    def channel(self, omega: np.ndarray, V: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log Z_out, g and G, all in log space."""
        hidden, patterns = omega.shape
        m = (hidden - 1) // 2
        u = self.y * omega / np.sqrt(V)
        p, q = log_ndtr(u), log_ndtr(-u)
        prefix = np.full((hidden + 1, hidden + 2, patterns), -np.inf)  # [h, k + 1]: k right votes among the first h
        suffix = np.full((hidden + 1, hidden + 2, patterns), -np.inf)
        prefix[0, 1] = suffix[hidden, 1] = 0
        for h in range(hidden):
            prefix[h + 1, 1:] = np.logaddexp(prefix[h, 1:] + q[h], prefix[h, :-1] + p[h])
        for h in reversed(range(hidden)):
            suffix[h, 1:] = np.logaddexp(suffix[h + 1, 1:] + q[h], suffix[h + 1, :-1] + p[h])
        log_z = np.logaddexp.reduce(prefix[hidden, m + 2 :], axis=0)
        lose = np.logaddexp.reduce(prefix[hidden, 1 : m + 2], axis=0)
        log_z = np.where(lose < -0.7, np.log1p(-np.exp(np.minimum(lose, -0.7))), log_z)
        pivotal = [np.logaddexp.reduce(prefix[h, 1 : m + 2] + suffix[h + 1, m + 1 : 0 : -1]) for h in range(hidden)]
        g = self.y * np.exp(-(u**2) / 2 - 0.5 * np.log(2 * np.pi) + np.stack(pivotal) - log_z) / np.sqrt(V)
        return log_z, g, g * (g + omega / V)

    def iterate(self, delta, g, v, V, Delta):  # type: ignore[no-untyped-def] # the four arrays of the notation
        """One undamped step of delta, g, v and V."""
        self.iterations += 1
        N, root = self.num_inputs, np.sqrt(self.num_inputs)
        omega = (self.w + delta) @ self.x.T / root - V * g
        log_z, g_new, G = self.channel(omega, V)
        A = (G / N) / (1 - V * G / N)
        v_new = 1 / np.maximum(1 / Delta + A.sum(1, keepdims=True), 1e-6)
        V_new = 1 / np.maximum(1 / v_new - A, 1e-6)
        delta_new = v_new * (g_new @ self.x / root + (1 / v_new - 1 / Delta) * delta)
        return delta_new, g_new, v_new, V_new, log_z

    @np.errstate(all="ignore")
    def curve(self, deltas: tuple[float, ...], budget: float, tolerance: float = 1e-6) -> np.ndarray:
        """Log Z at each Delta (NaN where the ladder ends without convergence, or after ``budget`` seconds)."""
        start = time.perf_counter()
        hidden, patterns = len(self.w), len(self.x)
        delta, g = np.zeros_like(self.w), np.zeros((hidden, patterns))
        v, V = np.ones((hidden, 1)), np.ones((hidden, patterns))
        last, found = 1.0, []
        for Delta in deltas:
            v, V, last = v * Delta / last, V * Delta / last, Delta
            converged, before = False, (delta, g, v, V)
            for damping in LADDER:
                for _ in range(int(60 / (1 - damping))):
                    if time.perf_counter() - start > budget:
                        return np.array(found + [np.nan] * (len(deltas) - len(found)))
                    delta_new, g_new, v_new, V_new, log_z = self.iterate(delta, g, v, V, Delta)
                    residual = max(np.abs(g_new - g).max() * np.sqrt(Delta), np.abs(np.log(V_new / V)).max())
                    if not residual < 1e3:  # it diverges: from the last Delta again, with more damping
                        delta, g, v, V = before
                        break
                    if residual < tolerance:
                        converged = True
                        break
                    delta = damping * delta + (1 - damping) * delta_new
                    g = damping * g + (1 - damping) * g_new
                    v, V = v**damping * v_new ** (1 - damping), V**damping * V_new ** (1 - damping)
                if converged:
                    break
            found.append(self.bethe(delta, g, v, V, Delta, log_z) if converged else np.nan)
        return np.array(found)

    def bethe(self, delta, g, v, V, Delta, log_z):  # type: ignore[no-untyped-def] # as above
        """The Bethe free entropy."""
        N = self.num_inputs
        zeta, square = delta @ self.x.T / np.sqrt(N), (delta**2).sum(1, keepdims=True)
        weights = (N / 2 * np.log(v / Delta) + square / (2 * v)).sum()
        edges = (N * np.log(v / V) + square * (1 / v - 1 / V) + 2 * g * zeta - V * g**2).sum() / 2
        return weights + log_z.sum() - edges


def timed(function, *arguments, repeats: int = 1):  # type: ignore[no-untyped-def] # any function
    best, result = float("inf"), None
    for _ in range(repeats):
        start = time.perf_counter()
        result = function(*arguments)
        best = min(best, time.perf_counter() - start)
    return best, result


def per_iteration(problem: Problem, count: int) -> float:
    """Seconds of one accelerated iteration (map, preconditioner, Anderson step) of all references."""

    def work(iterations: int) -> None:
        g, V = torch.zeros_like(problem.kappa), torch.ones_like(problem.kappa)
        counter = torch.zeros(problem.kappa.shape[1], dtype=torch.long)
        accelerate(Iteration(problem, RelaxedBP(problem.num_inputs), 1.0, 0.0, iterations), g, V, counter)

    work(2)
    return timed(work, count, repeats=3)[0] / count


def flops(hidden: int, patterns: int, leading: int, window: int = 10) -> dict[str, float]:
    """Multiplications and additions of one iteration of one reference, by part."""
    units = hidden * patterns
    return {
        "Gram product": 2 * units * patterns,
        "preconditioner": 2 * units * leading**2 + 4 * units * leading,
        "Anderson": 2 * 2 * units * (window**2 + 3 * window),
        "vote tables": units * 3 * 3 * ((hidden + 1) / 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solutions", type=Path, help=".npz with weights, inputs, targets; trained here if left out")
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--transcribed", type=int, default=1, help="references the transcription is run for")
    parser.add_argument("--budget", type=float, default=240, help="seconds after which the transcription is stopped")
    options = parser.parse_args()
    print(describe())
    w, x, y = references(options.solutions, options.restarts)
    restarts, hidden, num_inputs = w.shape
    print(f"{restarts} references, H = {hidden}, N = {num_inputs}, P = {len(x)}; Delta = {DELTAS}")

    local_entropy(w[:1], x, y, deltas=DELTAS[:2])  # warm up
    one, _ = timed(lambda: [local_entropy(w[r], x, y) for r in range(options.transcribed)], repeats=2)
    one /= options.transcribed
    many, curves = timed(local_entropy, w, x, y, repeats=2)
    rough, rough_curves = timed(lambda: local_entropy(w, x, y, dtype=torch.float32), repeats=2)
    print(f"converged: {int(curves.converged.sum())} of {curves.converged.numel()} points")
    print(f"iterations a curve: {curves.iterations.sum(-1).double().mean():.0f} (tolerance 1e-8)")
    worst = (rough_curves.log_z - curves.log_z).abs().max()
    print(f"float32: {int(rough_curves.converged.sum())} converged, log Z off by at most {worst:.1e}")

    times, iterations = [], []
    for r in range(options.transcribed):
        plain = Transcription(w[r].numpy(), x.numpy(), y.numpy())
        seconds, log_z = timed(plain.curve, DELTAS, options.budget)
        times.append(seconds)
        iterations.append(plain.iterations)
        difference = np.nanmax(np.abs(log_z - curves.log_z[r].numpy()), initial=0)
        print(
            f"transcription {r}: {seconds:.1f} s, {plain.iterations} iterations (tolerance 1e-6), "
            f"{np.isfinite(log_z).sum()} of {len(log_z)} points converged, log Z differs by at most {difference:.1e}",
            flush=True,
        )
    plain_curve, plain_iteration = float(np.mean(times)), sum(times) / sum(iterations)

    problem = Problem.of(w, x, y)
    single = per_iteration(problem.select(torch.tensor([0])), 50)
    batch = per_iteration(problem, 10)
    operations = flops(hidden, len(x), len(problem.eigenvalues))
    total = sum(operations.values())
    peak = peak_flops(torch.float64)
    rows = [
        ("one iteration, one reference", plain_iteration, single),
        (f"one iteration, {restarts} references", restarts * plain_iteration, batch),
        ("one curve", plain_curve, one),
        (f"{restarts} curves", restarts * plain_curve, many),
        (f"{restarts} curves, float32", restarts * plain_curve, rough),
    ]
    if max(times) >= options.budget:
        print("the transcription was stopped before its end: the ratios of curves are lower bounds")
    print(f"\n{'':34}{'transcription':>15}{'wideflat':>12}{'ratio':>8}")
    for name, plain_time, ours in rows:
        print(f"{name:34}{plain_time:13.4g} s{ours:10.4g} s{plain_time / ours:7.1f}x")
    print("\nfloating-point operations of an iteration and reference: ", end="")
    print(", ".join(f"{name} {value / 1e6:.2f}M" for name, value in operations.items()))
    print(f"peak (float64 matrix product): {peak / 1e9:.1f} Gflop/s")
    print(
        f"fraction of peak: one reference {total / single / peak:.1%}, {restarts} {restarts * total / batch / peak:.1%}"
    )


if __name__ == "__main__":
    main()
