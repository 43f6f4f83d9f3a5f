r"""Sampling the volume of the solutions around a reference: the judge of Belief Propagation and its relatives.

Z(Delta) is the probability that the weights w' = w + sqrt(Delta) xi, xi standard normal, classify every pattern right.
It may be e^-100, so it is built up from conditional probabilities of ordinary size (subset simulation): with

.. code-block:: text

    margin_mu = median over h of y_mu w'_h . x_mu / sqrt N        (positive: the majority is right)
    E(w')     = sum_mu max(0, -margin_mu) / sqrt(Delta)           (0: every pattern is right)

and levels t_1 > t_2 > ... > 0, Z = P(E <= t_1) P(E <= t_2 | E <= t_1) ... P(E = 0 | E <= t_last). A population of
particles goes from level to level: those below the next level are counted, resampled to the full number, and moved by
Crank-Nicolson steps xi <- cos(theta) xi + sin(theta) noise, refused where they leave the level. The steps keep the
Gaussian exactly, so no dimension is too high for them.

A first run chooses the levels (half of the particles pass each) and the angles theta. Its estimate is discarded; the
runs that count are given both, so each of them estimates Z without bias, and they are independent: their scatter is the
error. The scatter of a few runs may be small by chance, so the error is never stated smaller than what it would be if
all particles were independent: each level, passed by half of n particles in all runs, adds 1/n to the variance of log
Z, and there are -log Z / log 2 of them. The weights enter through the fields on the patterns only; the part of xi that
no pattern sees is integrated exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wideflat.progress import Progress

__all__ = ["Sample", "sample_log_z"]


@dataclass
class Sample:
    r"""What the sampler found at one Delta for one reference.

    Attributes:
        log_z: Logarithm of the mean of Z over the runs.
        log_z_stderr: Its standard error, from the scatter of the runs (jackknife), at least that of independent
            particles.
        distance: d* = E \|w' - w\|^2 / 2 over the solutions.
        distance_stderr: Its standard error.
        runs: log Z of each run, shape (runs,).
        levels: How many levels there were.
        acceptance: The smallest acceptance of the moves over all levels.
        steps: Moves of one particle, summed over the levels and the runs.
    """

    log_z: float
    log_z_stderr: float
    distance: float
    distance_stderr: float
    runs: Tensor
    levels: int
    acceptance: float
    steps: int


class _Landscape:
    """E(w') of one reference at one Delta, and the moves that keep the Gaussian."""

    def __init__(
        self, kappa: Tensor, root: Tensor, target: Tensor, keep: Tensor | None, delta: float, generator: torch.Generator
    ) -> None:
        # everything in units of sqrt(Delta), so that the fields are kappa + xi root^T
        sign = target if keep is None else target * keep
        self.kappa = kappa / math.sqrt(delta) * sign
        self.root = root * sign.unsqueeze(-1)
        self.kept = None if keep is None else keep.to(kappa.dtype)
        self.hidden = kappa.shape[0]
        self.generator = generator

    def noise(self, particles: int) -> tuple[Tensor, Tensor]:
        """Standard normal xi (particles, H, rank) and its fields, times the target, without kappa (particles, H, P)."""
        xi = torch.randn(
            particles,
            self.hidden,
            self.root.shape[1],
            dtype=self.root.dtype,
            device=self.root.device,
            generator=self.generator,
        )
        return xi, xi @ self.root.T

    def energy(self, field: Tensor) -> Tensor:
        """E of each particle, shape (particles,)."""
        margin = _median((field + self.kappa).unbind(1))
        # a margin of exactly zero is no majority: it must not count as solved
        violation = torch.where(margin > 0, 0, (-margin).clamp(min=torch.finfo(margin.dtype).tiny))
        return violation.sum(-1) if self.kept is None else (violation * self.kept).sum(-1)

    def move(self, xi: Tensor, field: Tensor, energy: Tensor, level: float, theta: float) -> tuple[Tensor, float]:
        """One Crank-Nicolson step of all particles, in place; the new energies and the share of accepted steps."""
        c, s = math.cos(theta), math.sin(theta)
        xi_new, field_new = self.noise(len(xi))
        torch.add(c * xi, xi_new, alpha=s, out=xi_new)
        torch.add(c * field, field_new, alpha=s, out=field_new)
        energy_new = self.energy(field_new)
        accept = energy_new <= level
        xi[accept], field[accept] = xi_new[accept], field_new[accept]
        return torch.where(accept, energy_new, energy), accept.double().mean().item()


def sample_log_z(
    kappa: Tensor,
    gram: Tensor,
    target: Tensor,
    num_inputs: int,
    delta: float,
    keep: Tensor | None = None,
    particles: int = 256,
    runs: int = 6,
    sweeps: int = 30,
    seed: int = 0,
    progress: Progress | None = None,
) -> Sample:
    """Estimate log Z(Delta) of one reference by subset simulation, with its error.

    Args:
        kappa: Pre-activations w x / sqrt N of the reference (units of norm sqrt N), shape (H, P).
        gram: Overlaps x x^T / N of the patterns, shape (P, P).
        target: +1 or -1, shape (P,).
        num_inputs: N.
        delta: Variance of the Gaussian around the reference.
        keep: Which patterns are constraints, shape (P,); None for all.
        particles: Size of the population of each run.
        runs: Independent runs that count, at least 2; one more chooses the levels.
        sweeps: Moves of every particle at each level.
        seed: Seed of the random numbers.
        progress: Advanced by 1 for each run.

    Example:
        One unit and one pattern: Z = Phi(kappa / sqrt(Delta)) = Phi(-1) = 0.1587.

        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> found = sample_log_z(-one, one, one[0], num_inputs=50, delta=1.0, particles=2000, runs=4)
        >>> abs(found.log_z - math.log(0.1587)) < 4 * found.log_z_stderr
        True
    """
    if runs < 2:
        raise ValueError(f"runs must be >= 2, since their scatter is the error, got {runs}")
    if particles < 10:
        raise ValueError(f"particles must be >= 10, got {particles}")
    if sweeps < 1:
        raise ValueError(f"sweeps must be >= 1, since particles that do not move stay copies, got {sweeps}")
    values, vectors = torch.linalg.eigh(gram.double())
    rank = values > 1e-10 * values[-1]
    root = (vectors[:, rank] * values[rank].sqrt()).float()
    generator = torch.Generator(device=kappa.device).manual_seed(seed)
    landscape = _Landscape(kappa.float(), root, target.float(), keep, delta, generator)
    plan, _, _, acceptance = _run(landscape, particles, sweeps, None)
    if progress is not None:
        progress.advance()
    logs, squares = [], []
    for _ in range(runs):
        _, log_z, square, _ = _run(landscape, particles, sweeps, plan)
        logs.append(log_z)
        squares.append(square)
        if progress is not None:
            progress.advance()
    z, stderr = _log_mean(torch.tensor(logs, dtype=torch.float64))
    stderr = max(stderr, math.sqrt(max(-z, 0.0) / (math.log(2) * particles * runs)))
    norms = torch.tensor(squares, dtype=torch.float64)
    norms = norms[~norms.isnan()]
    unseen = landscape.hidden * (num_inputs - root.shape[1])
    return Sample(
        log_z=z,
        log_z_stderr=stderr,
        distance=0.5 * delta * (norms.mean().item() + unseen),
        distance_stderr=0.5 * delta * (norms.std() / math.sqrt(len(norms))).item() if len(norms) > 1 else math.inf,
        runs=torch.tensor(logs, dtype=torch.float64),
        levels=len(plan),
        acceptance=acceptance,
        steps=len(plan) * sweeps * particles * (runs + 1),
    )


def _run(
    landscape: _Landscape, particles: int, sweeps: int, plan: list[tuple[float, float]] | None
) -> tuple[list[tuple[float, float]], float, float, float]:
    """One population through all levels: the plan of (level, theta), log Z, mean of |xi|^2 at the end, acceptance.

    Without a plan the levels and angles are chosen on the way, with it they are as given.
    """
    chosen: list[tuple[float, float]] = []
    xi, field = landscape.noise(particles)
    energy = landscape.energy(field)
    log_z, level, theta, smallest = 0.0, math.inf, 0.5, 1.0
    while level > 0:
        if plan is None:
            level = energy.median().item()
        else:
            level, theta = plan[len(chosen)]
        below = (energy <= level).nonzero().squeeze(1)
        if len(below) == 0:  # this population has died out: Z = 0 is its honest, unbiased estimate
            return chosen, -math.inf, math.nan, 0.0
        log_z += math.log(len(below) / particles)
        pick = below[torch.randint(len(below), (particles,), generator=landscape.generator, device=below.device)]
        pick[: len(below)] = below  # every survivor once, then copies
        xi, energy = xi[pick], energy[pick]
        field = xi @ landscape.root.T  # afresh, so that rounding does not add up
        rates = []
        for sweep in range(sweeps):
            energy, rate = landscape.move(xi, field, energy, level, theta)
            if plan is None:  # towards an acceptance of 0.3, more gently as the level goes on
                theta = min(max(theta * math.exp((rate - 0.3) / (1 + 0.1 * sweep)), 1e-4), 0.5 * math.pi)
            rates.append(rate)
        smallest = min(smallest, sum(rates[sweeps // 2 :]) / max(len(rates[sweeps // 2 :]), 1))
        chosen.append((level, theta))
    return chosen, log_z, xi.square().sum((1, 2)).double().mean().item(), smallest


def _median(values: tuple[Tensor, ...]) -> Tensor:
    """Elementwise median of an odd number of tensors: the largest (H + 1)/2 are carried to the end, pass by pass."""
    kept = list(values)
    for done in range((len(kept) + 1) // 2):
        for i in range(len(values) - 1 - done):
            kept[i], kept[i + 1] = torch.minimum(kept[i], kept[i + 1]), torch.maximum(kept[i], kept[i + 1])
    return kept[len(values) // 2]


def _log_mean(logs: Tensor) -> tuple[float, float]:
    """Logarithm of the mean of exp(logs), and its standard error by leaving out one at a time."""
    count = len(logs)
    if bool((logs == -math.inf).all()):
        return -math.inf, math.inf
    total = (torch.logsumexp(logs, 0) - math.log(count)).item()
    left_out = torch.stack([torch.cat([logs[:i], logs[i + 1 :]]).logsumexp(0) for i in range(count)]) - math.log(
        count - 1
    )
    finite = left_out.isfinite()
    if not finite.all():
        return total, math.inf
    return total, math.sqrt((count - 1) / count * (left_out - left_out.mean()).square().sum().item())
