r"""Pictures of the loss around the weights: E(w + x d_1 + y d_2) - E(w) on a line or a grid, with error bars over data.

.. code-block:: text

    "random"         d = z |w| / |z|,  z ~ N(0, I)
    "filter"         d = a z,  a = root mean square of the output channel of w (wideflat.noise.scales)
    "eigenvectors"   d = v |w|,  v the unit eigenvectors of the largest eigenvalues of the Hessian of the loss
    networks         d = w' - w: x = 1 is the other network

A picture shows two directions of very many. What it shows with ``"random"`` and ``"filter"`` is close to the local
energy (averages over all directions, with error bars over them); with eigenvectors it is the steepest there is.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.checks import choice, numbers_of, shown, whole
from wideflat.checks.options import check_fields
from wideflat.checks.records import reading
from wideflat.distributed.whole import whole_tensors
from wideflat.energy.opening import Opened, opened
from wideflat.evaluation.blocks import Blocks
from wideflat.evaluation.evaluation import Evaluation, Forward, Metric
from wideflat.evaluation.selection import Selection
from wideflat.files import atomic_write
from wideflat.hessian.lanczos import lanczos
from wideflat.hessian.products import Hessian
from wideflat.kernels.float64 import fetched, squared_length
from wideflat.landscape.plane import Plane
from wideflat.noise.scales import Scales
from wideflat.noise.shared_noise import unwritten
from wideflat.notebook import axes_or_new
from wideflat.progress import Progress
from wideflat.saved import Saved
from wideflat.seeds import derive_seed

__all__ = ["Slice", "slices"]

_WORDS = ("random", "filter", "eigenvectors")


@dataclass(repr=False)
class Slice(Saved):
    """The metric on a line or a grid through the weights.

    Attributes:
        positions: Along each direction, shape (P,).
        mean: E there less E(w), shape (P,) or (P, P): the first axis belongs to the first direction.
        stderr: Standard error of each over data, of differences of the same examples.
        baseline: E(w).
        baseline_stderr: Its standard error over data.
        lengths: Of each direction, |d|.
        conventions: As in :class:`wideflat.LocalEnergy`.
    """

    positions: np.ndarray
    mean: np.ndarray
    stderr: np.ndarray
    baseline: float
    baseline_stderr: float
    lengths: np.ndarray
    conventions: dict[str, Any] = field(default_factory=dict)

    _WHAT = "slice"
    _NAN = True
    _ARRAYS = ("positions", "mean", "stderr", "lengths")

    def __post_init__(self) -> None:
        check_fields(self)
        grid = (len(self.positions),) * self.mean.ndim
        if self.positions.ndim != 1 or not self.mean.size or not self.mean.shape == self.stderr.shape == grid:
            raise ValueError(
                f"mean and stderr must be on a line or grid of positions, got the shapes {self.mean.shape} and "
                f"{self.stderr.shape} of {self.positions.shape}"
            )

    def table(self) -> str:
        """One row a point, as CSV: the positions, the mean, its standard error."""
        names = ["x", "y"][: self.mean.ndim]
        points = itertools.product(self.positions.tolist(), repeat=self.mean.ndim)
        rows = zip(points, self.mean.flatten().tolist(), self.stderr.flatten().tolist(), strict=True)
        lines = [",".join(map(repr, (*point, mean, stderr))) for point, mean, stderr in rows]
        return "\n".join([",".join([*names, "mean", "stderr"]), *lines]) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, or, where the name ends in ``.csv``, the table; whole or not at all."""
        if str(path).endswith(".csv"):
            with atomic_write(path) as file:
                file.write(self.table())
            return
        super().save(path)

    def plot(self, ax: Any = None, levels: int = 20, **style: Any) -> Any:
        """Draw the line with its error bars, or the grid as contours; returns the axes of matplotlib.

        Args:
            ax: Axes of matplotlib; by default those of a new figure.
            levels: Number of contours.
            **style: Passed on to ``Axes.errorbar`` or ``Axes.contour``.
        """
        ax, levels = axes_or_new(ax), whole("levels", levels, 1, 1000)
        label = rf"$\delta E$  [{self.conventions.get('metric', 'loss')}]"
        ax.set_xlabel("$x$")
        if self.mean.ndim == 1:
            ax.errorbar(self.positions, self.mean, yerr=self.stderr, **{"capsize": 2, "marker": ".", **style})
            ax.set_ylabel(label)
            return ax
        finite = np.ma.masked_invalid(self.mean.T)
        drawn = ax.contour(self.positions, self.positions, finite, levels=levels, **style)
        ax.clabel(drawn, fontsize="x-small")
        ax.plot([0], [0], "k+")
        ax.set_ylabel("$y$")
        ax.set_title(label, fontsize="small")
        return ax

    def figure(self, kind: str = "surface") -> Any:
        """The picture as a figure of plotly: the line with its error bars, or the grid.

        Args:
            kind: ``"surface"`` or ``"contour"``, of a grid.
        """
        import plotly.graph_objects as go

        choice("kind", kind, ("surface", "contour"))
        label = f"dE [{self.conventions.get('metric', 'loss')}]"
        if self.mean.ndim == 1:
            bars = {"type": "data", "array": self.stderr}
            drawn = go.Figure(go.Scatter(x=self.positions, y=self.mean, error_y=bars, mode="lines+markers"))
            return drawn.update_layout(xaxis_title="x", yaxis_title=label)
        shown = {"x": self.positions, "y": self.positions, "z": self.mean.T, "customdata": self.stderr.T}
        hover = "x %{x:.3g}, y %{y:.3g}<br>dE %{z:.4g} ± %{customdata:.1g}<extra></extra>"
        if kind == "contour":
            drawn = go.Figure(go.Contour(**shown, hovertemplate=hover, colorbar_title=label))
            return drawn.update_layout(xaxis_title="x", yaxis_title="y", yaxis_scaleanchor="x")
        drawn = go.Figure(go.Surface(**shown, hovertemplate=hover, colorbar_title=label))
        return drawn.update_layout(scene={"xaxis_title": "x", "yaxis_title": "y", "zaxis_title": label})

    def _columns(self) -> dict[str, list[Any]]:
        points = list(itertools.product(self.positions.tolist(), repeat=self.mean.ndim))
        places = {name: [point[k] for point in points] for k, name in enumerate(("x", "y")[: self.mean.ndim])}
        return {**places, "mean": self.mean.flatten().tolist(), "stderr": self.stderr.flatten().tolist()}

    def _remarks(self) -> list[str]:
        return [f"E(w) = {self.baseline:.5g}", self.about() if self.conventions else ""]

    def about(self) -> str:
        """What is shown, in one line."""
        c = self.conventions
        with reading("slice"):
            return f"{c['metric']} of {c['architecture']}; {c['examples']} examples; directions: {c['directions']}"

    def __str__(self) -> str:
        low, high = np.nanmin(self.mean), np.nanmax(self.mean)
        shape = " x ".join(map(str, self.mean.shape))
        lines = [
            f"{shape} points from {self.positions[0]:g} to {self.positions[-1]:g}: dE from {low:.4g} to {high:.4g}, "
            f"standard errors up to {np.nanmax(self.stderr):.2g}",
            f"E(w) = {self.baseline:.5f} +- {self.baseline_stderr:.2g}",
        ]
        return "\n".join([*lines, self.about()] if self.conventions else lines)


