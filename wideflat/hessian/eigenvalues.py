"""A spectrum as random probes see it: density, trace and other means over eigenvalues, each with its error.

:mod:`wideflat.hessian.spectrum` says what the error bars are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wideflat.checks import function as checked_function
from wideflat.checks import instance, number, numbers_of
from wideflat.checks.options import check_fields, text
from wideflat.checks.records import array, reading
from wideflat.notebook import axes_or_new
from wideflat.saved import Saved

__all__ = ["Density", "Spectrum"]

#: A node with less than this part of the weight of one eigenvalue may be none.
GHOST = 1e-3
#: The tails of an interval are those of 95 % times P / (P + FEW): the second moment is of the same P probes.
FEW = 6


@dataclass
class Density:
    """The density of eigenvalues, smoothed by a Gaussian.

    Attributes:
        points: Where, shape (X,).
        mean: rho there.
        stderr: Its standard error over probes.
        lower: End of its interval at 95 %.
        upper: The other end.
        width: Of the Gaussian.
    """

    points: np.ndarray
    mean: np.ndarray
    stderr: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    width: float


@dataclass(repr=False)
class Spectrum(Saved):
    """Eigenvalues of a matrix of second derivatives, as far as random probes see them.

    Attributes:
        nodes: Of the quadrature rule of each probe, shape (P, M).
        weights: Of the nodes; each row has the sum 1 (0 for nodes that only fill a row).
        eigenvalues: The largest ones, in falling order: those of the probe that came nearest.
        residuals: |A v - lambda v| of each, an upper bound of its error.
        size: D, the number of weights.
        baseline: The loss.
        conventions: As in :class:`wideflat.LocalEnergy`.
    """

    nodes: np.ndarray
    weights: np.ndarray
    eigenvalues: np.ndarray
    residuals: np.ndarray
    size: int
    baseline: float
    conventions: dict[str, Any] = field(default_factory=dict)

    _WHAT = "spectrum"
    _NAN = True
    _ARRAYS = ("nodes", "weights", "eigenvalues", "residuals")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.nodes.ndim != 2 or self.nodes.shape != self.weights.shape or not self.nodes.size:
            shapes = f"{self.nodes.shape} and {self.weights.shape}"
            raise ValueError(f"nodes and weights must have a row for each probe, got the shapes {shapes}")
        if self.eigenvalues.shape != self.residuals.shape or self.eigenvalues.ndim != 1:
            shapes = f"{self.eigenvalues.shape} and {self.residuals.shape}"
            raise ValueError(f"every eigenvalue must have a residual, got the shapes {shapes}")

    def mean(self, function: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float]:
        """(1/D) sum_i f(lambda_i), and its standard error over probes.

        Args:
            function: The f, of arrays; the smoother it is, the fewer steps it needs.
        """
        mean, variance = self._moments(self._values(function))
        return float(mean), math.sqrt(variance)

    def _values(self, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """A function of the user's at the nodes."""
        values = array("what function returns", checked_function("function", function)(self.nodes))
        if values.shape != self.nodes.shape:
            raise ValueError(f"function must return a value for each of {self.nodes.shape} nodes, got {values.shape}")
        return values

    def interval(self, function: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float]:
        """The interval of :meth:`mean` at 95 % over probes.

        Where a few eigenvalues make up most of a mean, probes that miss them have a small mean *and* a small standard
        error: two standard errors are then too little. This interval is that of the density, for the positive and for
        the negative part of f, and of their difference: each end by the root of the sum of squares of both and of their
        covariance, which is negative (the components of a probe have one sum of squares).

        Args:
            function: The f, of arrays.
        """
        values = self._values(function)
        up, down = (self._interval(np.maximum(part, 0.0)[None]) for part in (values, -values))
        center = up.mean - down.mean
        quantile = -torch.special.ndtri(torch.tensor(self._tail)).item()
        # what one gains, the other loses
        both = 4 * quantile**2 * up.mean * down.mean / ((self.size + 2) * len(self.nodes))
        lower = center - np.sqrt((up.mean - up.lower) ** 2 + (down.upper - down.mean) ** 2 + both)
        upper = center + np.sqrt((up.upper - up.mean) ** 2 + (down.mean - down.lower) ** 2 + both)
        return float(lower[0]), float(upper[0])

    @property
    def _tail(self) -> float:
        """Of an interval, on either side."""
        return 0.025 * len(self.nodes) / (len(self.nodes) + FEW)

    def _interval(self, values: np.ndarray, points: np.ndarray | None = None, width: float = 0.0) -> Density:
        """The mean over eigenvalues of what is not negative at the nodes (last two axes), with its interval."""
        mean, variance = self._moments(values)
        second = (values**2 * self.weights).sum(-1).mean(-1)
        seen = np.where(self.weights * self.size > GHOST, values, 0.0).max((-2, -1))
        second = np.maximum(second, seen**2 / self.size)  # there is at least one eigenvalue, however little it was seen
        lower, upper = self._ends(mean, second)
        return Density(np.zeros(0) if points is None else points, mean, np.sqrt(variance), lower, upper, width)

    def _moments(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mean of values at the nodes (last two axes) over eigenvalues, and the variance of it over probes."""
        first, second = ((values**power * self.weights).sum(-1).mean(-1) for power in (1, 2))
        return first, 2 * np.maximum(second - first**2, 0.0) / ((self.size + 2) * len(self.nodes))

    @property
    def trace(self) -> float:
        """The sum of the eigenvalues."""
        return self.size * self.mean(lambda x: x)[0]

    @property
    def trace_stderr(self) -> float:
        """Standard error of the trace over probes."""
        return self.size * self.mean(lambda x: x)[1]

    @property
    def trace_interval(self) -> tuple[float, float]:
        """The interval of the trace at 95 % over probes; see :meth:`interval`."""
        lower, upper = self.interval(lambda x: x)
        return self.size * lower, self.size * upper

    @property
    def extent(self) -> tuple[float, float]:
        """The smallest and the largest node: the ends of the spectrum, from inside."""
        seen = self.nodes[self.weights > 0]
        return float(seen.min()), float(seen.max())

    def density(self, points: Sequence[float] | np.ndarray | None = None, width: float | None = None) -> Density:
        """The density of the eigenvalues with its interval over probes.

        Args:
            points: Where; 201 over the whole spectrum when left out.
            width: Standard deviation of the Gaussian; the length of the spectrum over the steps when left out.
        """
        low, high = self.extent
        if width is None:
            width = (high - low) / self.nodes.shape[1] or max(abs(high), 1.0) * 1e-3
        width = number("width", width, above=0)
        spread = np.linspace(low - 3 * width, high + 3 * width, 201)
        where = spread if points is None else np.array(numbers_of("points", points))
        bell = np.exp(-0.5 * ((where[:, None, None] - self.nodes) / width) ** 2) / (width * math.sqrt(2 * math.pi))
        return self._interval(bell, where, float(width))

    def _ends(self, mean: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Both m_1 of which the mean that was seen is an outer quantile, by bisection of their logarithms."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(mean > 0, second / mean, 1.0)
        shares = np.array([[1 - self._tail], [self._tail]])
        low, high = np.full((2, len(mean)), -12.0), np.full((2, len(mean)), 12.0)
        for _ in range(40):  # to 2e-11 of it
            middle = (low + high) / 2
            found = mean * np.exp(middle)
            below = np.maximum(ratio - found, 1e-12 * ratio)
            freedom = np.clip(len(self.nodes) * (self.size + 2) * found / below, len(self.nodes), 1e6)
            half = torch.from_numpy(freedom / 2)
            seen = torch.special.gammainc(half, half * torch.from_numpy(np.exp(-middle))).numpy() > shares
            low, high = np.where(seen, middle, low), np.where(seen, high, middle)
        return np.asarray(mean * np.exp((low + high) / 2))

    def joined(self, other: Spectrum) -> Spectrum:
        """This one with the probes of another of the same matrix, from another seed."""
        instance("other", other, Spectrum)
        ours, theirs = ({**s.conventions, "seed": None, "probes": None} for s in (self, other))
        if ours != theirs or self.size != other.size:
            raise ValueError("only spectra of the same matrix can be joined: their conventions differ")
        if self.conventions.get("seed") == other.conventions.get("seed"):
            raise ValueError("these spectra have the same seed, so the same probes: there is nothing to join")
        wide = max(self.nodes.shape[1], other.nodes.shape[1])
        nodes, weights = (
            np.concatenate([np.pad(getattr(s, name), ((0, 0), (0, wide - s.nodes.shape[1]))) for s in (self, other)])
            for name in ("nodes", "weights")
        )
        best = self if self.residuals.sum() <= other.residuals.sum() else other
        words = {**self.conventions, "probes": len(nodes)}
        return Spectrum(nodes, weights, best.eigenvalues, best.residuals, self.size, self.baseline, words)

    # ---- on paper

    def plot(self, ax: Any = None, label: str | None = None, **style: Any) -> Any:
        """Draw the density over eigenvalues, logarithmically, with its interval; returns the axes of matplotlib."""
        ax, label, found = axes_or_new(ax), text("label", label), self.density()
        (line,) = ax.plot(found.points, found.mean, label=label, **style)
        ax.fill_between(found.points, found.lower, found.upper, color=line.get_color(), alpha=0.2, linewidth=0)
        ax.set_yscale("log")
        ax.set_ylim(max(found.mean.max() * 1e-8, 1e-3 / (self.size * found.width)), found.mean.max() * 3)
        ax.set_xlabel(r"eigenvalue $\lambda$")
        ax.set_ylabel("density")
        if label is not None:
            ax.legend()
        return ax

    def about(self) -> str:
        """What it is the spectrum of, in one line."""
        c = self.conventions
        with reading("spectrum"):
            parts = [
                f"{_NAMES.get(c.get('matrix', ''), 'matrix')} of the {c['metric']} of {c['architecture']}"
                if "architecture" in c
                else "",
                f"{c['examples']} examples" if "examples" in c else "",
                f"{c['parameters']}, scale: {c['scale']}" if "scale" in c else "",
                f"{len(self.nodes)} probes",
                *c.get("notes", []),
            ]
            return "; ".join(part for part in parts if part)

    def _columns(self) -> dict[str, list[Any]]:
        return {"eigenvalue": self.eigenvalues.tolist(), "residual": self.residuals.tolist()}

    def _remarks(self) -> list[str]:
        return str(self).splitlines()[1:]

    def __str__(self) -> str:
        top = ", ".join(f"{v:.4g} +- {r:.1g}" for v, r in zip(self.eigenvalues, self.residuals, strict=True))
        low, high = self.extent
        return "\n".join(
            [
                f"largest eigenvalues {top}",
                f"trace {self.trace:.4g} [{self.trace_interval[0]:.3g}, {self.trace_interval[1]:.3g}] over {self.size} "
                f"weights, nodes from {low:.4g} to {high:.4g}",
                f"loss {self.baseline:.4g}",
                self.about(),
            ]
        )


_NAMES = {"hessian": "Hessian", "ggn": "Gauss-Newton matrix"}
