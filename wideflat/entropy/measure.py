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
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wideflat import interruption
from wideflat.committee.machine import wrong_patterns
from wideflat.entropy.belief_propagation import TAP, Closure, Problem, RelaxedBP, UnreducedBP, sweep
from wideflat.entropy.expectation_propagation import FullCovariance, vector_sites
from wideflat.entropy.sampling import sample_log_z
from wideflat.files import atomic_write
from wideflat.progress import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["METHODS", "Interrupted", "LocalEntropy", "legendre", "local_entropy", "training_errors"]

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

#: References in one computation: more would not be faster and need more memory.
_CHUNK = 64


class Interrupted(interruption.Interrupted):
    """Ctrl-C during ``local_entropy``: ``curve`` has the points finished until then (None if there are none)."""

    def __init__(self, curve: LocalEntropy | None) -> None:
        super().__init__("interrupted; the error's .curve holds the points that were finished")
        self.curve = curve


@dataclass
class LocalEntropy:
    r"""The curve Phi(w, d) of one or several references.

    Arrays have the shape (points,), or (references, points) where several references were given.

    Attributes:
        deltas: Variances of the Gaussian around the reference, shape (points,).
        distance: d* = E \|w' - w\|^2 / 2 with hidden units of norm sqrt N.
        phi: The normalised local entropy Phi(w, d*).
        log_z: log Z(Delta).
        phi_stderr: Standard error of phi: zero unless sampled.
        log_z_stderr: Standard error of log_z: zero unless sampled.
        residual: Of the undamped message passing at each point (zero if sampled).
        iterations: Evaluations of the channel (moves of a particle if sampled).
        converged: Whether the point can be relied on. The values of those that cannot are kept, but never drawn.
        training_errors: Patterns the reference itself gets wrong, a number or shape (references,).
        on_errors: What was done about these: "keep" (Z counts solutions of all patterns, so Phi does not go to 0) or
            "drop" (the reference's wrong patterns are no constraints, which flatters it).
        num_weights: D = H N.
        method: "bp", "tap", "ep", "ep-vector" (whose distance is that of "ep") or "sample".
        others: The curves of the other methods, where these were compared.
    """

    deltas: Tensor
    distance: Tensor
    phi: Tensor
    log_z: Tensor
    phi_stderr: Tensor
    log_z_stderr: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor
    training_errors: Tensor
    on_errors: str
    num_weights: int
    method: str
    others: dict[str, LocalEntropy] = field(default_factory=dict)

    @property
    def relative_distance(self) -> Tensor:
        """d/D = E |w' - w|^2 / (2 |w|^2): free of the scale of the weights. Noise sigma is at d/D = sigma^2/2."""
        return self.distance / self.num_weights

    @property
    def status(self) -> np.ndarray:
        """A word for each point: "converged", "sampled", "not converged", or "not computed" after an interruption."""
        good = "sampled" if self.method == "sample" else "converged"
        bad = np.where(self.iterations.numpy() > 0, "not converged", "not computed")
        return np.where(self.converged.numpy(), good, bad)

    def at(self, relative_distance: float | Sequence[float]) -> Tensor:
        """Phi at given d/D, between the converged points on both sides; NaN outside them.

        Phi is interpolated linearly in log d. The last dimension of the result is that of the argument (none for a
        number).
        """
        wanted = np.atleast_1d(np.asarray(relative_distance, dtype=float))
        rows = []
        for x, y, ok in zip(*(t.reshape(-1, len(self.deltas)).numpy() for t in self._curve()), strict=True):
            x, y = x[ok], y[ok]
            order = np.argsort(x)
            if not len(x):
                rows.append(np.full(len(wanted), np.nan))
                continue
            rows.append(np.interp(np.log(wanted), np.log(x[order]), y[order], left=np.nan, right=np.nan))
        found = torch.tensor(np.stack(rows)).reshape(*self.phi.shape[:-1], len(wanted))
        return found[..., 0] if np.ndim(relative_distance) == 0 else found

    def _curve(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.relative_distance, self.phi, self.converged

    def plot(self, ax: Axes | None = None, **style: Any) -> Axes:
        """Draw Phi over d/D, and return the axes. Points that did not converge are left out.

        Several references are drawn thin, with their mean over those that converged. Samples have error bars.

        Args:
            ax: Axes to draw in; new ones if None.
            style: For ``Axes.plot``: ``label``, ``color`` and so on.
        """
        import matplotlib.pyplot as plt

        if ax is None:
            ax = plt.figure().add_subplot()
        x, y, ok = (t.reshape(-1, len(self.deltas)).numpy() for t in self._curve())
        x, y = np.where(ok, x, np.nan), np.where(ok, y, np.nan)
        error = self.phi_stderr.reshape(y.shape).numpy()
        if len(y) == 1:
            style.setdefault("marker", "o")
            style.setdefault("markersize", 3)
            (line,) = ax.plot(x[0], y[0], **style)
        else:
            some = ok.any(0)
            mean_x, mean_y = np.nanmean(x[:, some], 0), np.nanmean(y[:, some], 0)
            (line,) = ax.plot(mean_x, mean_y, **style)
            ax.plot(x.T, y.T, color=line.get_color(), linewidth=0.5, alpha=0.4)
        if self.method == "sample":
            for x_row, y_row, error_row in zip(x, y, error, strict=True):
                ax.errorbar(x_row, y_row, error_row, color=line.get_color(), linestyle="none", capsize=2)
        ax.set_xscale("log")
        ax.set_xlabel("d / D")
        ax.set_ylabel("Φ(w, d)")
        return ax

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the curve to ``path`` in NumPy's .npz format, whole or not at all."""
        arrays = {}
        for curve in (self, *self.others.values()):
            prefix = "" if curve is self else f"{curve.method}/"
            arrays.update({prefix + name: np.asarray(getattr(curve, name)) for name in _saved()})
        with atomic_write(path, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, kind=np.array(_KIND), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LocalEntropy:
        """Read a curve written by ``save``. Nothing in the file is executed."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                if not isinstance(archive, np.lib.npyio.NpzFile) or str(archive.get("kind")) != _KIND:
                    raise ValueError(f"{path} is not a curve written by LocalEntropy.save()")
                found = {name: archive[name] for name in archive.files}
                curve = cls._from_arrays(found, "")
                others = [name.removesuffix("/phi") for name in found if name.endswith("/phi")]
                curve.others = {name: cls._from_arrays(found, f"{name}/") for name in others}
                return curve
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            raise ValueError(f"{path} is damaged and cannot be read ({error}): compute it again") from error

    @classmethod
    def _from_arrays(cls, found: dict[str, np.ndarray], prefix: str) -> LocalEntropy:
        words: dict[str, Any] = {"on_errors": str, "num_weights": int, "method": str}
        values = {name: words.get(name, torch.from_numpy)(found[prefix + name]) for name in _saved()}
        return cls(**values)

    def __str__(self) -> str:
        """A table, one line for each point (the mean over the references that converged)."""
        rows = [f"{'Delta':>8}  {'d/D':>8}  {'log Z':>12}  {'Phi':>12}  {'residual':>9}  {'iterations':>10}  status"]
        ok = self.converged.reshape(-1, len(self.deltas))
        columns = [
            getattr(self, name).reshape(ok.shape).double()
            for name in ("relative_distance", "log_z", "phi", "residual", "iterations", "log_z_stderr", "phi_stderr")
        ]
        for k, delta in enumerate(self.deltas.tolist()):
            good = ok[:, k]
            count = int(good.sum())
            words = self.status.reshape(ok.shape)[:, k]
            if not count:  # "not converged" if that is so of any, else "not computed"
                rows.append(f"{delta:8.4g}  {'':8}  {'':12}  {'':12}  {'':9}  {'':10}  {max(words)}")
                continue
            d, log_z, phi, _, iterations, log_z_error, phi_error = (c[good, k].mean().item() for c in columns)
            status = str(words[good.numpy()][0])
            if self.method == "sample":
                residual_text, status = "", f"{status}, log Z +- {log_z_error:.2g}, Phi +- {phi_error:.1g}"
            else:
                residual_text = f"{columns[3][good, k].max().item():.1e}"
            if len(ok) > 1:
                status += f" ({count} of {len(ok)})"
            rows.append(
                f"{delta:8.4g}  {d:8.4f}  {log_z:12.5f}  {phi:12.4e}  {residual_text:>9}  {iterations:10.0f}  {status}"
            )
        return "\n".join(rows)


_KIND = "wideflat local entropy"


def _saved() -> list[str]:
    """The names of the fields that are arrays or words."""
    return [f.name for f in fields(LocalEntropy) if f.name != "others"]


def legendre(log_z: Tensor, distance: Tensor, delta: float | Tensor, num_weights: int) -> Tensor:
    """Phi(d*) = log Z / D + (r - 1 - log r)/2 with r = 2 d* / (D Delta).

    Example:
        Without constraints log Z = 0 and d* = D Delta / 2, so Phi = 0:

        >>> legendre(torch.tensor(0.0), torch.tensor(5.0), delta=0.1, num_weights=100).item()
        0.0
    """
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
        targets: +1 or -1, shape (P,).
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
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    if on_errors not in ("keep", "drop"):
        raise ValueError(f'on_errors must be "keep" or "drop", got {on_errors!r}')
    wrong = training_errors(weights, inputs, targets)
    problem = Problem.of(weights, inputs, targets, keep=~wrong if on_errors == "drop" and bool(wrong.any()) else None)
    sampling = {"particles": particles, "runs": runs, "sweeps": sweeps, "seed": seed}
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
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    weights = torch.as_tensor(weights).detach().to(dtype)
    inputs = torch.as_tensor(inputs).detach().to(weights)
    targets = torch.as_tensor(targets).detach().to(weights)
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
    grid = DELTAS if deltas is None else tuple(float(delta) for delta in deltas)
    if not grid:
        raise ValueError("deltas must have at least one value, got none")
    if any(not (math.isfinite(delta) and delta > 0) for delta in grid):
        raise ValueError(f"deltas must be positive and finite, got {list(grid)}")
    if any(b <= a for a, b in itertools.pairwise(grid)):
        raise ValueError(f"deltas must grow, since each point starts from the one before; got {list(grid)}")
    return list(grid)
