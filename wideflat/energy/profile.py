"""The result of a measurement of flatness: a curve over sigma, its error bars, the conventions it depends on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from wideflat import interruption
from wideflat.checks import flag, instance, number, numbers_of
from wideflat.checks.options import check_fields, text
from wideflat.checks.records import array, parts_of, reading, share
from wideflat.energy.certificate import certified_accuracy, lengths_of
from wideflat.energy.inverse import SigmaAt, crossing
from wideflat.energy.stratified import student_quantile
from wideflat.notebook import axes_or_new
from wideflat.saved import Saved

__all__ = ["Difference", "Interrupted", "LocalEnergy", "architecture", "check_sigmas", "conventions"]

#: A training error above which the flatness of a network says little.
MUCH = 0.25


def conventions(
    measure: str,
    *,
    metric: str,
    parameters: str,
    perturbed: int,
    architecture: str,
    examples: int,
    batch_norm: str | None = None,
    batch_size: int | None = None,
    augmented: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """What a measure of flatness depends on, as it is stored with the result.

    Args:
        measure: What was measured.
        metric: Of which quantity.
        parameters: Which parameters are perturbed, in words.
        perturbed: How many numbers these are.
        architecture: The network in a few words; see :func:`architecture`.
        examples: How many examples.
        batch_norm: Which statistics; None for a network without batch norm.
        batch_size: Examples that are evaluated together, where the answer depends on it.
        augmented: Whether the inputs were augmented.
        **more: What else there is to know: the kind of noise, the seed, notes.
    """
    if not more.get("notes", True):
        del more["notes"]  # nothing to say
    return {
        "measure": measure,
        "metric": metric,
        "batch_norm": batch_norm,
        "batch_size": batch_size,
        "parameters": parameters,
        "perturbed": perturbed,
        "architecture": architecture,
        "examples": examples,
        "augmented": augmented,
        **more,
    }


def architecture(model: nn.Module) -> str:
    """A network in a few words, to tell whether two are of one kind."""
    return f"{type(model).__name__}, {sum(p.numel() for p in model.parameters())} parameters"


def check_sigmas(sigmas: Any) -> np.ndarray:
    """The strengths of the noise as an array, if that is what they are."""
    values = numbers_of("sigmas", sigmas, 0)
    if getattr(sigmas, "dtype", None) in (torch.float32, np.dtype("float32")):  # 0.3 is meant, not 0.30000001
        values = [_meant(np.float32(value)) for value in values]
    return np.array(values)


def _meant(value: np.float32) -> float:
    """The number of few digits that a float32 stands for, rounding of `torch.linspace` included.

    >>> _meant(np.float32(0.3)), _meant(np.float32(0.20000002)), _meant(np.float32(0.12345678))
    (0.3, 0.2, 0.12345678)
    """
    short = float(f"{value:.6g}")
    return short if abs(short - float(value)) <= 2 * np.spacing(value) else float(str(value))


class Interrupted(interruption.Interrupted):
    """Ctrl-C during a measurement: ``profile`` has what was measured until then (None if that is nothing)."""

    def __init__(self, profile: LocalEnergy | None) -> None:
        super().__init__("interrupted; the error's .profile holds what was measured so far")
        self.profile = profile


@dataclass
class Difference:
    """Difference of two profiles: ``mean`` = first - second, with its standard error and number of deviations."""

    sigmas: np.ndarray
    mean: np.ndarray
    stderr: np.ndarray

    @property
    def deviations(self) -> np.ndarray:
        """The difference in standard errors; negative where the first is flatter."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.mean == 0, 0.0, self.mean / self.stderr)


