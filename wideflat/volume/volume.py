"""log Z at one sigma: the value, its error, and what speaks against it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from wideflat.checks.options import check_fields
from wideflat.checks.records import share
from wideflat.energy.stratified import student_quantile

__all__ = ["FLAGS", "Integration"]

#: What a result is refused for, with what to do about it.
FLAGS: dict[str, str] = {
    "gap": "chains from above and from below disagree: more burn-in, or a well that only one of them knows",
    "node_gap": "they disagree at one temperature: more burn-in",
    "drift": "V still moves while it is sampled: more burn-in and samples",
    "virial": "the virial theorem does not hold: not in equilibrium, or V is not smooth",
    "accept": "too few trajectories are accepted: more burn-in, so that the step can adapt",
    "points": "independent points say otherwise: wells that chains hardly go between; more samples and chains",
    "mixing": "the chains hardly move, or are in places of other curvature: more samples and chains",
    "wells": "descents from random points end in a deeper well that no chain has met: more chains",
    "cap": "trajectories are cut short: sigma or beta is too large for the longest allowed",
    "bounds": "the value lies outside its own bounds: not in equilibrium",
    "quadrature": "lambda bends too much between the nodes: target_stderr adds some",
    "share": "too few samples solve every example: raise solution_beta or the samples",
    "quick": "only the bracket was asked for",
    "energy": "V was not finite at a sample",
}


@dataclass
class Integration:
    r"""log Z at one sigma.

    Attributes:
        sigma: Strength of the noise.
        beta: Inverse temperature; for ``measure="error"`` the largest one that was walked.
        log_z: log Z, or log P of all examples being right.
        stderr: Its standard error, statistical and systematic parts together.
        dof: Degrees of freedom, for Student's t.
        statistical: The part of the error from chains and points.
        quadrature: The part from the rule.
        gap: Down minus up.
        gap_stderr: Its error.
        drift: Second halves minus first halves.
        lower: Jensen's bound -beta <V>_0.
        lower_stderr: Its error.
        upper: The bound -beta <V>_beta of convexity.
        upper_stderr: Its error.
        beta_low: Where the points end and the chains begin.
        ratio: r = <|xi|^2>/N of what dominates Z.
        ratio_stderr: Its error.
        phi: log Z/N + (r - 1 - log r)/2, the normalised local entropy at d* = N sigma^2 r/2.
        phi_stderr: Its error.
        share: ``measure="error"``: the share of solutions at the top.
        points_log_z: log Z as independent points alone have it, where enough of them count.
        points_stderr: Its error.
        betas: The nodes, beta_low first.
        llc: lambda = beta <V>_beta at each.
        llc_stderr: Its error.
        up: lambda of the chains that go up; the first is that of the points.
        down: The same of those that go down.
        free_betas: Some beta up to beta_low.
        free_llc: lambda there, of the independent points.
        prior_mean: <V> at beta = 0.
        prior_stderr: Its error.
        diagnostics: One list a name, one entry a node that was walked.
        flags: What holds of :data:`FLAGS`, each with the figures.
        gradients: Evaluations of V with its gradient, of all chains.
        evaluations: Evaluations of V alone.
        seconds: Time spent.
    """

    sigma: float
    beta: float
    log_z: float
    stderr: float
    dof: float
    statistical: float = 0.0
    quadrature: float = 0.0
    gap: float = 0.0
    gap_stderr: float = 0.0
    drift: float = 0.0
    lower: float = math.nan
    lower_stderr: float = math.nan
    upper: float = math.nan
    upper_stderr: float = math.nan
    beta_low: float = math.nan
    ratio: float = math.nan
    ratio_stderr: float = math.nan
    phi: float = math.nan
    phi_stderr: float = math.nan
    share: float = math.nan
    points_log_z: float = math.nan
    points_stderr: float = math.nan
    betas: list[float] = field(default_factory=list)
    llc: list[float] = field(default_factory=list)
    llc_stderr: list[float] = field(default_factory=list)
    up: list[float] = field(default_factory=list)
    down: list[float] = field(default_factory=list)
    free_betas: list[float] = field(default_factory=list)
    free_llc: list[float] = field(default_factory=list)
    prior_mean: float = math.nan
    prior_stderr: float = math.nan
    diagnostics: dict[str, list[float]] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    gradients: int = 0
    evaluations: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def converged(self) -> bool:
        """Whether nothing speaks against the value."""
        return not self.flags

    @property
    def reasons(self) -> list[str]:
        """Why not, in words."""
        unknown = "not known to this version"
        return [f"{name} ({figures}): {FLAGS.get(name, unknown)}" for name, figures in self.flags.items()]

    @property
    def relative_distance(self) -> float:
        """d*/N = sigma^2 r/2, in units of the scale."""
        return 0.5 * self.sigma**2 * self.ratio

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Log Z -+ Student's t times the error."""
        level = share("level", level)
        half = student_quantile(level, self.dof) * self.stderr if self.stderr else 0.0
        return self.log_z - half, self.log_z + half

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is not finite becomes a word ("nan", "inf", "-inf"), which JSON has no number for."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Integration:
        """The inverse of :meth:`to_dict`."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: _number(value) for name, value in content.items() if name in known})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):  # NumPy's too, which a checkpoint must not hold
        return float(value) if math.isfinite(value) else str(float(value))
    return value


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _number(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_number(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value
