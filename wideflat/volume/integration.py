r"""Thermodynamic integration at one sigma: from points and chains to log Z, its error, and whether to believe it.

Chains go **up** from beta_low, started from N(0, 1), and **down** from beta, started at the weights themselves. A chain
that lags has V too high going up and too low going down, so the two sides bracket log Z and their gap shows the lag.

.. code-block:: text

    estimate  mean of the sides of  log Z(beta_low) - omega_0 <V>_0 - sum_k omega_k V_k
    SE^2      max( sum_k omega_k^2 var_k  over all chains,  variance of the 2R chain totals / 2R )
    SE_gap^2  sum_k omega_k^2 var_k  for each side alone, added
    left      log(1 + t/T): t trajectories of the burn-in from w at a V below that of all T others at beta
    stderr^2  SE^2 + prior^2 + quadrature^2 + (max(0, |gap| - SE_gap)/2)^2 + left^2
    dof       (sum_k omega_k^2 var_k)^2 / sum_k (omega_k^2 var_k)^2/nu_k

Chains from the weights may leave a well there while they are not counted yet, and never find it again. Its share of the
time is at least that which they were in it, if they would come back as soon as nothing more is looked at: ``left``.

Where points alone know log Z roughly, what they are apart from it beyond both errors is added to the error too, and
more than three errors are refused (:mod:`wideflat.volume.second_opinion`).

For ``measure="error"`` the share p of samples at the top at which every example is right is counted too, log P = log
Z(B) + log p. Both come from the same samples: of the top node V - [V = 0]/(omega_K p) takes the place of V in every
error.

Where the points alone reach beta nothing has to be integrated. Chains are then started at the weights all the same: a
well there that no random point has met shows in their V, in the mean or as values below those of all points. What they
cannot exclude, a well they left before they counted and would have come back to, is added to the error:

.. code-block:: text

    min(1, (points/3)^-1 (1/Z - 1)) / samples        of the points at most three would have missed it; V >= V(w) in it
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wideflat.volume.chain_errors import autocorrelation_time, split_r_hat, variances
from wideflat.volume.gaussian_hmc import Trace
from wideflat.volume.second_opinion import FEWEST as FEWEST_POINTS
from wideflat.volume.second_opinion import Opinion
from wideflat.volume.temperatures import Grid, Prior
from wideflat.volume.volume import Integration

__all__ = ["bracket", "integrate"]

#: The fewest independent samples of a chain, over the nodes as they count in the error.
FEWEST = 2.0
#: R-hat above which chains are in different places, and the least that B, h times the variance of the means of half
#: chains of h samples over that within them, is then: R-hat = sqrt(1 + B/h) is larger by chance where h is small.
LARGEST_R_HAT, LEAST_BETWEEN = 2.2, 35.0
#: How much sooner where their steps differ: log R-hat counts so many times the standard deviation of their log steps.
CURVATURES = 4.0
#: How far below all points, in beta V, a chain from the weights may come where points alone give the value.
DEEPER = 3.0
#: The largest share of the burn-in from the weights that may be spent below every sample.
LONGEST_STAY = 0.5
#: A chain that accepts less than this at one node is stuck.
STUCK = 0.2


class _Side:
    """The chains that go in one direction, node by node as arrays (samples, chains)."""

    def __init__(self, chains: Sequence[Sequence[Trace]]) -> None:
        self.nodes = list(zip(*(sorted(chain, key=lambda trace: trace.beta) for chain in chains), strict=True))
        self.values = self.stack("values")

    def stack(self, name: str) -> list[np.ndarray]:
        return [np.array([getattr(trace, name) for trace in node], dtype=float).T for node in self.nodes]

    def means(self, name: str) -> np.ndarray:
        return np.array([values.mean() for values in self.stack(name)])

    @property
    def gradients(self) -> int:
        return sum(trace.gradients for node in self.nodes for trace in node)


class _Sum:
    """-sum_k weights_k x_k over the chains of one side, or of both: value of each chain, variance, drift."""

    def __init__(self, values: Sequence[np.ndarray], weights: np.ndarray) -> None:
        self.totals = -weights @ np.array([node.mean(0) for node in values])
        self.var, self.freedom, self.tau = variances(values)
        self.raw_tau = np.array([autocorrelation_time(node) for node in values])
        self.parts = weights**2 * self.var
        halves = [node[len(node) // 2 :].mean() - node[: len(node) // 2].mean() for node in values]
        self.drift = float(-weights @ np.array(halves))

    @property
    def value(self) -> float:
        return float(self.totals.mean())

    @property
    def dof(self) -> float:
        squares = float((self.parts**2 / self.freedom).sum())
        return float(self.parts.sum()) ** 2 / squares if squares > 0 else math.inf


def integrate(
    prior: Prior,
    grid: Grid | None,
    up: Sequence[Sequence[Trace]],
    down: Sequence[Sequence[Trace]],
    *,
    sigma: float,
    beta: float,
    size: int,
    moving: int | None = None,
    solutions: bool = False,
    opinion: Opinion | None = None,
) -> Integration:
    """Log Z with its error and the rule of refusal.

    Args:
        prior: V at independent points.
        grid: The nodes; None where the points reach beta by themselves.
        up: For each chain that goes up its traces at the nodes 1 to K.
        down: For each chain that goes down the same; without a grid they are at beta alone.
        sigma: Strength of the noise.
        beta: Inverse temperature.
        size: N, the dimension that is walked in.
        moving: The weights among them that move at all; default all.
        solutions: Whether log P(V = 0) is wanted in place of log Z(beta).
        opinion: What points alone say of it.
    """
    moving = moving or size
    if grid is None:
        found = _points_alone(prior, _Side(down), sigma, beta, size, solutions)
    else:
        found = _walked(prior, grid, _Side(up), _Side(down), sigma, size, solutions)
        if opinion is not None:
            top = [max(chain, key=lambda trace: trace.beta).values for chain in (*up, *down)]
            _heed(found, opinion, np.array(top))
    found.ratio = 1 + found.ratio / moving
    found.ratio_stderr /= moving
    r = found.ratio
    if r > 0:
        found.phi = found.log_z / moving + (r - 1 - math.log(r)) / 2
        found.phi_stderr = math.hypot(found.stderr / moving, (1 - 1 / r) / 2 * found.ratio_stderr)
    found.evaluations = max(len(prior.values), 0 if opinion is None else len(opinion.values))
    return found


def _walked(prior: Prior, grid: Grid, up: _Side, down: _Side, sigma: float, size: int, solutions: bool) -> Integration:
    """Where chains were needed."""
    weights = grid.weights[1:]
    pooled = [np.hstack(pair) for pair in zip(up.values, down.values, strict=True)]
    share = _Share([up.values[-1], down.values[-1]]) if solutions else None
    linear = [side.values if share is None else share.linearised(side.values, weights[-1]) for side in (up, down)]
    above, below = (_Sum(values, weights) for values in linear)
    both = _Sum([np.hstack(pair) for pair in zip(*linear, strict=True)], weights)
    totals = np.concatenate([above.totals, below.totals])
    walked = max(float(both.parts.sum()), float(totals.var(ddof=1)) / len(totals))
    base = prior.log_z - grid.weights[0] * prior.mean
    value = base + (above.value + below.value) / 2
    statistical = math.sqrt(walked + prior.stderr(grid.weights[0]) ** 2)
    if share is not None:
        value += share.log - share.linear
        statistical = math.hypot(statistical, share.least_error)
    means = np.array([prior.mean, *((up.means("values") + down.means("values")) / 2)])
    quadrature = grid.error(means)
    gap, gap_stderr = below.value - above.value, math.sqrt(above.parts.sum() + below.parts.sum())
    excess = max(0.0, abs(gap) - gap_stderr) / 2
    left, stayed = _left(down, pooled[-1])
    var = variances(pooled)[0]
    found = Integration(
        sigma=sigma,
        beta=grid.high,
        log_z=value,
        stderr=math.sqrt(statistical**2 + quadrature**2 + excess**2 + left**2),
        dof=both.dof,
        statistical=statistical,
        quadrature=quadrature,
        gap=gap,
        gap_stderr=gap_stderr,
        drift=(above.drift + below.drift) / 2,
        beta_low=grid.low,
        betas=grid.betas.tolist(),
        llc=(grid.betas * means).tolist(),
        llc_stderr=(grid.betas * np.sqrt([prior.mean_stderr**2, *var])).tolist(),
        up=(grid.betas * [prior.mean, *up.means("values")]).tolist(),
        down=(grid.betas * [prior.mean, *down.means("values")]).tolist(),
        gradients=up.gradients + down.gradients,
        share=math.nan if share is None else share.share,
    )
    _bounds(found, prior, float(means[-1]), math.sqrt(var[-1]), 0.0 if share is None else share.log)
    found.ratio, found.ratio_stderr = _excess_of_norm([up, down], grid.high, solutions)
    _diagnose(found, [up, down], both.tau)
    apart = np.abs(up.means("values") - down.means("values")) / np.sqrt(above.var + below.var).clip(1e-300)
    found.diagnostics["node_gap"] = apart.tolist()
    found.diagnostics["contribution"] = np.sqrt(both.parts).tolist()
    found.flags = {**_refusals(found, size, [up, down], share), **_mixing(found, [up, down], both)}
    if stayed > LONGEST_STAY and "gap" not in found.flags:
        found.flags["gap"] = f"a well at the weights was left after {100 * stayed:.0f} % of the burn-in"
    return found


def _left(down: _Side, samples: np.ndarray) -> tuple[float, float]:
    """What a well at the weights may add that was left in the burn-in, and the share of the burn-in spent in it."""
    burn = np.array([trace.before for trace in down.nodes[-1]], dtype=float)
    inside = int((burn < samples.min()).sum())
    return math.log1p(inside / (burn.size - inside + samples.size)), inside / max(1, burn.size)


def _heed(found: Integration, opinion: Opinion, samples: np.ndarray) -> None:
    """What points alone say, against the value that was found with chains."""
    if opinion.count >= FEWEST_POINTS:
        found.points_log_z, found.points_stderr = opinion.log_z, opinion.stderr
    apart, contradicts = opinion.against(found.log_z, found.stderr, samples)
    found.stderr = math.hypot(found.stderr, apart)
    if contradicts:
        found.flags["points"] = f"{opinion.log_z:.4g} +- {opinion.stderr:.2g} from {opinion.count:.0f} that count"


def _points_alone(prior: Prior, check: _Side, sigma: float, beta: float, size: int, solutions: bool) -> Integration:
    """Where the points reach beta; ``check`` are the chains from the weights."""
    share = _Share([prior.values[:, None]]) if solutions else None
    log_z, stderr = prior.log_z, prior.stderr()
    if share is not None:  # the points solve every example often enough: count them
        log_z, stderr = share.log, math.hypot(share.stderr, share.least_error)
    seen = check.values[0]
    unmet = min(1.0, 3 / len(prior.values) * math.expm1(min(30.0, max(0.0, -log_z))))
    stderr = math.hypot(stderr, unmet / seen.size)
    var = float(variances([seen])[0][0])
    mean, spread = prior.mean, prior.mean_stderr
    found = Integration(
        sigma=sigma,
        beta=beta,
        log_z=log_z,
        stderr=stderr,
        dof=len(prior.values) - 1.0,
        statistical=stderr,
        gap=-beta * (float(seen.mean()) - mean),
        gap_stderr=beta * math.sqrt(var + spread**2),
        beta_low=beta,
        betas=[beta],
        llc=[beta * mean],
        llc_stderr=[beta * spread],
        up=[beta * mean],
        down=[beta * float(seen.mean())],
        gradients=check.gradients,
        share=math.nan if share is None else share.share,
    )
    # of log Z(B) + log p at B, where p is the share among the points as they count there
    counted = float((prior.weights * (prior.values == 0)).mean()) if solutions else 1.0
    _bounds(found, prior, mean, spread, math.log(max(counted, 1e-300)))
    found.ratio, found.ratio_stderr = _excess_of_norm([check], beta, solutions)
    _diagnose(found, [check], variances([seen])[2])
    found.flags = _refusals(found, size, [check], share)
    deepest = beta * float(prior.values.min() - seen.min())
    if deepest > DEEPER and "gap" not in found.flags:
        found.flags["gap"] = f"a chain from the weights was {deepest:.3g} below every point"
    return found


class _Share:
    """The share p of solutions among samples, and the errors of log p. Arrays (samples, chains)."""

    def __init__(self, values: Sequence[np.ndarray]) -> None:
        self.solved = np.hstack([(v == 0).astype(float) for v in values])
        self.share = float(self.solved.mean())
        self.count = self.solved.size / autocorrelation_time(self.solved)

    @property
    def log(self) -> float:
        """Log p; where no sample is a solution, that of half a sample."""
        return math.log(max(self.share, 0.5 / self.solved.size))

    @property
    def effective(self) -> float:
        """Independent solutions."""
        return self.share * self.count

    @property
    def linear(self) -> float:
        """What :meth:`linearised` adds to the mean of the sides: 1, or 0 where there is no solution."""
        return 1.0 if self.share > 0 else 0.0

    @property
    def stderr(self) -> float:
        """Of log p, for independent samples."""
        return math.sqrt((1 - self.share) / max(self.effective, 0.5))

    @property
    def least_error(self) -> float:
        """One over the samples: that all of them were solutions does not mean that all are."""
        return 1 / self.count

    def linearised(self, values: Sequence[np.ndarray], weight: float) -> list[np.ndarray]:
        """V, at the last node with [V = 0]/(weight p) taken off: the mean of -weight times it moves as log P does."""
        if self.share == 0:
            return list(values)
        return [*values[:-1], values[-1] - (values[-1] == 0) / (weight * self.share)]


def _bounds(found: Integration, prior: Prior, mean: float, stderr: float, shift: float = 0.0) -> None:
    """-beta <V>_0 <= log Z <= -beta <V>_beta; for solutions both plus log p, the ``shift``."""
    found.prior_mean, found.prior_stderr = prior.free
    found.free_betas, found.free_llc = (values.tolist() for values in prior.curve())
    found.lower, found.lower_stderr = shift - found.beta * found.prior_mean, found.beta * found.prior_stderr
    found.upper, found.upper_stderr = shift - found.beta * mean, found.beta * stderr


def _excess_of_norm(sides: Sequence[_Side], beta: float, solutions: bool) -> tuple[float, float]:
    """<|xi|^2> - N at the top with its error, by the virial theorem: -beta <xi . grad V>.

    For solutions it is the mean of |xi|^2 - N over those alone that is wanted. There grad V = 0, so that it is the mean
    of the virial; the mean of the virial over all samples, which is zero, is taken off to lower the noise.
    """
    if not solutions:
        pull = np.hstack([side.stack("pull")[-1] for side in sides])
        return -beta * float(pull.mean()), beta * math.sqrt(variances([pull])[0][0])
    virial = np.hstack([side.stack("virial")[-1] for side in sides])
    solved = np.hstack([side.values[-1] == 0 for side in sides]).astype(float)
    if not solved.any():
        return math.nan, math.nan
    influence = virial * (solved / solved.mean() - 1)
    return float(influence.mean()), math.sqrt(variances([influence])[0][0])


def _diagnose(found: Integration, sides: Sequence[_Side], tau: np.ndarray) -> None:
    """What is reported of every node."""
    pooled = [np.hstack(node) for node in zip(*(side.values for side in sides), strict=True)]
    errors = [np.hstack(node) for node in zip(*(side.stack("error") for side in sides), strict=True)]
    found.diagnostics = {
        "tau": tau.tolist(),
        "r_hat": [split_r_hat(values) for values in pooled],
        "exp_error": [float(np.exp(-np.clip(error, -50, 50)).mean()) for error in errors],
        "samples": [float(values.size) for values in pooled],
    }
    for name, side in zip(("up", "down") if len(sides) == 2 else ("down",), sides, strict=True):
        found.diagnostics[f"acceptance_{name}"] = side.means("accept").tolist()
        found.diagnostics[f"short_{name}"] = side.means("short").tolist()
        found.diagnostics[f"step_{name}"] = [float(np.mean([trace.step for trace in node])) for node in side.nodes]
        found.diagnostics[f"gradients_{name}"] = [float(sum(t.gradients for t in node)) for node in side.nodes]


def _refusals(found: Integration, size: int, sides: Sequence[_Side], share: _Share | None) -> dict[str, str]:
    """The flags that hold, each with the figures that made it."""
    virials = [values for side in sides for values in side.stack("virial")]
    floors = np.array([2 * size / values.size for values in virials])
    var = np.concatenate([variances(side.stack("virial"))[0] for side in sides])
    with np.errstate(invalid="ignore"):
        virial = float(np.max(np.abs([v.mean() for v in virials]) / np.sqrt(np.maximum(var, floors))))
    accept = min(float(side.means("accept").min()) for side in sides)
    stuck = min(float(node.mean(0).min()) for side in sides for node in side.stack("accept"))
    short = max(float(side.means("short").max()) for side in sides)
    node_gap = max(found.diagnostics.get("node_gap", [0.0]))
    below = found.lower - found.log_z - 3 * (found.statistical + found.lower_stderr)
    above = found.log_z - found.upper - 3 * found.statistical
    # without a grid this is one comparison of a short chain with points, whose error is rough
    limit = 3 if len(sides) == 2 else 4
    conditions = {
        "gap": (abs(found.gap) > limit * found.gap_stderr, f"{found.gap:+.3g} +- {found.gap_stderr:.2g}"),
        "node_gap": (node_gap > 6, f"{node_gap:.1f} errors"),
        "drift": (abs(found.drift) > 3 * found.gap_stderr, f"{found.drift:+.3g} +- {found.gap_stderr:.2g}"),
        "virial": (not virial <= 4.5, f"{virial:.1f} errors"),
        "accept": (not (accept >= 0.5 and stuck >= STUCK), f"{accept:.2f}, of one chain {stuck:.2f}"),
        "cap": (short > 0.5, f"{100 * short:.0f} % of the trajectories"),
        "bounds": (max(below, above) > 0, f"{found.log_z:.4g} in [{found.lower:.4g}, {found.upper:.4g}]"),
        "quadrature": (not found.quadrature <= max(1.0, 0.05 * abs(found.log_z)), f"{found.quadrature:.2g}"),
        "share": (share is not None and share.effective < 5, f"{0 if share is None else share.effective:.1f}"),
        "energy": (not math.isfinite(found.log_z) or not math.isfinite(found.stderr), f"log Z = {found.log_z}"),
    }
    return {name: figures for name, (holds, figures) in conditions.items() if holds}


def _mixing(found: Integration, sides: Sequence[_Side], both: _Sum) -> dict[str, str]:
    """Whether the chains moved enough for an error to be read off them, and whether all of them are in one place.

    An error that is estimated from chains of fewer than two correlation times means nothing. Nor does it where V lies
    far apart from chain to chain (R-hat), or less far but each has adapted to another curvature: then there is a core
    that long steps do not find and a plain that short ones do not cross, and chains that agree do so by chance.
    """
    steps = np.log([[trace.step for side in sides for trace in side.nodes[k]] for k in range(len(both.raw_tau))])
    count = steps.shape[1]
    samples = np.array(found.diagnostics["samples"]) / count / both.raw_tau  # independent ones of a chain
    total = float(both.parts.sum())
    independent = total / float((both.parts / samples).sum()) if total > 0 else math.inf
    spread = steps.std(1, ddof=1)
    r_hat = np.array(found.diagnostics["r_hat"])
    found.diagnostics["independent"] = samples.tolist()
    found.diagnostics["step_spread"] = spread.tolist()
    r_hat = np.nan_to_num(r_hat, nan=1.0, posinf=1e6).clip(1.0)
    half = np.array(found.diagnostics["samples"]) / count // 2
    limit = np.maximum(LARGEST_R_HAT, np.sqrt(1 + LEAST_BETWEEN / half))
    apart = np.log(r_hat) / np.log(limit) * np.maximum(1.0, CURVATURES * spread)
    if apart.max() > 1:
        k = int(np.argmax(apart))
        return {"mixing": f"R-hat = {r_hat[k]:.1f} where steps are {np.exp(spread[k]):.1f}-fold apart"}
    return {"mixing": f"{independent:.1f} independent samples a chain"} if independent < FEWEST else {}


def bracket(
    prior: Prior,
    chain: Sequence[Trace],
    *,
    sigma: float,
    beta: float,
    size: int,
    moving: int | None = None,
    solutions: bool = False,
) -> Integration:
    """-beta <V>_0 <= log Z <= -beta <V>_beta from points and one chain that was started at the weights.

    For solutions log P = log Z + log p lies between the same bounds plus log p, p being the share of solutions that the
    chain has met; where it has met none the lower one is minus infinity.
    """
    side = _Side([chain])
    var, freedom, tau = variances(side.values)
    found = Integration(sigma, beta, math.nan, math.nan, float(freedom[0]), beta_low=prior.low)
    mean, stderr = float(side.means("values")[0]), math.sqrt(var[0])
    share = _Share(side.values) if solutions else None
    _bounds(found, prior, mean, stderr, 0.0 if share is None else share.log)
    if share is not None:
        found.share, spread = share.share, math.hypot(share.stderr, share.least_error)
        found.lower = found.lower if share.share > 0 else -math.inf
        found.lower_stderr, found.upper_stderr = (
            math.hypot(e, spread) for e in (found.lower_stderr, found.upper_stderr)
        )
    found.betas, found.llc, found.llc_stderr = [beta], [beta * mean], [beta * stderr]
    found.up, found.down = [math.nan], [beta * mean]
    found.ratio, found.ratio_stderr = (value / (moving or size) for value in _excess_of_norm([side], beta, solutions))
    found.ratio += 1
    _diagnose(found, [side], tau)
    found.gradients, found.evaluations = side.gradients, len(prior.values)
    found.flags = {"quick": f"{found.lower:.4g} to {found.upper:.4g}"}
    return found
