r"""The free entropy of any network around its weights: an absolute volume of good weights, with a stated error.

.. code-block:: text

    w'(xi) = w + sigma a xi,    xi ~ N(0, 1)                a: the scale, |w| by default as in Eq. 4
    V(xi)  = sum_i [ l_i(w'(xi)) - l_i(w) ]                 n examples
    log Z(beta, sigma) = log E_xi exp(-beta V(xi))          beta = 1: the evidence of the prior N(w, sigma^2 a^2)

It is found by thermodynamic integration (:mod:`wideflat.volume.temperatures`) over chains of Hamiltonian Monte Carlo
(:mod:`wideflat.volume.gaussian_hmc`) that come from both sides (:mod:`wideflat.volume.walks`), and refused where they
have not come to equilibrium (:mod:`wideflat.volume.integration`).

Eq. 1 of the paper, whose beta_p multiplies the mean loss, is beta_p = n beta, gamma = 1/(beta_p sigma^2), a = 1:
L_LE(w) = L(w) - log Z/(n beta) + a constant. Eq. 3 is ``measure="error"``: log Z is then the logarithm of the
probability that every example is right.

What is computed is the volume that can be reached, by cooling from the Gaussian or by walking out of w. A well that is
neither at w nor met by cooling is seen by nothing here.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wideflat import interruption
from wideflat.checks import choice, number, numbers_of, whole
from wideflat.checks import network as checked_network
from wideflat.checks.records import location, reading
from wideflat.distributed.whole import whole_network
from wideflat.evaluation.evaluation import Forward, Metric
from wideflat.evaluation.selection import Selection
from wideflat.files import atomic_write, must_not_swell
from wideflat.kernels.float64 import doubled
from wideflat.noise.scales import Scale
from wideflat.progress import Progress
from wideflat.seeds import derive_seed
from wideflat.volume.fixed_data import FixedData
from wideflat.volume.gaussian_hmc import LONGEST_STEP, normal
from wideflat.volume.network_energy import Network, NetworkEnergy, block_size
from wideflat.volume.temperatures import Grid
from wideflat.volume.volume import Integration
from wideflat.volume.volumes import FreeEntropy
from wideflat.volume.walks import Effort, Walk, first_trajectories

__all__ = ["Interrupted", "free_entropy"]

#: The inverse temperature from which solutions are counted, and the share of them below which it is doubled.
SOLUTION_BETA, LEAST_SHARE = 8.0, 0.15
#: Draws from which the units of the margins are taken.
MARGIN_DRAWS = 16
#: Most leapfrog steps of a trajectory: the margins' V has kinks, which the steps have to be short for.
MOST_STEPS, MOST_STEPS_AT_KINKS = 100, 250
#: Seconds between two writings of a checkpoint.
SAVE_EVERY = 60.0


class Interrupted(interruption.Interrupted):
    """Ctrl-C during ``free_entropy``: ``result`` has the sigmas finished until then (None if there are none)."""

    def __init__(self, result: FreeEntropy | None, checkpoint: Path | None) -> None:
        kept = f"; called again with checkpoint={str(checkpoint)!r} it goes on from here" if checkpoint else ""
        super().__init__(f"interrupted; the error's .result holds the sigmas that were finished{kept}")
        self.result = result


class _OutOfTime(Exception):
    """The minutes are over."""


def free_entropy(
    model: nn.Module,
    data: Any,
    sigmas: float | Sequence[float] | Tensor | np.ndarray,
    measure: Metric = "loss",
    beta: float = 1.0,
    scale: Scale = "relative",
    parameters: Selection = "all",
    chains: int = 2,
    samples: int = 18,
    seed: int = 0,
    target_stderr: float | None = None,
    quick: bool = False,
    progress: bool = True,
    *,
    burn: int = 12,
    points: int = 128,
    subset: int | None = None,
    subset_seed: int = 0,
    batch_size: int | None = None,
    forward: Forward | None = None,
    batch_norm: str = "eval",
    on_errors: str = "refuse",
    solution_beta: float | None = None,
    minutes: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> FreeEntropy:
    r"""Log Z(beta, sigma) = log E exp(-beta sum_i [l_i(w + sigma a xi) - l_i(w)]) around the weights of a network.

    Args:
        model: Any network, evaluated in eval mode; weights, buffers, modes and random states are as before afterwards.
        data: The training data as :func:`wideflat.local_energy` takes them. They are read once and kept in memory.
        sigmas: Strengths of the noise.
        measure: ``"loss"`` (cross-entropy), a function of outputs and targets that gives one differentiable value an
            example, or ``"error"``: the logarithm of the probability that every example is right (Eq. 3).
        beta: Inverse temperature of the sum of losses; ``"error"`` has none.
        scale: What the noise is proportional to: ``"relative"`` each weight, as in Eq. 4 (weights that are 0 do not
            move), ``"absolute"`` nothing, ``"layer"`` the root mean square of its tensor, ``"filter"`` that of its
            output channel, or a tensor for each name; see :mod:`wideflat.noise.scales`.
        parameters: Which parameters move; see :func:`~wideflat.noise.shared_noise.select_parameters`.
        chains: In each of the two directions.
        samples: Trajectories kept at each of the 4, 6 or 8 temperatures.
        seed: Of everything random.
        target_stderr: Go on until the standard error is below this.
        quick: The bracket -beta <V>_0 <= log Z <= -beta <V>_beta alone, at a tenth of the cost.
        progress: Say what it will cost, and show how far it is.
        burn: Trajectories before those that are kept.
        points: Independent points, from which the integration starts.
        subset: So many of the examples, drawn at random. The price grows with the power 1.5 of their number.
        subset_seed: Which of them.
        batch_size: Examples evaluated at once.
        forward: A function of the model and a batch that returns ``(outputs, targets)``.
        batch_norm: ``"eval"``; with other statistics V would be no fixed function.
        on_errors: ``measure="error"`` needs weights without training errors. ``"refuse"`` others, or ``"drop"`` the
            examples that are wrong, which flatters the network; they are counted.
        solution_beta: ``measure="error"``: the inverse temperature at which solutions are counted. Chosen by default;
            the result does not depend on it.
        minutes: Stop after so long; what is finished is returned, and ``complete`` is False.
        checkpoint: A file that keeps what was walked: a call that was interrupted goes on from it, bit for bit.

    Returns:
        ``print`` it, ``plot()`` it, ``compare()`` it, ``save()`` it. Do not use a value that has not ``converged``.

    Raises:
        Interrupted: At Ctrl-C; its ``result`` has the sigmas that were finished.

    Example:
        One weight w = 2 and a squared loss (w' x - y)^2/2 that is smallest at w: V = sigma^2 w^2 xi^2 n/2, so that
        log Z = -log(1 + n sigma^2 w^2)/2.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad(): _ = model.weight.fill_(2.0)
        >>> data = torch.ones(100, 1), torch.full((100,), 2.0)
        >>> squares = lambda outputs, targets: (outputs[:, 0] - targets) ** 2 / 2
        >>> entropy = free_entropy(model, data, 0.1, measure=squares, progress=False)
        >>> bool(abs(entropy.log_z[0] + math.log(1 + 100 * 0.04) / 2) < 4 * entropy.stderr[0]), entropy.converged[0]
        (True, np.True_)
    """
    strengths = _checked_sigmas(sigmas)
    beta = number("beta", beta, above=0)
    seed, subset_seed = (
        whole(name, value, -(2**63), 2**63 - 1) for name, value in (("seed", seed), ("subset_seed", subset_seed))
    )
    model = whole_network(checked_network(model))
    choice("on_errors", on_errors, ("refuse", "drop"))
    if isinstance(measure, str) and measure == "error" and beta != 1.0:
        raise ValueError(
            f'measure="error" counts solutions and has no temperature, got beta={beta}; solution_beta says where they '
            "are counted, which the result does not depend on"
        )
    if solution_beta is not None:
        solution_beta = number("solution_beta", solution_beta, above=0)
    cap = MOST_STEPS_AT_KINKS if isinstance(measure, str) and measure == "error" else MOST_STEPS
    effort = Effort(chains, samples, burn, points, int(seed), cap, target_stderr, quick)
    size = block_size(model) if batch_size is None else whole("batch_size", batch_size, 1)
    fixed = FixedData(data, size, subset, subset_seed)
    network = Network(model, fixed, measure, scale, parameters, forward, batch_norm)
    measurement = _Measurement(network, strengths, beta, effort, on_errors, solution_beta, minutes, progress)
    measurement.conventions |= {"subset": None if subset is None else [subset, subset_seed]}
    return measurement.run(None if checkpoint is None else location("checkpoint", checkpoint))


class _Measurement:
    """One call of :func:`free_entropy`: its walks, one a sigma, its clock and its checkpoint."""

    def __init__(
        self,
        network: Network,
        sigmas: list[float],
        beta: float,
        effort: Effort,
        on_errors: str,
        solution_beta: float | None,
        minutes: float | None,
        progress: bool,
    ) -> None:
        self.network, self.sigmas, self.beta, self.effort = network, sigmas, beta, effort
        self.on_errors, self.solution_beta = on_errors, solution_beta
        self.limit = math.inf if minutes is None else 60 * number("minutes", minutes, 0)
        self.shown = progress
        self.done: dict[str, Integration] = {}
        self.walk: Walk | None = None
        self.before = 0.0  # seconds that the sigma of now took before it was interrupted
        model = network.evaluation.model
        self.conventions: dict[str, Any] = {
            "measure": network.measure,
            "beta": None if network.solutions else beta,
            "scale": network.scale,
            "parameters": network.parameters,
            "perturbed": network.size,
            "unmoved": network.size - network.moving,
            "architecture": f"{type(model).__name__}, {sum(p.numel() for p in model.parameters())} parameters",
            "examples": network.examples,
            "data": network.data.digest,
            **{name: value for name, value in asdict(effort).items() if name != "cap"},
        }

    def run(self, checkpoint: Path | None) -> FreeEntropy:
        """All sigmas, from where the checkpoint is."""
        self.path, self.begun = checkpoint, time.monotonic()
        with self.network.prepared(), Progress("free entropy", enabled=self.shown) as self.bar:
            self.network.check(derive_seed(self.effort.seed, "check"))
            self.kept = self._kept()
            self.conventions["at_w"] = float(doubled(self.network.reference).mean())
            self.key = {**self.conventions, "sigmas": self.sigmas, "weights": self.network.digest}
            self.key["solution_beta"] = self.solution_beta
            waiting = self._read()
            self.saved_at = time.monotonic()
            try:
                for sigma in self.sigmas:
                    if repr(sigma) not in self.done:
                        self._measure(sigma, waiting)
            except KeyboardInterrupt:
                self._write()
                raise Interrupted(self._result() if self.done else None, self.path) from None
            except _OutOfTime:
                self._write()
        return self._result()

    def _result(self) -> FreeEntropy:
        points = [self.done[repr(sigma)] for sigma in self.sigmas if repr(sigma) in self.done]
        return FreeEntropy(points, self.conventions, complete=len(points) == len(self.sigmas))

    def _measure(self, sigma: float, waiting: dict[str, Any] | None) -> None:
        """One sigma, begun anew or gone on with."""
        self.since, self.before = time.monotonic(), 0.0
        energy = self._energy(sigma)
        walk = Walk(energy, sigma, self.beta, self.effort, self.network.solutions, self._tick)
        if waiting is not None and waiting["sigma"] == sigma:
            walk.restore(waiting["walk"])
            self.before = waiting["seconds"]
        self.walk = walk
        walk.forecast = lambda grid: self._forecast(walk, grid)
        self.bar.update(self.bar.completed, sigma=sigma)
        if self.network.solutions:
            walk.beta = self.solution_beta or self._choose_beta(walk)
        found = walk.run()
        found.seconds = self.before + time.monotonic() - self.since
        self.done[repr(sigma)], self.walk = found, None
        self._write()

    # ---- solutions

    def _kept(self) -> Tensor | None:
        """Which examples count for ``measure="error"``: those that are right at the weights."""
        if not self.network.solutions:
            return None
        right = self.network.reference > 0
        wrong = int((~right).sum())
        if wrong and self.on_errors == "refuse":
            raise ValueError(
                f"{wrong} of {len(right)} examples are wrong at the weights themselves, so these are no solution; "
                'on_errors="drop" leaves them out (which flatters the network), measure="loss" needs no solution'
            )
        if wrong == len(right):
            raise ValueError("every example is wrong at the weights: nothing is left to count")
        self.conventions["dropped"] = wrong
        return right

    def _energy(self, sigma: float) -> NetworkEnergy:
        energy = NetworkEnergy(self.network, sigma)
        if self.kept is None:
            return energy
        draws = []
        for i in range(MARGIN_DRAWS):
            generator = torch.Generator().manual_seed(derive_seed(self.effort.seed, "margin", repr(sigma), i))
            draws.append(self.network.values(normal(energy, generator), sigma))
        units = torch.stack(draws).nan_to_num(0.0, 0.0, 0.0).std(0)
        return NetworkEnergy(self.network, sigma, self.kept, torch.where(units > 0, units, 1.0))

    def _choose_beta(self, walk: Walk) -> float:
        """The first of 8, 16, 32, 64 at which a chain meets enough solutions."""
        beta = SOLUTION_BETA
        while beta < 8 * SOLUTION_BETA and walk.share_at(beta) < LEAST_SHARE:
            beta *= 2
        return beta

    # ---- clock and file

    def _tick(self, what: str) -> None:
        self.bar.advance(1 if what == "trajectory" else 0)
        now = time.monotonic()
        if now - self.begun > self.limit:
            raise _OutOfTime
        if self.path is not None and now - self.saved_at > SAVE_EVERY:
            self._write()
            self.saved_at = now

    def _forecast(self, walk: Walk, grid: Grid | None) -> None:
        """Say roughly what this sigma will cost: the curvature along a gradient foretells the steps."""
        trajectories = first_trajectories(self.effort, grid)
        self.bar.total = self.bar.completed + trajectories
        if not self.shown or Progress.silent:
            return
        energy, begun = walk.energy, time.monotonic()
        xi = normal(energy, torch.Generator().manual_seed(0))
        here = energy.gradient(xi)[1]
        length = float(here.norm())
        step = 0.01 * here / length if length > 0 else here
        change = (energy.gradient(xi + step)[1] - here).norm().item()
        seconds = (time.monotonic() - begun) / 2
        betas = [walk.beta] if grid is None else grid.betas[1:].tolist()
        steps = [0.5 + math.sqrt(LONGEST_STEP**-2 + b * max(0.0, change / 0.01)) for b in betas]
        gradients = trajectories * float(np.mean(np.minimum(steps, self.effort.cap)))
        print(
            f"free entropy at sigma = {walk.sigma:g}: {energy.size} weights, {self.network.examples} examples; "
            f"{trajectories} trajectories, roughly {gradients:.2g} gradients of {1e3 * seconds:.3g} ms: "
            f"{_minutes(gradients * seconds)}, give or take a factor of 2",
            file=sys.stderr,
        )

    def _write(self) -> None:
        """The checkpoint, whole or not at all."""
        if self.path is None:
            return
        walk = None
        if self.walk is not None:
            spent = self.before + time.monotonic() - self.since
            walk = {"sigma": self.walk.sigma, "walk": self.walk.saved(), "seconds": spent}
        done = {name: point.to_dict() for name, point in self.done.items()}
        with atomic_write(self.path, "wb") as file:
            torch.save({"kind": _KIND, "key": self.key, "done": done, "walk": walk}, file)

    def _read(self) -> dict[str, Any] | None:
        """What the checkpoint has of a sigma that is not finished."""
        if self.path is None or not self.path.exists():
            return None
        try:
            content = torch.load(must_not_swell(self.path), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged file runs torch into
            raise ValueError(f"{self.path} cannot be read as a checkpoint ({str(error)[:200]!r})") from None
        if not isinstance(content, dict) or content.get("kind") != _KIND:
            raise ValueError(f"{self.path} is not a checkpoint of free_entropy")
        with reading(f"checkpoint of free_entropy, {self.path}"):
            return self._of(content)

    def _of(self, content: dict[str, Any]) -> dict[str, Any] | None:
        other = [name for name in self.key if content["key"].get(name) != self.key[name]]
        if other:
            raise ValueError(
                f"{self.path} is of another measurement ({', '.join(other)} differ); give another file, or remove it"
            )
        self.done = {name: Integration.from_dict(point) for name, point in content["done"].items()}
        walk: dict[str, Any] | None = content["walk"]
        return walk


_KIND = "wideflat checkpoint of the free entropy"


def _checked_sigmas(sigmas: Any) -> list[float]:
    return list(dict.fromkeys(numbers_of("sigmas", sigmas, above=0)))


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
