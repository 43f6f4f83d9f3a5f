r"""The fixed point of the message passing: a sweep over Delta, and Anderson acceleration at each of them.

Real images overlap: the largest eigenvalue of K is 300 for 500 of them, and the plain iteration needs damping of 0.99
and thousands of steps. Here the fixed point is found by Anderson acceleration of a preconditioned map.
Linearised, the residual of g is -(1 + G (Delta K - V)) times the error of g; the preconditioner inverts this matrix
with K replaced by its leading eigenvectors (Woodbury), which are what makes the plain iteration slow. About ten
iterations a point remain, and there is no damping to choose. What decides is always the residual of the plain,
undamped map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from wideflat.entropy.belief_propagation import Closure, FixedPoint, Problem, evaluate

__all__ = ["Iteration", "accelerate", "anderson", "solve", "sweep"]

#: The residual below which a point counts as converged (at least 1e-6 for costly closures). It enters log Z squared.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


@dataclass(frozen=True)
class Iteration:
    """What is iterated at one Delta, and until when.

    Attributes:
        problem: The references and the patterns.
        closure: The method; None to find g alone, with V as it is.
        delta: Variance of the Gaussian around the reference.
        tolerance: Residual at which a reference stops.
        max_iterations: Evaluations of the channel after which a reference is given up.
    """

    problem: Problem
    closure: Closure | None
    delta: float
    tolerance: float
    max_iterations: int

    @property
    def prior(self) -> Tensor:
        """Variances of the fields before any pattern is seen, shape (P,)."""
        return self.delta * self.problem.gram.diagonal()


def sweep(
    problem: Problem,
    closure: Closure,
    deltas: Sequence[float],
    tolerance: float | None = None,
    max_iterations: int = 300,
) -> Iterator[FixedPoint]:
    """The fixed points at growing Delta, each started from the one before.

    Where a reference does not converge it is tried again, from no messages and then in smaller steps of Delta from the
    last point that did; if nothing helps its point is not ``converged`` and the next one starts from the last good one.
    A reference whose last point did not converge either is not tried again: around references with training errors
    there may be no fixed point to be found, and a curve has to end.

    Args:
        problem: The references and the patterns.
        closure: The method.
        deltas: Variances, growing.
        tolerance: As for ``solve``.
        max_iterations: As for ``solve``.
    """
    good: FixedPoint | None = None  # the last converged point of each reference, as if it had been at good.delta
    hopeful = torch.ones(problem.kappa.shape[1], dtype=torch.bool, device=problem.kappa.device)
    for delta in deltas:
        point = solve(problem, closure, delta, good, tolerance, max_iterations)
        failed = (hopeful & ~point.converged).nonzero().squeeze(1)
        if len(failed):
            again = partial(solve, closure=closure, tolerance=tolerance, max_iterations=max_iterations)
            _try_again(again, problem, good, point, failed)
        yield point
        hopeful = point.converged
        failed = (~point.converged).nonzero().squeeze(1)
        start = replace(point, g=point.g.clone(), V=point.V.clone())
        if len(failed):
            old = good.select(failed) if good is not None else None
            start.g[:, failed] = 0 if old is None else old.g
            fresh = delta * problem.gram.diagonal()
            start.V[:, failed] = fresh if old is None else old.V * (delta / old.delta)
        good = start


def _try_again(
    again: Callable[..., FixedPoint], problem: Problem, good: FixedPoint | None, point: FixedPoint, failed: Tensor
) -> None:
    """Improve ``point`` in place for the references that failed; ``again`` solves a problem at a Delta."""
    delta = point.delta
    first = delta / 30 if good is None else good.delta
    old = None if good is None else good.select(failed)
    ladder = [first * (delta / first) ** (k / 4) for k in range(1, 4)] + [delta]
    for path in ([delta], ladder):
        state = None if len(path) == 1 else old
        spent = point.iterations[failed]
        for step in path:
            state = again(problem.select(failed), delta=step, start=state)
            spent = spent + state.iterations
        assert state is not None
        state.iterations = spent
        better = state.residual < point.residual[failed]
        point.iterations[failed] = spent
        point.put(failed[better], state.select(better.nonzero().squeeze(1)))
        remaining = ~point.converged[failed]
        if not remaining.any():
            return
        old = None if old is None else old.select(remaining.nonzero().squeeze(1))
        failed = failed[remaining]


def solve(
    problem: Problem,
    closure: Closure,
    delta: float,
    start: FixedPoint | None = None,
    tolerance: float | None = None,
    max_iterations: int = 300,
) -> FixedPoint:
    """The fixed point of the message passing at one Delta, for all references in one computation.

    Each reference is iterated until its own residual is below the tolerance, then leaves the batch.

    Args:
        problem: The references and the patterns.
        closure: ``RelaxedBP``, ``TAP``, ``UnreducedBP`` or ``FullCovariance``.
        delta: Variance of the Gaussian around the reference.
        start: Where to start: a fixed point at another Delta. Default: g = 0 and the variances of the prior.
        tolerance: Residual at which to stop. Unless given 1e-8 in float64 (1e-6 for costly closures), 1e-4 in float32.
        max_iterations: Evaluations of the channel after which a reference is given up; with costly closures the limit
            for each V, of which there are a tenth as many.
    """
    if tolerance is None:
        tolerance = TOLERANCE.get(problem.kappa.dtype, 1e-4)
        if closure.costly:
            tolerance = max(tolerance, 1e-6)
    if start is None:
        g = torch.zeros_like(problem.kappa)
        V = (delta * problem.gram.diagonal()).expand_as(problem.kappa).clone()
    else:
        g, V = start.g, start.V * (delta / start.delta)
    counts = torch.zeros(problem.kappa.shape[1], dtype=torch.long, device=g.device)
    iteration = Iteration(problem, closure, delta, tolerance, max_iterations)
    g, V, residual = (_solve_nested if closure.costly else accelerate)(iteration, g, V, counts)
    log_z, distance = evaluate(problem, closure, delta, g, V)
    converged = (residual < tolerance) & log_z.isfinite()
    return FixedPoint(delta, g, V, log_z, distance, residual, counts, converged)


def accelerate(iteration: Iteration, g: Tensor, V: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Anderson acceleration of the preconditioned map of (g, V), or of g alone if there is no closure.

    ``counts``, the evaluations of each reference, is counted up in place. Returns g, V and the residual of each
    reference.
    """
    problem, closure, delta = iteration.problem, iteration.closure, iteration.delta
    hidden, references, patterns = g.shape
    root = math.sqrt(delta)
    moving = 1 if closure is None else 2  # g alone, or g and log V

    def residual_map(index: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        part = problem if len(index) == references else problem.select(index)
        g = state[:, 0].transpose(0, 1) / root
        V = frozen[:, index] if closure is None else _variance(state[:, 1], prior)
        _, g_new, G = part.channel(g, V, delta)
        r_g = (g_new - g) * root
        step = torch.empty_like(state)
        step[:, 0] = _precondition(problem, r_g, G, delta).transpose(0, 1)
        residual = r_g.abs().amax((0, 2))
        if closure is not None:
            V_new, valid = closure.cavity(G, V, delta)
            r_V = (V_new / V).log()
            residual = torch.maximum(residual, r_V.abs().amax((0, 2)))
            residual = torch.where(valid, residual, residual.clamp(min=1.0))
            step[:, 1] = r_V.transpose(0, 1)
        return step, residual

    frozen, prior = V, iteration.prior
    state = torch.empty(references, moving, hidden, patterns, dtype=g.dtype, device=g.device)
    state[:, 0] = (g * root).transpose(0, 1)
    if closure is not None:
        state[:, 1] = (V / prior).log().transpose(0, 1)
    state, residual = anderson(residual_map, state, iteration.tolerance, iteration.max_iterations, counts)
    g = (state[:, 0].transpose(0, 1) / root).contiguous()
    return g, V if closure is None else _variance(state[:, 1], prior), residual


def _variance(state: Tensor, prior: Tensor) -> Tensor:
    """V (H, R, P) from log(V / prior) (R, H, P)."""
    return prior * state.transpose(0, 1).exp()


def _solve_nested(iteration: Iteration, g: Tensor, V: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Anderson acceleration of the map of log V, each of whose evaluations finds the g that belongs to V."""
    problem, closure, delta = iteration.problem, iteration.closure, iteration.delta
    assert closure is not None
    g, prior, most = g.clone(), iteration.prior, iteration.max_iterations
    inside = replace(iteration, closure=None, tolerance=0.1 * iteration.tolerance)

    def residual_map(index: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        part = problem.select(index)
        V = _variance(state[:, 0], prior)
        count = counts[index]
        limit = most if count.min() < 5 * most else 1  # enough was spent: only look where it is
        found, _, inner = accelerate(replace(inside, problem=part, max_iterations=limit), g[:, index], V, count)
        counts[index] = count
        good = inner.isfinite() & (inner < 1)
        g[:, index[good]] = found[:, good]
        _, _, G = part.channel(found, V, delta)
        V_new, valid = closure.cavity(G, V, delta)
        step = (V_new / V).log()
        residual = torch.maximum(step.abs().amax((0, 2)), inner)
        return step.transpose(0, 1).unsqueeze(1), torch.where(valid, residual, residual.clamp(min=1.0))

    outer = torch.zeros_like(counts)
    state = (V / prior).log().transpose(0, 1).unsqueeze(1)
    state, residual = anderson(residual_map, state, iteration.tolerance, max(most // 10, 1), outer)
    V = _variance(state[:, 0], prior)
    g, _, inner = accelerate(inside, g, V, counts)
    return g, V, torch.maximum(residual, inner)


def _precondition(problem: Problem, residual: Tensor, G: Tensor, delta: float) -> Tensor:
    """(1 + G Delta U s U^T)^-1 residual with U, s the leading eigenvectors and eigenvalues of the Gram matrix.

    Woodbury: residual - G U (1/(Delta s) + U^T G U)^-1 U^T residual, which is written here for s >= 0.
    """
    U, s = problem.eigenvectors, problem.eigenvalues * delta
    G = G.clamp(min=0)
    W = (G @ problem.eigenvector_pairs).unflatten(-1, (len(s), len(s)))  # U^T G U
    M = s * W  # (1 + s W) c = s U^T residual, column by column: W s is the transpose
    M.diagonal(dim1=-2, dim2=-1).add_(1)
    coefficient = torch.linalg.solve(M.mT, (residual @ U * s).unsqueeze(-1)).squeeze(-1)
    return residual - G * (coefficient @ U.T)


def anderson(
    residual_map: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    state: Tensor,
    tolerance: float,
    max_iterations: int,
    iterations: Tensor,
    window: int = 10,
    patience: int = 12,
) -> tuple[Tensor, Tensor]:
    """Anderson acceleration of ``state <- state + step``, for R independent states in one computation.

    A state that comes far from its smallest residual, or has not come below it for a while, goes back there and on in
    smaller steps; in the second case the steps stay smaller.

    Args:
        residual_map: From the indices of the states that still move and these states to their steps and residuals.
        state: Shape (R, ...).
        tolerance: A state stops when its residual is below this.
        max_iterations: And at the latest after as many evaluations.
        iterations: Evaluations of each state, counted up in place, shape (R,).
        window: How many earlier steps are remembered.
        patience: Evaluations without a smaller residual after which a state goes back.

    Returns:
        The states of the smallest residual, and these residuals.
    """
    references, size = state.shape[0], state[0].numel()
    best_x, best_f = state.flatten(1).clone(), torch.zeros_like(state).flatten(1)
    best_residual = state.new_full((references,), torch.inf)
    index = torch.arange(references, device=state.device)
    x = best_x.clone()
    # differences of successive states and steps; rows of zeros take no part
    dX, dF = x.new_zeros(references, window, size), x.new_zeros(references, window, size)
    last_x, last_f = x, best_f
    linked = torch.zeros(references, dtype=torch.bool, device=x.device)  # whether last_x is the predecessor of x
    mixing, limit = x.new_ones(references), x.new_ones(references)
    idle = torch.zeros(references, dtype=torch.long, device=x.device)  # evaluations since the smallest residual
    for iteration in range(max_iterations):
        f, residual = residual_map(index, x.reshape(-1, *state.shape[1:]))
        f = f.reshape(x.shape)
        iterations[index] += 1
        residual = torch.where(residual.isfinite() & f.isfinite().all(1), residual, torch.inf)
        better = residual < best_residual[index]
        found = index[better]
        best_x[found], best_f[found], best_residual[found] = x[better], f[better], residual[better]
        moving = residual >= tolerance
        if not moving.any():
            break
        if not moving.all():
            index, x, f, residual, better, linked = (t[moving] for t in (index, x, f, residual, better, linked))
            dX, dF, last_x, last_f, mixing = (t[moving] for t in (dX, dF, last_x, last_f, mixing))
            limit, idle = limit[moving], idle[moving]
        idle = torch.where(better, 0, idle + 1)
        stalled = idle == patience
        lost = stalled | (residual > 20 * best_residual[index])
        limit = torch.where(stalled, (0.5 * limit).clamp(min=0.03), limit)
        idle = torch.where(stalled, 0, idle)
        keep = (linked & ~lost).unsqueeze(1)
        dX[:, iteration % window] = torch.where(keep, x - last_x, 0)
        dF[:, iteration % window] = torch.where(keep, f - last_f, 0)
        last_x, last_f, linked = x, f, ~lost
        mixing = torch.minimum(torch.where(lost, mixing / 3, mixing * 1.2).clamp(min=1e-3), limit)
        change = _anderson_step(dX, dF, f, mixing)
        reach = 1 + x.abs()
        x = x + torch.maximum(torch.minimum(change, reach), -reach)
        if lost.any():  # go back to the best so far, forget the history, take a smaller step
            dX[lost], dF[lost] = 0, 0
            x[lost] = best_x[index[lost]] + mixing[lost].unsqueeze(1) * best_f[index[lost]]
    return best_x.reshape(state.shape), best_residual


def _anderson_step(dX: Tensor, dF: Tensor, f: Tensor, mixing: Tensor) -> Tensor:
    """The change beta f - (dX + beta dF) gamma, with gamma the least squares solution of dF gamma = f."""
    gram = dF @ dF.mT
    scale = gram.diagonal(dim1=1, dim2=2).sqrt()
    fresh = (scale == 0).all(1)
    scale = torch.where(scale > 0, scale, 1)
    gram = gram / (scale.unsqueeze(1) * scale.unsqueeze(2))
    gram.diagonal(dim1=1, dim2=2).add_(1e4 * torch.finfo(f.dtype).eps)
    gamma = torch.linalg.solve(gram, (dF @ f.unsqueeze(2)).squeeze(2) / scale) / scale
    gamma = torch.where(gamma.isfinite().all(1, keepdim=True), gamma, 0)
    beta = torch.where(fresh, 0.5 * mixing, mixing).unsqueeze(1)  # a first step is half a step
    row = gamma.unsqueeze(1)
    return beta * f - (row @ dX).squeeze(1) - beta * (row @ dF).squeeze(1)