@dataclass(repr=False)
class LocalEnergy(Saved):
    """A profile dE(w, sigma) with its error bars and with the conventions under which it was measured.

    Attributes:
        sigmas: Strengths of the noise, shape (S,).
        mean: dE at each sigma, shape (S,).
        stderr: Standard error of each mean. It is about the noise alone: the data set is fixed.
        degrees_of_freedom: Of each standard error, for Student's t.
        covariance: Of the means, shape (S, S): with common noise the points of a curve move together.
        baseline: E(w), the metric without noise.
        baseline_stderr: 0 if every example was evaluated, else its error bar over data.
        evaluations: Examples evaluated with noise, for each sigma.
        passes: The same divided by the number of examples.
        samples: With ``noise="pass"``, dE of each perturbation, shape (passes, S); else None.
        conventions: What changes the answer: which parameters, which batch-norm statistics, which metric, and so on.
        complete: False if the measurement was interrupted or gave up before ``target_stderr``.

    Example:
        >>> profile = LocalEnergy(sigmas=[0.0, 0.5], mean=[0.0, 0.1], stderr=[0.0, 0.01], baseline=0.02)
        >>> profile.interval(0.95).round(3).tolist()
        [[0.0, 0.0], [0.08, 0.12]]
    """

    _WHAT = "local-energy profile"

    sigmas: np.ndarray
    mean: np.ndarray
    stderr: np.ndarray
    baseline: float
    degrees_of_freedom: np.ndarray = None  # type: ignore[assignment]
    covariance: np.ndarray = None  # type: ignore[assignment]
    baseline_stderr: float = 0.0
    evaluations: np.ndarray = None  # type: ignore[assignment]
    passes: np.ndarray = None  # type: ignore[assignment]
    samples: np.ndarray | None = None
    conventions: dict[str, Any] = field(default_factory=dict)
    complete: bool = True

    #: Conventions that change the answer: profiles that differ in one of them are not compared unless forced.
    DECISIVE = (
        "measure",
        "metric",
        "batch_norm",
        "batch_size",
        "parameters",
        "perturbed",
        "architecture",
        "examples",
        "augmented",
        "scale",
    )
    #: What a convention was before it was stored.
    UNSAID: ClassVar[dict[str, Any]] = {"scale": "relative"}

    def __post_init__(self) -> None:
        self.sigmas, self.mean, self.stderr = (
            array(name, getattr(self, name)) for name in ("sigmas", "mean", "stderr")
        )
        count = len(self.sigmas)
        if not self.sigmas.shape == self.mean.shape == self.stderr.shape == (count,):
            raise ValueError(
                f"sigmas, mean and stderr must be of one length, got {self.sigmas.shape}, {self.mean.shape} and "
                f"{self.stderr.shape}"
            )
        if self.degrees_of_freedom is None:
            self.degrees_of_freedom = np.full(count, np.inf)
        if self.covariance is None:
            self.covariance = np.diag(self.stderr**2)
        if self.evaluations is None:
            self.evaluations = np.zeros(count, dtype=int)
        if self.passes is None:
            self.passes = np.zeros(count)
        check_fields(self)
        self.degrees_of_freedom, self.covariance, self.passes = (
            np.asarray(values, dtype=float) for values in (self.degrees_of_freedom, self.covariance, self.passes)
        )
        with np.errstate(invalid="ignore"):
            self.evaluations = self.evaluations.astype(int)
        for name in ("degrees_of_freedom", "covariance", "evaluations", "passes", "samples"):
            found = getattr(self, name)
            if found is not None and found.shape[-1:] != (count,):
                raise ValueError(f"{name} must have {count} values, one for each sigma, got the shape {found.shape}")

    @property
    def energy(self) -> np.ndarray:
        """E_z E(w + sigma a z) itself: ``baseline + mean``."""
        return self.baseline + self.mean

    @property
    def spread(self) -> np.ndarray:
        """Standard deviation over perturbations (the bars of the paper's figures); only with ``noise="pass"``."""
        if self.samples is None:
            raise ValueError(
                'the spread over perturbations of the whole data set is only known with noise="pass"; this profile '
                f"was measured with noise={self.conventions.get('noise')!r}, whose error bars are in .stderr"
            )
        with np.errstate(invalid="ignore"):
            count = (~np.isnan(self.samples)).sum(0)
            deviation = self.samples - np.nansum(self.samples, 0) / count
            return np.sqrt(np.nansum(deviation**2, 0) / (count - 1))

    def interval(self, confidence: float = 0.95) -> np.ndarray:
        """Confidence interval of each mean by Student's t, shape (S, 2)."""
        confidence = share("confidence", confidence)
        quantile = np.array([student_quantile(confidence, freedom) for freedom in self.degrees_of_freedom])
        with np.errstate(invalid="ignore"):
            half = np.where(self.stderr == 0, 0.0, quantile * self.stderr)
        return np.stack([self.mean - half, self.mean + half], axis=1)

    def sigma_at(self, amount: float, confidence: float = 0.95) -> SigmaAt:
        """The sigma at which dE has grown by ``amount``, with its interval: the inverse of the profile.

        It is infinite where the profile does not get so far. See :mod:`wideflat.energy.inverse`.

        Example:
            >>> profile = LocalEnergy(sigmas=[0.2, 0.4], mean=[0.04, 0.16], stderr=[0.01, 0.01], baseline=0.02)
            >>> print(profile.sigma_at(0.1))
            sigma = 0.3162 [0.2928, 0.338] at dE = 0.1
        """
        return crossing(self.sigmas, self.mean, self.covariance, self.degrees_of_freedom, amount, confidence)

    def certified(self, shift: Any, confidence: float = 0.95) -> np.ndarray:
        """Least accuracy under noise after *any* change of the weights of a given length, at each sigma, shape (S,).

        A(w + delta) >= Phi(Phi^-1(p) - |delta / a| / sigma) for the accuracy A under noise of scale a, with p a lower
        confidence limit of A(w). It is about the noisy network at w + delta; see :mod:`wideflat.energy.certificate`.

        Args:
            shift: The length |delta / a|: the root of the sum of squares of the change of each weight over its a. Or a
                :class:`wideflat.ShiftProfile` of the same scale: then there is one row a position, shape (P, S).
            confidence: Of each value on its own, one-sided.
        """
        if self.conventions.get("metric", "error") != "error":
            raise ValueError(
                f'only the error has a certificate: measure with metric="error", not {self.conventions["metric"]!r}'
            )
        if self.conventions.get("measure", "local energy") != "local energy":
            raise ValueError(f"only Gaussian noise certifies something; this is {self.conventions['measure']!r}")
        lengths = lengths_of(shift, self.conventions)
        confidence = number("confidence", confidence)
        if not 0.5 <= confidence < 1:
            raise ValueError(f"confidence must be at least 0.5 and below 1, got {confidence}")
        quantile = np.array([student_quantile(2 * confidence - 1, nu) for nu in self.degrees_of_freedom])
        stderr = np.hypot(self.stderr, self.baseline_stderr)
        with np.errstate(invalid="ignore"):
            p = 1 - self.energy - np.where(stderr == 0, 0.0, quantile * stderr)
        p = np.where(np.isnan(p), 0.0, p)
        pairs = list(zip(p, self.sigmas, strict=True))
        found = np.array([[certified_accuracy(share, length, sigma) for share, sigma in pairs] for length in lengths])
        return found if hasattr(shift, "scaled_lengths") else found[0]

    # ---- on disk

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers; what is not finite is None."""
        return {"format": 1, **{name: _plain(value) for name, value in asdict(self).items()}}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> LocalEnergy:
        """The inverse of :meth:`to_dict`."""
        parts = parts_of("local-energy profile", content)
        values = {name: value for name, value in parts.items() if name in cls.__dataclass_fields__}
        missing = {"sigmas", "mean", "stderr", "baseline"} - values.keys()
        if missing:
            raise ValueError(f"a local-energy profile must have {', '.join(sorted(missing))}")
        with reading("local-energy profile"):
            for name in ("mean", "stderr", "covariance", "degrees_of_freedom", "samples"):
                if values.get(name) is not None:
                    absent = np.inf if name == "degrees_of_freedom" else np.nan
                    values[name] = array(name, _fill(values[name], absent))
            if values["baseline"] is None:
                values["baseline"] = math.nan
            return cls(**values)

    # ---- looking at it

    def plot(self, ax: Any = None, label: str | None = None, spread: bool = False, **style: Any) -> Any:
        """Draw the curve with its standard errors (or, with ``spread``, the standard deviation over perturbations).

        Args:
            ax: Axes of matplotlib; by default those of a new figure.
            label: For the legend; by default none.
            spread: Bars show the spread over perturbations, as the paper's do. Needs ``noise="pass"``.
            **style: Passed on to ``Axes.errorbar``.

        Returns:
            The axes.
        """
        ax, label = axes_or_new(ax), text("label", label)
        bars = self.spread if flag("spread", spread) else self.stderr
        ax.errorbar(self.sigmas, self.mean, yerr=bars, label=label, **{"capsize": 2, "marker": ".", **style})
        ax.set_xlabel(r"$\sigma$")
        metric = self.conventions.get("metric", "error")
        ax.set_ylabel(r"$\delta E_{\mathrm{train}}(w, \sigma)$" + ("" if metric == "error" else f"  [{metric}]"))
        if label is not None:
            ax.legend()
        return ax

    def compare(self, other: LocalEnergy, force: bool = False, baseline_tolerance: float = 0.01) -> Difference:
        """The difference to another profile, point by point; refused where it would not mean anything.

        The paper warns (App. B.2) that flatness is only comparable between minima of nearly equal training error, and
        between networks of one architecture.

        Args:
            other: The profile to subtract. It may be from another kind of noise: all kinds measure the same quantity.
            force: Compare in spite of different conventions or training errors. The sigmas must agree in any case.
            baseline_tolerance: Largest difference of the two baselines: absolute for the error; for other metrics
                relative to the larger one.

        Raises:
            ValueError: With the reason, if the profiles are not comparable.
        """
        instance("other", other, LocalEnergy)
        force, baseline_tolerance = flag("force", force), number("baseline_tolerance", baseline_tolerance, 0)
        if self.sigmas.shape != other.sigmas.shape or not np.allclose(self.sigmas, other.sigmas, rtol=1e-6, atol=1e-9):
            raise ValueError(
                f"the sigmas differ: {self.sigmas.tolist()} and {other.sigmas.tolist()}; measure at the same"
            )
        ours, theirs = ({**self.UNSAID, **profile.conventions} for profile in (self, other))
        reasons = [
            f"{name} is {ours.get(name)!r} for one and {theirs.get(name)!r} for the other"
            for name in self.DECISIVE
            if ours.get(name) != theirs.get(name)
        ]
        gap = abs(self.baseline - other.baseline)
        scale = (
            1.0 if self.conventions.get("metric", "error") == "error" else max(abs(self.baseline), abs(other.baseline))
        )
        noise = 3 * math.hypot(self.baseline_stderr, other.baseline_stderr)
        if gap > baseline_tolerance * scale + noise:
            reasons.append(
                f"the values without noise are {self.baseline:.4g} and {other.baseline:.4g}: flatness says something "
                "about generalisation only between minima of nearly the same training error (App. B.2 of the paper)"
            )
        if reasons and not force:
            raise ValueError(
                f"these profiles are not comparable: {'; '.join(reasons)}. force=True compares them anyway"
            )
        return Difference(self.sigmas, self.mean - other.mean, np.hypot(self.stderr, other.stderr))

    def about(self) -> str:
        """The conventions that change the answer, in one line."""
        c = self.conventions
        meaning = f" ({c['meaning']})" if c.get("meaning") else ""
        parts = [
            f"{c.get('metric', 'error')}{meaning} of {c['architecture']}" if "architecture" in c else "",
            f"{c['examples']}{' augmented' if c.get('augmented') else ''} examples" if "examples" in c else "",
            f"noise: {c['noise']}{', z and -z' if c.get('antithetic') else ''}" if "noise" in c else "",
            f"standard error: {c['stderr']}" if "stderr" in c else "",
            f"perturbed: {c['parameters']}" if "parameters" in c else "",
            f"scale: {c['scale']}" if c.get("scale", "relative") != "relative" else "",
            f"{c['unmoved']} of {c['perturbed']} weights cannot move" if c.get("unmoved") else "",
            f"batch norm: {c['batch_norm']}" if c.get("batch_norm") else "",
            *c.get("notes", []),
        ]
        return "; ".join(part for part in parts if part)

    def _columns(self) -> dict[str, list[Any]]:
        names = ("sigmas", "mean", "stderr", "passes")
        return {name.removesuffix("s") if name == "sigmas" else name: getattr(self, name).tolist() for name in names}

    def _remarks(self) -> list[str]:
        return [f"E(w) = {self.baseline:.5g}{'' if self.complete else ' (not complete)'}", self.about(), self._doubt()]

    def _doubt(self) -> str:
        """What to think of the flatness of a network that has hardly learned; empty otherwise."""
        if self.conventions.get("metric", "error") != "error" or self.baseline <= MUCH:
            return ""
        return (
            f"E(w) is {100 * self.baseline:.0f} %: flatness says something about generalisation where the training "
            "error is small (App. B.2)"
        )

    def __str__(self) -> str:
        lines = [f"{'sigma':>8} {'dE':>11} {'stderr':>10} {'passes':>8}"]
        with reading("local-energy profile"):
            rows = zip(self.sigmas, self.mean, self.stderr, self.passes, strict=True)
            exact = self.conventions.get("noise") == "exact"
            shown = ((s, m, e, "exact" if exact else f"{p:.3g}") for s, m, e, p in rows)
            lines += [f"{s:8.4g} {m:11.5f} {e:10.2g} {p:>8}" for s, m, e, p in shown]
            lines.append(f"E(w) = {self.baseline:.5f}" + ("" if self.complete else "   (not complete)"))
            lines += [line for line in (self.about(), self._doubt()) if line]
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _fill(value: Any, absent: float) -> Any:
    if isinstance(value, list):
        return [_fill(item, absent) for item in value]
    return absent if value is None else value