def slices(
    model: nn.Module,
    data: Any,
    directions: str | nn.Module | Mapping[str, Tensor] | Sequence[Any] = "filter",
    *,
    positions: Sequence[float] | Tensor | np.ndarray | None = None,
    dimensions: int = 2,
    metric: Metric = "loss",
    batch_norm: str = "eval",
    parameters: Selection = "all",
    seed: int = 0,
    progress: bool = True,
    batch_size: int | None = None,
    forward: Forward | None = None,
) -> Slice:
    """The metric on a line or a grid through the weights.

    Args:
        model: Any network; it is left as it was found.
        data: See :func:`wideflat.local_energy`; it is gone through once a point.
        directions: ``"random"``, ``"filter"`` or ``"eigenvectors"``; or other weights of the same network (a network or
            its state dictionary, or a list of one or two of them), which then say the number of dimensions.
        positions: In units of the directions, the same along both; default 21 from -1 to 1.
        dimensions: 1 for a line, 2 for a grid.
        metric: ``"loss"``, ``"error"`` or a function of outputs and targets; see :func:`wideflat.local_energy`.
        batch_norm: ``"eval"`` (running statistics of the network) or ``"batch"`` (those of each batch).
        parameters: Which parameters move; see :func:`wideflat.evaluation.selection.select_parameters`.
        seed: Of random directions and of the batches.
        progress: Show progress.
        batch_size: Examples a batch, where batches are made here.
        forward: See :func:`wideflat.local_energy`.

    Example:
        L = w^2 on the line from w = 1 to w = 3: dE = (1 + 2 x)^2 - 1.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad(): _ = model.weight.fill_(1.0)
        >>> found = slices(model, (torch.ones(2, 1), torch.ones(2)), {"weight": torch.tensor([[3.0]])},
        ...                positions=[0.0, 0.5, 1.0], metric=lambda out, _: out[:, 0] ** 2, progress=False)
        >>> found.mean.tolist()
        [0.0, 3.0, 8.0]
    """
    axis = np.linspace(-1, 1, 21) if positions is None else np.array(numbers_of("positions", positions))
    others = _others(directions, dimensions)
    begun = opened(
        model, data, metric, parameters, batch_norm=batch_norm, forward=forward, batch_size=batch_size, seed=seed
    )
    evaluation, blocks = begun.evaluation, begun.blocks
    count = dimensions if others is None else len(others)
    shown = Progress("slices", None, progress)
    with unwritten(begun.model), evaluation.explained(), evaluation.prepared(), shown as bar:
        if others is None:
            found = _directions(str(directions), begun, count)
        else:
            found = [_difference(begun.model, begun.names, other) for other in others]
        plane = Plane(evaluation, begun.names, found, blocks.first())
        with plane:
            sums = _grid(evaluation, blocks, plane, list(itertools.product(axis.tolist(), repeat=count)), bar)
    shape = (len(axis),) * count
    mean, stderr = (values.reshape(shape) for values in sums.differences())
    lengths = [math.sqrt(squared_length(d.values())) for d in found]
    return Slice(
        axis, mean, stderr, *sums.baseline(), np.array(lengths),
        begun.conventions(
            "slice", perturbed=sum(part.numel() for part in found[0].values()), examples=round(sums.weight),
            directions="given" if others is not None else directions, notes=plane.notes,
        ),
    )  # fmt: skip


