r"""Curvature of the loss at the weights: largest eigenvalues and trace of the Hessian.

With noise of scale a (:mod:`wideflat.noise.scales`; w by default) the loss grows, to second order in sigma, by

.. code-block:: text

    E_z[ L(w + sigma a z) ] - L(w) = (sigma^2 / 2) tr(diag(a) H diag(a)) + O(sigma^4),          H = d^2 L / dw^2

so the trace of the scaled Hessian diag(a) H diag(a) is the curvature of the local-energy profile of the loss at
sigma = 0, and its largest eigenvalue is that of the worst direction. ``scale="absolute"`` gives those of H itself.

Eigenvalues are found by Lanczos iteration with full reorthogonalisation, the trace by Hutchinson's estimator with its
standard error over probes. Both need only products of the Hessian with vectors, which torch's double backward gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.checks import number, whole
from wideflat.energy.opening import opened
from wideflat.energy.profile import LocalEnergy, check_sigmas
from wideflat.evaluation.evaluation import Forward, Metric
from wideflat.evaluation.selection import Selection
from wideflat.hessian.lanczos import lanczos
from wideflat.hessian.products import Hessian
from wideflat.noise.scales import Scale, Scales
from wideflat.progress import Progress
from wideflat.saved import Saved
from wideflat.seeds import as_seed

__all__ = ["Curvature", "curvature"]


@dataclass(repr=False)
class Curvature(Saved):
    """Largest eigenvalues and trace of the Hessian, with the conventions under which they were computed.

    Attributes:
        eigenvalues: The largest ones, in falling order.
        residuals: |H v - lambda v| of each, an upper bound of its error.
        trace: Estimate of the trace.
        trace_stderr: Its standard error over probes; 0 if it is exact.
        baseline: The loss.
        conventions: As in :class:`wideflat.LocalEnergy`.
    """

    _WHAT = "curvature file"
    _NAN = True
    _ARRAYS = ("eigenvalues", "residuals")

    eigenvalues: np.ndarray
    residuals: np.ndarray
    trace: float
    trace_stderr: float
    baseline: float
    conventions: dict[str, Any] = field(default_factory=dict)

    def local_energy(self, sigmas: Sequence[float] | Tensor | np.ndarray) -> LocalEnergy:
        """The local-energy profile of the loss, for noise of the same scale, to second order: (sigma^2 / 2) trace."""
        sigma = check_sigmas(sigmas)
        found = {**self.conventions, "measure": "local energy", "noise": "second order"}
        return LocalEnergy(
            sigma, sigma**2 / 2 * self.trace, sigma**2 / 2 * self.trace_stderr, self.baseline, conventions=found
        )

    def _columns(self) -> dict[str, list[Any]]:
        return {"eigenvalue": self.eigenvalues.tolist(), "residual": self.residuals.tolist()}

    def _remarks(self) -> list[str]:
        return str(self).splitlines()[1:]

    def __str__(self) -> str:
        values = ", ".join(f"{value:.4g}" for value in self.eigenvalues)
        lines = [f"eigenvalues {values}", f"trace {self.trace:.4g} +- {self.trace_stderr:.2g}"]
        return "\n".join([*lines, f"loss {self.baseline:.4g}", *self.conventions.get("notes", [])])


def curvature(
    model: nn.Module,
    data: Any,
    *,
    top: int = 5,
    probes: int = 32,
    scale: Scale = "relative",
    metric: Metric = "loss",
    batch_norm: Literal["eval", "batch"] = "eval",
    parameters: Selection = "all",
    tolerance: float = 1e-3,
    max_iterations: int = 100,
    seed: int = 0,
    progress: bool = True,
    batch_size: int | None = None,
    forward: Forward | None = None,
) -> Curvature:
    """Largest eigenvalues and trace of the Hessian of the mean loss over the data.

    Args:
        model: Any network; it is left as it was found.
        data: See :func:`wideflat.local_energy`.
        top: Number of eigenvalues.
        probes: Random vectors for the trace; 0 for none (the trace is then NaN).
        scale: The a of diag(a) H diag(a): ``"relative"`` (a = w), which goes with the multiplicative noise of Eq. 4,
            ``"absolute"`` for H itself, ``"layer"``, ``"filter"`` or a tensor for each name, as in
            :func:`wideflat.local_energy`.
        metric: ``"loss"`` (cross-entropy; see :mod:`wideflat.evaluation.metrics`) or a differentiable function of
            outputs and targets.
        batch_norm: ``"eval"`` (running statistics) or ``"batch"`` (those of each batch).
        parameters: Which parameters; see :func:`wideflat.evaluation.selection.select_parameters`.
        tolerance: Residual of an eigenvalue, relative to the largest, at which it counts as found.
        max_iterations: Products with the Hessian after which what is found is returned. Each keeps one vector of the
            size of the parameters in memory.
        seed: Of start vector and probes.
        progress: Show progress.
        batch_size: Examples a batch, where batches are made here.
        forward: See :func:`wideflat.local_energy`.

    Example:
        L = (1/2) sum_i h_i w_i^2 has the Hessian diag(h).

        >>> model = nn.Linear(3, 1, bias=False)
        >>> h = torch.tensor([3.0, 2.0, 1.0])
        >>> loss = lambda outputs, targets: 0.5 * (h * model.weight[0] ** 2).sum()
        >>> found = curvature(model, (torch.zeros(1, 3), torch.zeros(1)), top=2, scale="absolute", metric=loss,
        ...                   progress=False)
        >>> found.eigenvalues.round(4).tolist(), round(found.trace, 4)
        ([3.0, 2.0], 6.0)
    """
    top, probes = whole("top", top), whole("probes", probes)
    max_iterations = whole("max_iterations", max_iterations, 1)
    tolerance = number("tolerance", tolerance, above=0)
    if top + probes == 0:
        raise ValueError("top and probes must be not both 0: there is nothing to compute")
    if isinstance(metric, str) and metric == "error":
        raise ValueError('the error has no Hessian: it is a step function; use metric="loss"')
    begun = opened(
        model, data, metric, parameters, batch_norm=batch_norm, forward=forward, batch_size=batch_size, seed=seed
    )
    evaluation, hessian = begun.evaluation, Hessian(begun.evaluation, begun.blocks, begun.names)
    scales = Scales(begun.model, begun.names, scale)
    a = scales.flat()
    generator = torch.Generator().manual_seed(as_seed(seed))

    def product(v: Tensor) -> Tensor:  # (D, k) -> (D, k)
        return a[:, None] * hessian(a[:, None] * v)

    with evaluation.prepared(), Progress("curvature", max_iterations * (top > 0) + probes, enabled=progress) as bar:
        with evaluation.explained():
            baseline = hessian.loss()
        eigenvalues, residuals, _ = lanczos(product, a, top, tolerance, max_iterations, generator, bar)
        trace, stderr = hutchinson(product, a, probes, generator, bar)
    return Curvature(
        eigenvalues,
        residuals,
        trace,
        stderr,
        baseline,
        begun.conventions(
            "curvature",
            scale=scales.name,
            unmoved=scales.unmoved,
            perturbed=scales.size,
            examples=hessian.examples,
            notes=hessian.notes,
        ),
    )


def hutchinson(
    product: Callable[[Tensor], Tensor], like: Tensor, probes: int, generator: torch.Generator, bar: Progress
) -> tuple[float, float]:
    """Trace of a symmetric operator and its standard error, from the mean of v . A v over vectors v of random signs.

    With as many probes as dimensions the trace is computed exactly instead.
    """
    size = like.numel()
    if probes == 0:
        return math.nan, math.nan
    exact = probes >= size
    count = size if exact else probes
    values: list[float] = []
    for start in range(0, count, 8):
        width = min(8, count - start)
        if exact:
            v = torch.eye(size, width, dtype=like.dtype, device=like.device).roll(start, 0)
        else:
            v = (2 * torch.randint(0, 2, (size, width), generator=generator) - 1).to(like)
        values += (v * product(v)).sum(0).tolist()
        bar.advance(width, trace=float(np.mean(values)))
    if exact:
        return float(np.sum(values)), 0.0
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else math.inf
