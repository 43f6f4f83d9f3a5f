r"""Expectation propagation: the closure of ``wideflat.entropy.belief_propagation`` that sees how the patterns overlap.

The fields of one hidden unit on the P patterns are jointly Gaussian under the prior, with covariance Delta K,
K = x x^T / N. Belief Propagation keeps of this the variances alone, as if the weights were independent given the
patterns; on images, which overlap by 0.6 and more, that counts the same constraint many times over. Here the posterior
of the fields is Gaussian with its whole covariance, each pattern and unit contributing a site exp(-a z^2/2 + b z):

.. code-block:: text

    Sigma = Delta K (1 + a Delta K)^-1                    (P x P, for each unit)
    a     = G / (1 - V G)        1/V = 1/Sigma_mumu - a   (the site, and the variance without it)
    E     = sum_h [ -1/2 log det(1 + a Delta K) + 1/2 sum_mu log(1 + a V) ]

The means need no equation of their own: b - a mu = g at the fixed point, so they are the omega = kappa + Delta K g - V
g of Belief Propagation. (This is also known as adaptive TAP.) Relaxed BP is the same with the covariance of the
weights replaced by a multiple of the identity.

**Between hidden units.** What this leaves out is the correlation between hidden units that a pattern causes: where one
votes right, the others need to less. ``vector_sites`` adds it, to the order at which sites are Gaussian: each pattern
gets a site over the vector of its H fields, with the matrix

.. code-block:: text

    A_mu = (V + V J V)^-1 - V^-1,          J = d^2 log Z_out / d omega d omega^T     (H x H, for each pattern)

in place of the diagonal a, and E becomes -1/2 log det(1 + A Delta K) + 1/2 sum_mu log det(1 + A_mu V_mu), a determinant
of H P dimensions. The cavities stay those of EP, whose moments are not found again with the new sites.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wideflat.committee.channel import vote_hessian
from wideflat.entropy.belief_propagation import FixedPoint, Problem

__all__ = ["FullCovariance", "vector_sites"]


class FullCovariance:
    """The closure with the full covariance of the fields of each unit; any inputs.

    Args:
        gram: Overlaps x x^T / N of the patterns, shape (P, P).
        num_inputs: N.
    """

    costly = True

    def __init__(self, gram: Tensor, num_inputs: int) -> None:
        self.gram = gram.double()
        self.num_inputs = num_inputs

    def cavity(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """1/V = 1/Sigma_mumu - a with a = G / (1 - V G)."""
        new, valid = torch.empty_like(V), torch.ones(V.shape[1], dtype=torch.bool, device=V.device)
        for r in range(V.shape[1]):
            for h in range(V.shape[0]):
                a = _sites(G[h, r].double(), V[h, r].double())
                found = _posterior(self.gram, a, delta)
                if found is None:  # on the way only: a valid fixed point has a covariance
                    valid[r] = False
                    found = _posterior(self.gram, a.clamp(min=0), delta)
                    assert found is not None
                diagonal, _ = found
                precision = 1 / diagonal - a
                floor = 1e-3 / diagonal
                valid[r] &= (precision > floor).all()
                new[h, r] = (1 / torch.maximum(precision, floor)).to(V.dtype)
        return new, valid

    def entropy(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """E (above), and the variance of the weights, for each unit Delta (N - sum_mu a_mu Sigma_mumu)."""
        E, variance = V.new_zeros(V.shape[1]), V.new_zeros(V.shape[1])
        for r in range(V.shape[1]):
            for h in range(V.shape[0]):
                a = _sites(G[h, r], V[h, r])
                found = _posterior(self.gram, a, delta)
                if found is None:
                    E[r] = variance[r] = torch.nan
                    continue
                diagonal, log_det = found
                E[r] += 0.5 * ((a * V[h, r]).log1p().sum() - log_det)
                variance[r] += delta * (self.num_inputs - (a * diagonal).sum())
        return E, variance


def _posterior(gram: Tensor, a: Tensor, delta: float) -> tuple[Tensor, Tensor] | None:
    """Diagonal of Sigma = (1/(Delta K) + a)^-1 and log det(1 + a Delta K), or None if Sigma is not positive.

    K may be singular. Patterns with a = 0 cost nothing. First those with a > 0 are taken in: with
    B = 1 + sqrt(a) Delta K sqrt(a) = C C^T, Sigma_+ = Delta K - Delta K sqrt(a) B^-1 sqrt(a) Delta K. Then those with
    a < 0, which are few, by the same formula with the other sign; Sigma is positive if 1 - sqrt|a| Sigma_+ sqrt|a| is.
    """
    diagonal = delta * gram.diagonal()
    negligible = 1e-13 / diagonal.max()
    plus, minus = (a > negligible).nonzero().squeeze(1), (a < -negligible).nonzero().squeeze(1)
    root = a[plus].sqrt()
    rows = delta * root.unsqueeze(1) * gram[plus]
    B = rows[:, plus] * root
    B.diagonal().add_(1)
    factor = torch.linalg.cholesky(B)
    half = torch.linalg.solve_triangular(factor, rows, upper=False)
    diagonal = diagonal - half.square().sum(0)
    log_det = 2 * factor.diagonal().log().sum()
    if len(minus):
        root = a[minus].neg().sqrt()
        rows = root.unsqueeze(1) * (delta * gram[minus] - half[:, minus].T @ half)
        B = -rows[:, minus] * root
        B.diagonal().add_(1)
        factor, info = torch.linalg.cholesky_ex(B)
        if info:
            return None
        diagonal = diagonal + torch.linalg.solve_triangular(factor, rows, upper=False).square().sum(0)
        log_det = log_det + 2 * factor.diagonal().log().sum()
    return diagonal, log_det


def _sites(G: Tensor, V: Tensor) -> Tensor:
    """Sites a = G / (1 - V G). The variance V - V^2 G of a field given its pattern is positive, so 1 - V G is."""
    return G / (1 - V * G).clamp(min=1e-12)


def vector_sites(problem: Problem, point: FixedPoint) -> Tensor:
    """What correlations between hidden units add to log Z of a fixed point of EP, shape (R,): see the head of the file.

    Costs a Cholesky factorisation of H P dimensions for each reference.
    """
    gram, delta = problem.gram.double(), point.delta
    values, vectors = torch.linalg.eigh(gram)
    seen = values > 1e-12 * values[-1]
    L = vectors[:, seen] * (delta * values[seen]).sqrt()  # Delta K = L L^T
    rank = L.shape[1]
    hidden, references, _ = point.g.shape
    found = torch.zeros(references, dtype=torch.float64, device=gram.device)
    if hidden == 1:
        return found
    for r in range(references):
        g, V = point.g[:, r].double(), point.V[:, r].double()
        omega = problem.kappa[:, r].double() + delta * g @ gram - V * g
        J = vote_hessian(omega, V, problem.target.double())
        if problem.keep is not None:
            J = J * problem.keep[r]
        identity = torch.eye(hidden, dtype=J.dtype, device=J.device)
        VJ = V.T.unsqueeze(2) * J.permute(2, 0, 1)  # (P, H, H)
        A = -torch.linalg.solve(identity + VJ, J.permute(2, 0, 1), left=False)  # -J (1 + V J)^-1
        E = -torch.linalg.slogdet(identity + VJ).logabsdet.sum()
        # the diagonal alone, as in E of FullCovariance
        a = _sites(-J.diagonal().T, V)
        E = E - (a * V).log1p().sum()
        B = L.new_empty(hidden, rank, hidden, rank)
        for h in range(hidden):
            E = E + _log_det(L.T @ (a[h].unsqueeze(1) * L))
            for k in range(h + 1):
                block = L.T @ (A[:, h, k].unsqueeze(1) * L)
                B[h, :, k], B[k, :, h] = block, block.T
        E = E - _log_det(B.reshape(hidden * rank, hidden * rank))
        found[r] = 0.5 * E
    return found


def _log_det(B: Tensor) -> Tensor:
    """Logarithm of det(1 + B) for B symmetric, which is changed; NaN if 1 + B is not positive."""
    B.diagonal().add_(1)
    factor, info = torch.linalg.cholesky_ex(B)
    return 2 * factor.diagonal().log().sum() if info == 0 else B.new_tensor(torch.nan)
