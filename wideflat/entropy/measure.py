r"""The normalised local entropy Phi(w, d) of a committee machine: how much of a ball around w solves the task (Eq. 3).

For a reference w of D = H N weights (hidden units scaled to norm sqrt N) let Z(Delta) be the probability that w', drawn
from N(w, Delta), classifies every training pattern right. The solutions that dominate Z lie at the distance
d* = E \|w' - w\|^2 / 2, and the Legendre transform of log Z is the logarithm of the fraction of solutions at d*:

.. code-block:: text

    d log Z / d Delta = (d* - D Delta / 2) / Delta^2
    Phi(d*) = log Z / D + (r - 1 - log r) / 2          with r = 2 d* / (D Delta)

Phi <= 0, and Phi -> 0 as d -> 0 around a solution. Along the curve dPhi/dd = (1/Delta - D/(2 d)) / D. The volume of
the ball is taken at its saddle point, as that of the solutions is: the exact one differs by log(pi D)/(2 D), which is
as large as Phi itself at small distances, and the two must not be mixed.

Z is found by one of these methods: relaxed Belief Propagation (``"bp"``, the paper's), its TAP form (``"tap"``),
expectation propagation (``"ep"``), which knows how the patterns overlap, the same corrected for the correlations of
hidden units (``"ep-vector"``), or sampling (``"sample"``), which is exact up to the error it states. The table in
docs/local_entropy.md shows how far they are apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wideflat import interruption
from wideflat.checks import choice, flag, number, numbers_of, real_tensor, shown, whole
from wideflat.checks.doors import asks
from wideflat.checks.records import fitting
from wideflat.committee.machine import wrong_patterns
from wideflat.entropy.belief_propagation import TAP, Closure, Problem, RelaxedBP, UnreducedBP
from wideflat.entropy.curve import LocalEntropy
from wideflat.entropy.expectation_propagation import FullCovariance, vector_sites
from wideflat.entropy.fixed_point import sweep
from wideflat.entropy.sampling import sample_log_z
from wideflat.progress import Progress

__all__ = ["DELTAS", "METHODS", "Interrupted", "legendre", "local_entropy", "training_errors"]

#: The methods, from the paper's to the judge.
METHODS: dict[str, str] = {
    "bp": "relaxed Belief Propagation",
    "tap": "TAP",
    "ep": "expectation propagation",
    "ep-vector": "expectation propagation with vector sites",
    "sample": "sampling",
}

#: Delta = 0.01 to 3 in equal ratios: d/D from 0.005 to 1.5 where the constraints hardly bind.
DELTAS: tuple[float, ...] = tuple(float(f"{0.01 * 300 ** (k / 12):.4g}") for k in range(13))

#: Wider Gaussians are never meant, nor narrower ones.
MOST_DELTA, LEAST_DELTA = 1e6, 1e-30

#: References in one computation: more would not be faster and need more memory.
_CHUNK = 64


class Interrupted(interruption.Interrupted):
    """Ctrl-C during ``local_entropy``: ``curve`` has the points finished until then (None if there are none)."""

    def __init__(self, curve: LocalEntropy | None) -> None:
        super().__init__("interrupted; the error's .curve holds the points that were finished")
        self.curve = curve


@asks
def legendre(log_z: Tensor, distance: Tensor, delta: float | Tensor, num_weights: int) -> Tensor:
    """Phi(d*) = log Z / D + (r - 1 - log r)/2 with r = 2 d* / (D Delta).

    Example:
        Without constraints log Z = 0 and d* = D Delta / 2, so Phi = 0:

        >>> legendre(torch.tensor(0.0), torch.tensor(5.0), delta=0.1, num_weights=100).item()
        0.0
    """
    num_weights = whole("num_weights", num_weights, 1)
    fitting(log_z=log_z, distance=distance, delta=delta)
    r = 2 * distance / (num_weights * delta)
    return log_z / num_weights + (r - 1 - r.log()) / 2


def training_errors(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """Which patterns a committee gets wrong: booleans of shape (..., P) for weights (..., H, N)."""
    return wrong_patterns(weights, inputs, targets)


def local_entropy(
    weights: Tensor,
    inputs: Tensor,
    targets: Tensor,
    deltas: Sequence[float] | Tensor | None = None,
    method: str = "bp",
    *,
    compare: bool = False,
    on_errors: str = "keep",
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    particles: int = 256,
    runs: int = 6,
    sweeps: int = 30,
    seed: int = 0,
    progress: bool = False,
) -> LocalEntropy:
    r"""The normalised local entropy Phi(w, d) of a committee machine around given weights (Eq. 3), as a curve over d.

    Args:
        weights: A reference of shape (H, N) with H odd, or R of them, (R, H, N). The scale of a hidden unit has no
            influence.
        inputs: The patterns, shape (P, N). +-1 is fastest; other numbers are possible.
        targets: +1 or -1, shape (P,). Whatever the device of these, the curve is computed on the CPU: each iteration
            is looked at before the next, and float64 is needed.
        deltas: Variances of the Gaussian around the reference, one for each point of the curve; the points lie near
            d/D = Delta/2. Default: 13 values from 0.01 to 3.
        method: ``"bp"``, ``"tap"``, ``"ep"``, ``"ep-vector"`` or ``"sample"`` (see the head of this module).
        compare: Run the other methods too; their curves are the ``others`` of the result.
        on_errors: References may have training errors. ``"keep"``: count the solutions of all patterns all the same
            (Phi then does not go to 0 at small d). ``"drop"``: the patterns a reference gets wrong are no constraints
            for it; this flatters it. Either way the number of errors is in the result.
        dtype: ``torch.float64``, or ``torch.float32`` for speed where many references are computed. log Z is evaluated
            in float64 at what was found, where it is stationary: in float32 it is good to about 1e-5 relative.
        tolerance: Residual at which a point counts as converged; it enters log Z squared. Unless given 1e-8 (1e-6 for
            ``"ep"`` and for inputs that are not +-1), and 1e-4 in float32.
        particles: Of the sampler: size of a population.
        runs: Of the sampler: how many independent populations give the error.
        sweeps: Of the sampler: moves of each particle at each level.
        seed: Of the sampler.
        progress: Show progress on standard error.

    Returns:
        A ``LocalEntropy``: ``.distance``, ``.phi``, ``.converged``, ``.plot()`` and more.

    Raises:
        Interrupted: At Ctrl-C; its ``curve`` has the points that were finished, the others being "not computed".

    Example:
        One unit, one pattern: Z = Phi(kappa / sqrt(Delta)) with kappa = 1 here.

        >>> x = torch.tensor([[1.0, 1.0, -1.0, 1.0]])
        >>> w = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
        >>> curve = local_entropy(w, x, torch.tensor([1.0]), deltas=[0.5])
        >>> round(curve.log_z.item(), 6), round(torch.special.log_ndtr(torch.tensor(2.0)).item(), 6)
        (-0.023013, -0.023013)
    """
    weights, inputs, targets = _checked(weights, inputs, targets, dtype)
    single = weights.dim() == 2
    if single:
        weights = weights.unsqueeze(0)
    grid = _checked_deltas(deltas)
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {shown(method)}")
    choice("on_errors", on_errors, ("keep", "drop"))
    compare = flag("compare", compare)
    if tolerance is not None:
        tolerance = number("tolerance", tolerance, above=0)
    wrong = training_errors(weights, inputs, targets)
    problem = Problem.of(weights, inputs, targets, keep=~wrong if on_errors == "drop" and bool(wrong.any()) else None)
    counts = {"particles": particles, "runs": runs, "sweeps": sweeps}
    sampling = {name: whole(name, value, 1) for name, value in counts.items()}
    sampling["seed"] = whole("seed", seed, -(2**62), 2**62)
    curves = {}
    interrupted = False
    for name in (method, *(other for other in METHODS if other != method)) if compare else (method,):
        found = _not_computed(len(weights), len(grid))
        try:
            if name == "sample":
                _sample(found, problem, grid, sampling, progress)
            else:
                _pass(found, problem, grid, name, tolerance, progress)
        except KeyboardInterrupt:
            interrupted = True
        if bool((found["iterations"] > 0).any()):
            curves[name] = _curve(found, grid, name, wrong.sum(-1), on_errors, weights[0].numel(), single)
        if interrupted:
            break
    curve = curves.pop(method, None)
    if curve is not None:
        curve.others = curves
    if interrupted:
        raise Interrupted(curve)
    assert curve is not None
    return curve


def _not_computed(references: int, points: int) -> dict[str, Tensor]:
    """The quantities of shape (R, points) that ``_pass`` and ``_sample`` fill point by point, iterations last."""
    unknown = torch.full((references, points), torch.nan, dtype=torch.float64)
    found = {name: unknown.clone() for name in ("log_z", "distance", "log_z_stderr", "distance_stderr", "residual")}
    found["iterations"] = torch.zeros(references, points, dtype=torch.long)
    found["converged"] = torch.zeros(references, points, dtype=torch.bool)
    return found


def _pass(
    found: dict[str, Tensor], problem: Problem, grid: list[float], method: str, tolerance: float | None, show: bool
) -> None:
    """The curve by message passing."""
    closure: Closure
    if method in ("ep", "ep-vector"):
        closure = FullCovariance(problem.gram, problem.num_inputs)
    elif method == "tap":
        closure = TAP(problem.num_inputs, problem.squares)
    elif problem.squares is None:
        closure = RelaxedBP(problem.num_inputs)
    else:
        closure = UnreducedBP(problem.num_inputs, problem.squares)
    index = torch.arange(problem.kappa.shape[1], device=problem.kappa.device)
    chunks = index.split(_CHUNK)
    with Progress(METHODS[method], total=len(grid) * len(chunks), enabled=show) as progress:
        for chunk in chunks:
            part, rows = problem.select(chunk), chunk.cpu()
            for k, point in enumerate(sweep(part, closure, grid, tolerance)):
                if method == "ep-vector":
                    point.log_z = point.log_z + vector_sites(part, point)
                    point.converged = point.converged & point.log_z.isfinite()
                found["log_z_stderr"][rows, k] = found["distance_stderr"][rows, k] = 0
                for name in ("log_z", "distance", "residual", "converged", "iterations"):
                    found[name][rows, k] = getattr(point, name).to(found[name])
                progress.advance(iterations=int(point.iterations.max()))


def _sample(
    found: dict[str, Tensor], problem: Problem, grid: list[float], sampling: dict[str, int], show: bool
) -> None:
    """The curve by sampling."""
    references = problem.kappa.shape[1]
    total = references * len(grid) * (sampling["runs"] + 1)
    with Progress(METHODS["sample"], total=total, enabled=show) as progress:
        for r in range(references):
            keep = None if problem.keep is None else problem.keep[r]
            for k, delta in enumerate(grid):
                options = {**sampling, "seed": sampling["seed"] + 1_000_003 * r + k}
                sample = sample_log_z(
                    problem.kappa[:, r],
                    problem.gram,
                    problem.target,
                    problem.num_inputs,
                    delta,
                    keep,
                    progress=progress,
                    **options,
                )
                for name in ("log_z", "distance", "log_z_stderr", "distance_stderr"):
                    found[name][r, k] = getattr(sample, name)
                found["residual"][r, k] = 0
                found["converged"][r, k] = math.isfinite(sample.log_z) and math.isfinite(sample.log_z_stderr)
                found["iterations"][r, k] = sample.steps


def _curve(
    found: dict[str, Tensor],
    grid: list[float],
    method: str,
    wrong: Tensor,
    on_errors: str,
    num_weights: int,
    single: bool,
) -> LocalEntropy:
    deltas = torch.tensor(grid, dtype=torch.float64)
    log_z, distance = found["log_z"].double(), found["distance"].double()
    phi = legendre(log_z, distance, deltas, num_weights)
    # dPhi = d log Z / D + (1 - 1/r)/2 dr
    r = 2 * distance / (num_weights * deltas)
    slope = (1 - 1 / r) / (num_weights * deltas)
    phi_stderr = ((found["log_z_stderr"] / num_weights).square() + (slope * found["distance_stderr"]).square()).sqrt()
    shaped = (
        (lambda t: t[0]) if single else (lambda t: t)  # one reference has no dimension of references
    )
    return LocalEntropy(
        deltas=deltas,
        distance=shaped(distance),
        phi=shaped(phi),
        log_z=shaped(log_z),
        phi_stderr=shaped(phi_stderr),
        log_z_stderr=shaped(found["log_z_stderr"].double()),
        residual=shaped(found["residual"].double()),
        iterations=shaped(found["iterations"]),
        converged=shaped(found["converged"]),
        training_errors=shaped(wrong.cpu()),
        on_errors=on_errors,
        num_weights=num_weights,
        method=method,
    )


def _checked(weights: Any, inputs: Any, targets: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {shown(dtype)}")
    if isinstance(weights, torch.nn.Module):
        raise TypeError(
            "local_entropy is for committee machines, and takes their weights, a tensor of shape (H, N); for a network "
            f"there is wideflat.free_entropy; got {shown(weights)}"
        )
    weights = real_tensor("weights", weights).detach().cpu().to(dtype)
    inputs = real_tensor("inputs", inputs).detach().to(weights)
    targets = real_tensor("targets", targets).detach().to(weights)
    if weights.dim() not in (2, 3) or 0 in weights.shape:
        raise ValueError(f"weights must have the shape (H, N) or (references, H, N), got {tuple(weights.shape)}")
    if inputs.dim() != 2 or inputs.shape[1] != weights.shape[-1]:
        raise ValueError(
            f"inputs must have the shape (patterns, {weights.shape[-1]}), to go with weights of shape "
            f"{tuple(weights.shape)}; got {tuple(inputs.shape)}"
        )
    if targets.shape != inputs.shape[:1] or not len(targets):
        raise ValueError(
            f"targets must be one number for each of the {len(inputs)} patterns (at least one), got shape "
            f"{tuple(targets.shape)}"
        )
    if not bool((targets.abs() == 1).all()):
        raise ValueError(
            f"targets must be +1 or -1, got {targets[targets.abs() != 1][0].item():g}; map classes to these"
        )
    if weights.shape[-2] % 2 == 0:
        raise ValueError(f"the number of hidden units must be odd, so that no vote is tied; got {weights.shape[-2]}")
    for name, value in (("weights", weights), ("inputs", inputs)):
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} has values that are not finite; drop or repair them first")
    if bool((weights == 0).all(-1).any()):
        raise ValueError("a hidden unit has only zero weights: its direction, which is what counts, is not defined")
    if bool((inputs == 0).all(-1).any()):
        row = int((inputs == 0).all(-1).nonzero()[0])
        raise ValueError(f"pattern {row} has only zero inputs, so nothing can classify it; leave it out")
    return weights, inputs, targets


def _checked_deltas(deltas: Sequence[float] | Tensor | None) -> list[float]:
    grid = DELTAS if deltas is None else tuple(numbers_of("deltas", deltas, above=0))
    if grid[0] < LEAST_DELTA:
        raise ValueError(f"deltas must be at least {LEAST_DELTA:g}, got {grid[0]:g}: nothing is as near")
    if grid[-1] > MOST_DELTA:
        raise ValueError(
            f"deltas must be at most {MOST_DELTA:g}, got {grid[-1]:g}: so wide a Gaussian forgets its center"
        )
    if any(b <= a for a, b in itertools.pairwise(grid)):
        raise ValueError(f"deltas must grow, since each point starts from the one before; got {list(grid)}")
    return list(grid)