def _others(directions: Any, dimensions: int) -> list[Any] | None:
    """The networks that directions lead to; None where these have a name."""
    if isinstance(directions, str):
        if directions not in _WORDS:
            words = ", ".join(f'"{word}"' for word in _WORDS)
            raise ValueError(f"directions must be {words}, or one or two other networks; got {shown(directions)}")
        if not isinstance(dimensions, int) or dimensions not in (1, 2):
            raise ValueError(f"dimensions must be 1 or 2, got {shown(dimensions)}")
        return None
    if not isinstance(directions, (nn.Module, Mapping, list, tuple)):
        raise TypeError(f"directions must be a word, or one or two other networks; got {shown(directions)}")
    others = [directions] if isinstance(directions, (nn.Module, Mapping)) else list(directions)
    if len(others) not in (1, 2):
        raise ValueError(f"directions lead to one or two other networks, got {len(others)}")
    return others


def _directions(kind: str, begun: Opened, count: int) -> list[dict[str, Tensor]]:
    """Directions that have a name."""
    names, evaluation, parameters = begun.names, begun.evaluation, dict(begun.model.named_parameters())
    weights = {name: parameters[name].detach() for name in names}
    generator = torch.Generator().manual_seed(derive_seed(begun.seed, "slices"))
    if kind == "filter":
        a = Scales(begun.model, names, "filter").values
        return [{name: a[name] * _normal(weights[name], generator) for name in names} for _ in range(count)]
    flat = torch.cat([weight.flatten() for weight in weights.values()])
    if kind == "random":
        found = [torch.cat([_normal(w, generator).flatten() for w in weights.values()]) for _ in range(count)]
    else:
        loss = Evaluation(begun.model, "loss" if evaluation.metric_name == "error" else evaluation.metric,
                          evaluation.batch_norm, evaluation.forward)  # fmt: skip
        hessian = Hessian(loss, begun.blocks, names)
        hessian.loss()
        with Progress("eigenvectors", enabled=False) as quiet:
            _, _, found = lanczos(hessian, flat, count, 1e-3, 100, generator, quiet)
        if len(found) < count:
            raise ValueError(f"{len(flat)} weights have no {count} eigenvectors: use dimensions=1")
    sizes = [weight.numel() for weight in weights.values()]
    found = [d * (flat.norm() / d.norm()) for d in found]
    return [
        {name: part.view(weights[name].shape) for name, part in zip(names, d.split(sizes), strict=True)} for d in found
    ]


