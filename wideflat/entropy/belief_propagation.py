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

The fixed point itself is found by :mod:`wideflat.entropy.fixed_point`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from wideflat.committee.channel import vote_channel

__all__ = ["TAP", "Closure", "FixedPoint", "Problem", "RelaxedBP", "UnreducedBP", "evaluate"]


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


def evaluate(problem: Problem, closure: Closure, delta: float, g: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """The free entropy and the distance at (g, V), in float64: what is lost in float32 enters squared."""
    g64, V64 = g.double(), V.double()
    log_z_out, _, G = problem.to(torch.float64).channel(g64, V64, delta)
    pull = g64 * (g64 @ problem.gram.double())
    E, variance = closure.entropy(G, V64, delta)
    log_z = log_z_out.sum(-1) + (0.5 * V64 * g64.square() - 0.5 * delta * pull).sum((0, 2)) + E
    return log_z, 0.5 * (delta**2 * pull.sum((0, 2)) + variance)
