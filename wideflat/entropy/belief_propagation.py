r"""Belief Propagation on the committee machine: the free entropy of the solutions around a reference (Appendix B.1).

A committee of H units with weights w (H x N, each unit scaled to norm sqrt N) classifies P patterns x_mu with targets
y_mu. The question is how much of a Gaussian of variance Delta around w classifies all of them right:

.. code-block:: text

    Z(Delta) = E over w' ~ N(w, Delta) of prod_mu 1[ y_mu sum_h sign(w'_h . x_mu / sqrt N) > 0 ]

Relaxed BP sends Gaussian messages between the H N weights and the P patterns. At its fixed points the H x P x N means
are known from g (H x P): the posterior mean of the weights is w + Delta x^T g / sqrt N, so the N-dimensional vectors
never have to be formed. With kappa = w x / sqrt N the pre-activations of the reference and K = x x^T / N the overlaps
of the patterns, what is left is

.. code-block:: text

    omega = kappa + Delta K g - V g          mean of the cavity field
    (g, G) = channel(omega, V, y)            wideflat.committee.channel
    V      = closure(G)                      variance of the cavity field

and the free entropy is the stationary value over g, V and A of

.. code-block:: text

    log Z = sum_mu log Z_out(omega, V) - 1/2 g Delta K g + 1/2 sum V g^2 + E(V, A)

Its derivatives vanish exactly where the three equations hold, so an error of the fixed point enters log Z squared. The
methods differ in the closure and its E alone:

.. code-block:: text

    relaxed BP   1/v = 1/Delta + sum_mu A,   1/V = 1/v - A,   A = (G/N) / (1 - V G/N)
                 E = N/2 sum_h [ -log(1 + Delta sum_mu A) + sum_mu log(1 + A V) ]
    TAP          the same to first order in A: V = v, A = G/N,   log(1 + A V) -> A V
    EP           the whole covariance of the fields: wideflat.entropy.expectation_propagation

With inputs +-1 there is one v for each unit. For others the variances depend on the input: v and A get an index i, and
V_mu = sum_i x_mui^2 v_imu / N.

**Convergence.** Real images overlap: the largest eigenvalue of K is 300 for 500 of them, and the plain iteration needs
damping of 0.99 and thousands of steps. Here the fixed point is found by Anderson acceleration of a preconditioned map.
Linearised, the residual of g is -(1 + G (Delta K - V)) times the error of g; the preconditioner inverts this matrix
with K replaced by its leading eigenvectors (Woodbury), which are what makes the plain iteration slow. About ten
iterations a point remain, and there is no damping to choose. What decides is always the residual of the plain,
undamped map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from wideflat.committee.channel import vote_channel

__all__ = ["TAP", "Closure", "FixedPoint", "Problem", "RelaxedBP", "UnreducedBP", "solve", "sweep"]

#: The residual below which a point counts as converged (at least 1e-6 for costly closures). It enters log Z squared.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


@dataclass
class Problem:
    """The references and the patterns, as the message passing sees them.

    Attributes:
        kappa: Pre-activations w x / sqrt N of the R references, shape (H, R, P).
        gram: Overlaps x x^T / N of the patterns, shape (P, P).
        squares: The squared inputs, shape (P, N), or None if all are 1.
        target: +1 or -1, shape (P,).
        keep: Which patterns are constraints, shape (R, P), or None for all.
        num_inputs: N.
        eigenvalues: The leading ones of the Gram matrix less the mean of its diagonal, shape (k,).
        eigenvectors: Theirs, shape (P, k).
        eigenvector_pairs: Products of two of them, shape (P, k^2).
    """

    kappa: Tensor
    gram: Tensor
    squares: Tensor | None
    target: Tensor
    keep: Tensor | None
    num_inputs: int
    eigenvalues: Tensor
    eigenvectors: Tensor
    eigenvector_pairs: Tensor

    @classmethod
    def of(cls, weights: Tensor, inputs: Tensor, target: Tensor, keep: Tensor | None = None) -> Problem:
        """The problem of weights (R, H, N), whose hidden units are scaled here, inputs (P, N) and targets (P,).

        Args:
            weights: The references, none of whose hidden units may be zero.
            inputs: The patterns.
            target: Their classes, +1 or -1.
            keep: Which patterns are constraints for which reference, shape (R, P); None for all.
        """
        patterns, num_inputs = inputs.shape
        w = weights * (math.sqrt(num_inputs) / weights.norm(dim=-1, keepdim=True))
        kappa = (w @ inputs.T / math.sqrt(num_inputs)).transpose(0, 1).contiguous()
        gram = inputs @ inputs.T / num_inputs
        squares = inputs.square()
        leading = min(20, patterns)
        values, vectors = torch.linalg.eigh(gram.double())
        U = vectors.flip(1)[:, :leading].to(gram.dtype).contiguous()
        excess = (values.flip(0)[:leading] - gram.diagonal().double().mean()).clamp(min=0)
        return cls(
            kappa=kappa,
            gram=gram,
            squares=None if bool((squares == 1).all()) else squares,
            target=target,
            keep=keep,
            num_inputs=num_inputs,
            eigenvalues=excess.to(gram.dtype),
            eigenvectors=U,
            eigenvector_pairs=(U.unsqueeze(2) * U.unsqueeze(1)).flatten(1),
        )

    def to(self, dtype: torch.dtype) -> Problem:
        """The same problem in another precision."""
        return replace(
            self,
            kappa=self.kappa.to(dtype),
            gram=self.gram.to(dtype),
            squares=None if self.squares is None else self.squares.to(dtype),
            target=self.target.to(dtype),
            eigenvalues=self.eigenvalues.to(dtype),
            eigenvectors=self.eigenvectors.to(dtype),
            eigenvector_pairs=self.eigenvector_pairs.to(dtype),
        )

    def select(self, index: Tensor) -> Problem:
        """The problem of some of the references only."""
        return replace(self, kappa=self.kappa[:, index], keep=None if self.keep is None else self.keep[index])

    def channel(self, g: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor, Tensor]:
        """``(log Z_out, g, G)`` of the cavity fields that belong to (g, V); zero for patterns that are not kept."""
        omega = torch.addcmul(self.kappa, g, V, value=-1).add_(g @ self.gram, alpha=delta)
        log_z, g, G = vote_channel(omega, V, self.target)
        if self.keep is not None:
            log_z, g, G = log_z * self.keep, g * self.keep, G * self.keep
        return log_z, g, G


class Closure(Protocol):
    """How the variances of the cavity fields follow from the curvatures G of the channel.

    ``costly`` closures are evaluated with g converged at fixed V, others at every iteration.
    """

    costly: bool

    def cavity(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """The new V, shape (H, R, P), and which of the references have positive variances only, shape (R,)."""
        ...

    def entropy(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """E(V, A) and the variance of the weights summed over all H N of them, both of shape (R,)."""
        ...


class RelaxedBP:
    """Relaxed BP with inputs +-1: one variance for each hidden unit."""

    costly = False

    def __init__(self, num_inputs: int) -> None:
        self.num_inputs = num_inputs

    def _precisions(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        A = G / (self.num_inputs - V * G)
        return A, 1 / delta + A.sum(-1, keepdim=True)

    def cavity(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """1/V = 1/v - A."""
        A, precision = self._precisions(G, V, delta)
        floor = 0.05 / delta
        valid = (precision > floor).all(-1).all(0)
        return 1 / (precision.clamp(min=floor) - A).clamp(min=floor), valid

    def entropy(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """E = N/2 sum_h [-log(1 + Delta sum_mu A) + sum_mu log(1 + A V)] and N sum_h v."""
        A, precision = self._precisions(G, V, delta)
        E = (A * V).log1p().sum((0, 2)) - (precision * delta).log().sum((0, 2))
        return 0.5 * self.num_inputs * E, self.num_inputs * (1 / precision).sum((0, 2))


class TAP:
    """TAP (the equations of AMP): the weights' own variance in place of the cavity variance; any inputs."""

    costly = False

    def __init__(self, num_inputs: int, squares: Tensor | None = None) -> None:
        self.num_inputs = num_inputs
        self.squares = squares

    def _precision(self, G: Tensor, delta: float) -> Tensor:
        """1/v of shape (H, R, N), or (H, R, 1) where the inputs are +-1."""
        curvature = G.sum(-1, keepdim=True) if self.squares is None else G @ self.squares
        return 1 / delta + curvature / self.num_inputs

    def cavity(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """V = v, or sum_i x_i^2 v_i / N."""
        precision = self._precision(G, delta)
        valid = (precision > 0.05 / delta).all(-1).all(0)
        v = 1 / precision.clamp(min=0.05 / delta)
        return v.expand_as(V) if self.squares is None else v @ self.squares.T / self.num_inputs, valid

    def entropy(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """E = -1/2 sum_hi log(1 + Delta sum_mu A) + 1/2 sum G V and the sum of v."""
        precision = self._precision(G, delta)
        copies = self.num_inputs / precision.shape[-1]  # one v may stand for N
        E = 0.5 * (G * V).sum((0, 2)) - 0.5 * copies * (precision * delta).log().sum((0, 2))
        return E, copies * (1 / precision).sum((0, 2))


class UnreducedBP:
    """Relaxed BP with any inputs: the H x P x N variances of the messages, one reference and unit at a time."""

    costly = True

    def __init__(self, num_inputs: int, squares: Tensor) -> None:
        self.num_inputs = num_inputs
        self.share = squares / num_inputs  # x^2 / N
        self.diagonal = self.share.sum(-1)

    def _messages(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor, Tensor]:
        """A and the cavity variances (P, N) and the precisions (N,) for G and V of one unit (P,)."""
        q = self.share * G.unsqueeze(-1)
        floor = 0.05 / delta
        v = (V / self.diagonal.clamp(min=1e-300)).clamp(max=1 / floor).unsqueeze(-1).expand_as(q)
        for _ in range(200):
            A = q / (1 - v * q)
            precision = 1 / delta + A.sum(0)
            new = 1 / (precision.clamp(min=floor) - A).clamp(min=floor)
            change = (new / v - 1).abs().max()
            v = new
            if change < 4 * torch.finfo(v.dtype).eps:
                break
        return q / (1 - v * q), v, precision

    def cavity(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """V_mu = sum_i x_i^2 v_imu / N."""
        new, valid = torch.empty_like(V), torch.ones(V.shape[1], dtype=torch.bool, device=V.device)
        for h in range(V.shape[0]):
            for r in range(V.shape[1]):
                _, v, precision = self._messages(G[h, r], V[h, r], delta)
                new[h, r] = (self.share * v).sum(-1)
                valid[r] &= (precision > 0.05 / delta).all()
        return new, valid

    def entropy(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """E = 1/2 sum_hi [-log(1 + Delta sum_mu A) + sum_mu log(1 + A v)] + 1/2 sum_hmu G (V - sum_i x_i^2 v / N).

        Returned with the sum of v. The last term is zero at the fixed point and makes E stationary around it.
        """
        E, variance = V.new_zeros(V.shape[1]), V.new_zeros(V.shape[1])
        for h in range(V.shape[0]):
            for r in range(V.shape[1]):
                A, v, precision = self._messages(G[h, r], V[h, r], delta)
                E[r] += 0.5 * ((A * v).log1p().sum() - (precision * delta).log().sum())
                E[r] += 0.5 * (G[h, r] * (V[h, r] - (self.share * v).sum(-1))).sum()
                variance[r] += (1 / precision).sum()
        return E, variance


@dataclass
class FixedPoint:
    r"""What the message passing found at one Delta for R references.

    Attributes:
        delta: The Delta.
        g: First derivatives of the channel, shape (H, R, P).
        V: Variances of the cavity fields, shape (H, R, P).
        log_z: The free entropy log Z, shape (R,).
        distance: d* = E \|w' - w\|^2 / 2, shape (R,).
        residual: Of the undamped map: the largest change of sqrt(Delta) g and of log V, shape (R,).
        iterations: Evaluations of the channel, shape (R,).
        converged: Whether the residual is below the tolerance, shape (R,).
    """

    delta: float
    g: Tensor
    V: Tensor
    log_z: Tensor
    distance: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor

    def select(self, index: Tensor) -> FixedPoint:
        """The part that belongs to some of the references."""
        rest = (t[index] for t in (self.log_z, self.distance, self.residual, self.iterations, self.converged))
        return FixedPoint(self.delta, self.g[:, index], self.V[:, index], *rest)

    def put(self, index: Tensor, other: FixedPoint) -> None:
        """Take over, for some of the references, what another computation found."""
        self.g[:, index], self.V[:, index] = other.g, other.V
        for name in ("log_z", "distance", "residual", "iterations", "converged"):
            getattr(self, name)[index] = getattr(other, name)


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
            _try_again(problem, closure, delta, good, point, failed, tolerance, max_iterations)
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
    problem: Problem,
    closure: Closure,
    delta: float,
    good: FixedPoint | None,
    point: FixedPoint,
    failed: Tensor,
    tolerance: float | None,
    max_iterations: int,
) -> None:
    """Improve ``point`` in place for the references that failed."""
    first = delta / 30 if good is None else good.delta
    old = None if good is None else good.select(failed)
    ladder = [first * (delta / first) ** (k / 4) for k in range(1, 4)] + [delta]
    for path in ([delta], ladder):
        state = None if len(path) == 1 else old
        spent = point.iterations[failed]
        for step in path:
            state = solve(problem.select(failed), closure, step, state, tolerance, max_iterations)
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
    references = problem.kappa.shape[1]
    iterations = torch.zeros(references, dtype=torch.long, device=g.device)
    if closure.costly:
        g, V, residual = _solve_nested(problem, closure, delta, g, V, tolerance, max_iterations, iterations)
    else:
        g, V, residual = _accelerate(problem, closure, delta, g, V, tolerance, max_iterations, iterations)
    return _evaluate(problem, closure, delta, g, V, residual, iterations, tolerance)


def _evaluate(
    problem: Problem,
    closure: Closure,
    delta: float,
    g: Tensor,
    V: Tensor,
    residual: Tensor,
    iterations: Tensor,
    tolerance: float,
) -> FixedPoint:
    """The free entropy and the distance at (g, V), in float64: what is lost in float32 enters squared."""
    g64, V64 = g.double(), V.double()
    log_z_out, _, G = problem.to(torch.float64).channel(g64, V64, delta)
    pull = g64 * (g64 @ problem.gram.double())
    E, variance = closure.entropy(G, V64, delta)
    log_z = log_z_out.sum(-1) + (0.5 * V64 * g64.square() - 0.5 * delta * pull).sum((0, 2)) + E
    distance = 0.5 * (delta**2 * pull.sum((0, 2)) + variance)
    converged = (residual < tolerance) & log_z.isfinite()
    return FixedPoint(delta, g, V, log_z, distance, residual, iterations, converged)


def _accelerate(
    problem: Problem,
    closure: Closure | None,
    delta: float,
    g: Tensor,
    V: Tensor,
    tolerance: float,
    max_iterations: int,
    iterations: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Anderson acceleration of the preconditioned map of (g, V), or of g alone if there is no closure.

    ``iterations`` is counted up in place. Returns g, V and the residual of each reference.
    """
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

    frozen, prior = V, delta * problem.gram.diagonal()
    state = torch.empty(references, moving, hidden, patterns, dtype=g.dtype, device=g.device)
    state[:, 0] = (g * root).transpose(0, 1)
    if closure is not None:
        state[:, 1] = (V / prior).log().transpose(0, 1)
    state, residual = _anderson(residual_map, state, tolerance, max_iterations, iterations)
    g = (state[:, 0].transpose(0, 1) / root).contiguous()
    return g, V if closure is None else _variance(state[:, 1], prior), residual


def _variance(state: Tensor, prior: Tensor) -> Tensor:
    """V (H, R, P) from log(V / prior) (R, H, P)."""
    return prior * state.transpose(0, 1).exp()


def _solve_nested(
    problem: Problem,
    closure: Closure,
    delta: float,
    g: Tensor,
    V: Tensor,
    tolerance: float,
    max_iterations: int,
    iterations: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Anderson acceleration of the map of log V, each of whose evaluations finds the g that belongs to V."""
    g = g.clone()

    def residual_map(index: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        part = problem.select(index)
        V = _variance(state[:, 0], prior)
        count = iterations[index]
        limit = max_iterations if count.min() < 5 * max_iterations else 1  # enough was spent: only look where it is
        found, _, inner = _accelerate(part, None, delta, g[:, index], V, 0.1 * tolerance, limit, count)
        iterations[index] = count
        good = inner.isfinite() & (inner < 1)
        g[:, index[good]] = found[:, good]
        _, _, G = part.channel(found, V, delta)
        V_new, valid = closure.cavity(G, V, delta)
        step = (V_new / V).log()
        residual = torch.maximum(step.abs().amax((0, 2)), inner)
        return step.transpose(0, 1).unsqueeze(1), torch.where(valid, residual, residual.clamp(min=1.0))

    outer = torch.zeros_like(iterations)
    prior = delta * problem.gram.diagonal()
    state = (V / prior).log().transpose(0, 1).unsqueeze(1)
    state, residual = _anderson(residual_map, state, tolerance, max(max_iterations // 10, 1), outer)
    V = _variance(state[:, 0], prior)
    g, _, inner = _accelerate(problem, None, delta, g, V, 0.1 * tolerance, max_iterations, iterations)
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


def _anderson(
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