def _normal(weight: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(weight.shape, generator=generator).to(weight)


def _difference(model: nn.Module, names: list[str], other: Any) -> dict[str, Tensor]:
    """The way to another network."""
    state = other.state_dict() if isinstance(other, nn.Module) else other
    if not isinstance(state, Mapping):
        raise TypeError(f"directions lead to networks or state dictionaries, got {type(other).__name__}")
    state, weights = whole_tensors(state), dict(model.named_parameters())
    for name in names:
        if name not in state or state[name].shape != weights[name].shape:
            raise ValueError(f"the other network has no {name} of shape {tuple(weights[name].shape)}")
    return {name: state[name].detach().to(weights[name]) - weights[name].detach() for name in names}


class _Sums:
    """Means and standard errors over data of differences to w, from sums over blocks."""

    def __init__(self, points: int) -> None:
        self._plain, self._square, self._mixed = (np.zeros(points + 1) for _ in range(3))  # the last is w itself
        self.weight, self._weights_squared, self._count = 0.0, 0.0, 0

    def add(self, values: np.ndarray, weight: float) -> None:
        """Values of the examples of a block at every point and, last, at w, shape (points + 1, examples)."""
        values = np.concatenate([values[:-1] - values[-1], values[-1:]])
        self._plain += weight * values.sum(1)
        self._square += weight**2 * (values**2).sum(1)
        self._mixed += weight**2 * values.sum(1)
        self.weight += weight * values.shape[1]
        self._weights_squared += weight**2 * values.shape[1]
        self._count += values.shape[1] if weight > 0 else 0

    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        mean = self._plain / self.weight
        spread = self._square - 2 * mean * self._mixed + mean**2 * self._weights_squared
        with np.errstate(invalid="ignore"):
            share = self._count / (self._count - 1) if self._count > 1 else np.nan
            return mean, np.sqrt(share * np.maximum(spread, 0.0)) / self.weight

    def differences(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard error at each point."""
        mean, stderr = self._moments()
        return mean[:-1], stderr[:-1]

    def baseline(self) -> tuple[float, float]:
        """The same of the value at w."""
        mean, stderr = self._moments()
        return float(mean[-1]), float(stderr[-1])


def _grid(
    evaluation: Evaluation, blocks: Blocks, plane: Plane, points: list[tuple[float, ...]], bar: Progress
) -> _Sums:
    """Every block at all points, one after the other: it is read, and its first layer computed, once."""
    sums = _Sums(len(points))
    bar.total = None if blocks.count is None else blocks.count * (len(points) + 1)
    for block in blocks.visit(0):
        plane.start(evaluation.load(block.batch))
        rows = []
        for point in (*points, (0.0,) * len(points[0])):
            rows.append(plane.values(point, block.size).reshape(-1).clone())
            bar.advance()
        values = np.stack([row.numpy() for row in fetched(rows)])  # the host waits once a block
        with np.errstate(invalid="ignore"):
            sums.add(values, evaluation.counted / len(rows[0]))
    return sums
