"""The free entropy of a network over sigma: log Z with errors and conventions, as a table, a figure, a file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from wideflat.checks import flag, instance
from wideflat.checks.options import check_fields, text
from wideflat.checks.records import parts_of, reading
from wideflat.notebook import axes_or_new
from wideflat.saved import Saved
from wideflat.volume.volume import Integration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Difference", "FreeEntropy", "LearningCoefficient"]


@dataclass
class Difference:
    """log Z of one network less that of another: ``mean``, its standard error, and what to keep in mind."""

    sigmas: np.ndarray
    mean: np.ndarray
    stderr: np.ndarray
    note: str = ""

    @property
    def deviations(self) -> np.ndarray:
        """The difference in standard errors; positive where the first has the larger volume."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.mean == 0, 0.0, self.mean / self.stderr)


@dataclass
class LearningCoefficient:
    """lambda(beta) = beta <V>_beta with its error, at one sigma."""

    betas: np.ndarray
    value: np.ndarray
    stderr: np.ndarray


@dataclass(repr=False)
class FreeEntropy(Saved):
    r"""log Z(beta, sigma) around the weights of a network, one value for each sigma.

    Attributes:
        points: What was found at each sigma (:class:`~wideflat.volume.volume.Integration`), with all diagnostics.
        conventions: What changes the answer: measure, beta, scale, parameters, examples, subset, data, architecture.
        complete: False if the measurement was stopped before the last sigma.

    Example:
        >>> point = Integration(sigma=0.5, beta=1.0, log_z=-4.0, stderr=0.5, dof=20.0)
        >>> entropy = FreeEntropy([point], {"examples": 100})
        >>> entropy.interval(0.95).round(2).tolist(), entropy.converged.tolist()
        ([[-5.04, -2.96]], [True])
    """

    _WHAT = "free entropy"

    points: list[Integration]
    conventions: dict[str, Any] = field(default_factory=dict)
    complete: bool = True

    #: What a file of one says it is.
    KIND = "wideflat free entropy"
    #: Conventions without which a difference means nothing.
    DECISIVE = ("measure", "beta", "scale", "parameters", "perturbed", "architecture", "examples", "data")

    def __post_init__(self) -> None:
        check_fields(self)
        self.points = [instance("a point", point, Integration) for point in self.points]

    def _array(self, name: str) -> np.ndarray:
        return np.array([getattr(point, name) for point in self.points])

    @property
    def sigmas(self) -> np.ndarray:
        """Strengths of the noise."""
        return self._array("sigma")

    @property
    def log_z(self) -> np.ndarray:
        """Log Z, or, for ``measure="error"``, the logarithm of the probability that all examples are right."""
        return self._array("log_z")

    @property
    def stderr(self) -> np.ndarray:
        """Standard errors, statistical and systematic parts together."""
        return self._array("stderr")

    @property
    def dof(self) -> np.ndarray:
        """Degrees of freedom of the errors."""
        return self._array("dof")

    @property
    def lower(self) -> np.ndarray:
        """Jensen's bound -beta <V>_0."""
        return self._array("lower")

    @property
    def upper(self) -> np.ndarray:
        """The bound -beta <V>_beta of convexity."""
        return self._array("upper")

    @property
    def gap(self) -> np.ndarray:
        """Chains from above minus chains from below."""
        return self._array("gap")

    @property
    def quadrature(self) -> np.ndarray:
        """Error of the rule."""
        return self._array("quadrature")

    @property
    def relative_distance(self) -> np.ndarray:
        """d*/N, half the mean square of (w' - w)/a over what dominates Z."""
        return self._array("relative_distance")

    @property
    def phi(self) -> np.ndarray:
        """The normalised local entropy Phi(w, d*)."""
        return self._array("phi")

    @property
    def phi_stderr(self) -> np.ndarray:
        """Its standard errors."""
        return self._array("phi_stderr")

    @property
    def converged(self) -> np.ndarray:
        """Whether nothing speaks against a value."""
        return self._array("converged")

    @property
    def reasons(self) -> list[list[str]]:
        """What does, for each sigma."""
        return [point.reasons for point in self.points]

    @property
    def llc(self) -> list[LearningCoefficient]:
        """Lambda over beta, for each sigma."""
        columns = ("betas", "llc", "llc_stderr")
        return [LearningCoefficient(*(np.array(getattr(point, name)) for name in columns)) for point in self.points]

    @property
    def local_energy(self) -> tuple[np.ndarray, np.ndarray]:
        """<V>_0/n and its error: at beta = 0 the slope of -log Z/n is the local energy of the measure (Eq. 4)."""
        n = self.conventions.get("examples", 1)
        return self._array("prior_mean") / n, self._array("prior_stderr") / n

    @property
    def gradients(self) -> int:
        """Evaluations of V with its gradient, in all."""
        return int(self._array("gradients").sum())

    @property
    def seconds(self) -> float:
        """Time spent."""
        return float(self._array("seconds").sum())

    def interval(self, level: float = 0.95) -> np.ndarray:
        """Confidence interval of each log Z by Student's t, shape (S, 2)."""
        return np.array([point.interval(level) for point in self.points]).reshape(-1, 2)

    # ---- comparing

    def compare(self, other: FreeEntropy, force: bool = False) -> Difference:
        """Log Z less that of another network, sigma by sigma; refused where it would mean nothing.

        Args:
            other: What to subtract.
            force: Compare in spite of other conventions, or of values that did not converge.
        """
        instance("other", other, FreeEntropy)
        force = flag("force", force)
        if self.sigmas.shape != other.sigmas.shape or not np.allclose(self.sigmas, other.sigmas, rtol=1e-6):
            raise ValueError(f"the sigmas differ: {self.sigmas.tolist()} and {other.sigmas.tolist()}")
        mine, theirs = self.conventions, other.conventions
        reasons = [
            f"{name} is {mine.get(name)!r} for one and {theirs.get(name)!r} for the other"
            for name in self.DECISIVE
            if mine.get(name) != theirs.get(name)
        ]
        refused = [f"{s:g}" for s, a, b in zip(self.sigmas, self.converged, other.converged, strict=True) if not a & b]
        if refused:
            reasons.append(f"not converged at sigma = {', '.join(refused)}")
        if reasons and not force:
            raise ValueError(f"these are not comparable: {'; '.join(reasons)}. force=True compares them anyway")
        at_w = mine.get("at_w", math.nan), theirs.get("at_w", math.nan)
        note = "the mean {} at the weights is {:.4g} and {:.4g}: the higher one has more room to fall".format(
            mine.get("measure"), *at_w
        )
        return Difference(self.sigmas, self.log_z - other.log_z, np.hypot(self.stderr, other.stderr), note)

    # ---- on disk

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and words."""
        points = [point.to_dict() for point in self.points]
        return {
            "kind": self.KIND,
            "format": 1,
            "conventions": self.conventions,
            "complete": self.complete,
            "points": points,
        }

    @classmethod
    def from_dict(cls, content: Any) -> FreeEntropy:
        """The inverse of :meth:`to_dict`."""
        content = parts_of(cls.KIND, content, kind=cls.KIND)
        with reading(cls.KIND):
            points = [Integration.from_dict(point) for point in content["points"]]
            return cls(points, instance("conventions", content["conventions"], dict), content["complete"])

    # ---- looking at it

    def plot(self, ax: Axes | None = None, label: str | None = None) -> Axes:
        """Draw lambda over log beta; minus the area under a curve is log Z.

        Triangles that point up and down are the chains of the two sides: they lie on each other in equilibrium. The
        part without triangles, up to beta_low, is that of the independent points. Dotted is beta <V>_0, what lambda
        would be if the posterior could not evade: its slope is the local energy.

        Args:
            ax: Axes of matplotlib; by default those of a new figure.
            label: Put before sigma in the legend.
        """
        ax, label = axes_or_new(ax), text("label", label)
        for point in self.points:
            words = f"{label + ', ' if label else ''}$\\sigma$ = {point.sigma:g}: {_value(point)}"
            betas, llc = (np.array([*free, *walked]) for free, walked in _both_parts(point))
            (line,) = ax.plot(betas, llc, linewidth=1, label=words)
            color = line.get_color()
            ax.fill_between(betas, 0, llc, color=color, alpha=0.15, linewidth=0)
            if math.isfinite(point.prior_mean):
                linear = betas * point.prior_mean
                seen = np.abs(linear) <= 1.2 * np.abs(llc).max()
                ax.plot(betas[seen], linear[seen], ":", color=color, linewidth=1)
            ax.errorbar(point.betas, point.llc, point.llc_stderr, color=color, linestyle="none", capsize=2)
            for side, marker in ((point.up, "^"), (point.down, "v")):
                ax.plot(point.betas, side, marker, color=color, markersize=4, markerfacecolor="none")
        ax.set_xscale("log")
        ax.set_xlabel(r"$\beta$")
        ax.set_ylabel(r"$\lambda(\beta) = \beta \langle V \rangle_\beta$")
        ax.legend(frameon=False, fontsize="small")
        return ax

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows of what is printed, one row a sigma."""
        header = ["sigma", "log Z", "stderr", "95 % interval", "bounds", "gap", "d*/N", "Phi", "LLC", "converged"]
        rows = []
        for point in self.points:
            low, high = point.interval(0.95)
            rows.append(
                [
                    f"{point.sigma:g}",
                    _short(point.log_z),
                    f"{point.stderr:.2g}",
                    f"[{_short(low)}, {_short(high)}]",
                    f"[{_short(point.lower)}, {_short(point.upper)}]",
                    f"{point.gap:+.2g} ± {point.gap_stderr:.1g}",
                    f"{point.relative_distance:.4g}",
                    f"{point.phi:.3g}",
                    f"{point.llc[-1]:.3g} ± {point.llc_stderr[-1]:.1g}" if point.llc else "",
                    "yes" if point.converged else "no: " + ", ".join(point.flags),
                ]
            )
        return header, rows

    def notes(self) -> list[str]:
        """What is printed below the table: why values are refused, conventions, cost."""
        lines = [f"sigma = {p.sigma:g}: {reason}" for p in self.points for reason in p.reasons]
        lines += [
            f"sigma = {p.sigma:g}: log Z > 0: around these weights lie better ones (they are not at a minimum)"
            for p in self.points
            if p.converged and p.log_z > 3 * p.stderr
        ]
        lines += [self.about(), f"{self.gradients} gradients, {self.seconds:.0f} s"]
        return [line for line in [*lines, *([] if self.complete else ["stopped before the last sigma"])] if line]

    def about(self) -> str:
        """The conventions in one line."""
        c = self.conventions
        with reading("free entropy"):
            parts = [
                f"{c['measure']} of {c['architecture']}" if "architecture" in c else "",
                f"n = {c['examples']}{' (a random subset)' if c.get('subset') else ''}" if "examples" in c else "",
                f"beta = {c['beta']:g}" if c.get("beta") else "",
                f"scale: {c['scale']}, {c['parameters']}" if "scale" in c else "",
                f"{c['unmoved']} weights are zero and do not move" if c.get("unmoved") else "",
                f"{c['dropped']} examples that are wrong at the weights were left out" if c.get("dropped") else "",
            ]
            return "; ".join(part for part in parts if part)

    def __str__(self) -> str:
        header, rows = self.table()
        widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in [header, *rows]]
        return "\n".join([*lines, *self.notes()])

    def _columns(self) -> dict[str, list[Any]]:
        low_high = self.interval(0.95).T.tolist() if self.points else [[], []]
        names = ("sigmas", "log_z", "stderr", "lower", "upper", "gap", "relative_distance", "phi")
        columns = {"sigma" if name == "sigmas" else name: getattr(self, name).tolist() for name in names}
        columns |= {"interval_low": low_high[0], "interval_high": low_high[1]}
        return {**columns, "converged": [point.converged for point in self.points]}

    def _remarks(self) -> list[str]:
        return self.notes()


def _short(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) and abs(value) < 1e5 else f"{value:.4g}"


def _both_parts(point: Integration) -> tuple[tuple[list[float], list[float]], tuple[list[float], list[float]]]:
    """Nodes and lambda: up to beta_low from the points, beyond from the chains."""
    free = point.free_betas[:-1], point.free_llc[:-1]  # the last of them is the first node
    return (free[0], point.betas), (free[1], point.llc)


def _value(point: Integration) -> str:
    return f"log Z = {_short(point.log_z)} ± {point.stderr:.2g}" + ("" if point.converged else " (not converged)")
