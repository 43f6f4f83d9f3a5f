r"""Expectation propagation: the closure of ``wideflat.belief_propagation`` that sees how the patterns overlap.

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
weights replaced by a multiple of the identity. What is still left out is the correlation between hidden units that a
pattern causes.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FullCovariance"]


class FullCovariance:
    """The closure with the full covariance of the fields of each unit; any inputs.

    Args:
        gram: Overlaps x x^T / N of the patterns, shape (P, P).
        num_inputs: N.
    """

    costly = True

    def __init__(self, gram: Tensor, num_inputs: int) -> None:
        values, vectors = torch.linalg.eigh(gram.double())
        rank = values > 1e-12 * values[-1]
        self.root = vectors[:, rank] * values[rank].sqrt()  # K = root root^T, shape (P, rank)
        self.num_inputs = num_inputs

    def _factor(self, a: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """Cholesky factors of 1 + Delta root^T a root for a (H, P), and whether each is positive definite."""
        B = self.root.T @ (a.unsqueeze(-1) * (delta * self.root))
        B.diagonal(dim1=-2, dim2=-1).add_(1)
        factor, info = torch.linalg.cholesky_ex(B)
        return factor, info == 0

    def cavity(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """1/V = 1/Sigma_mumu - a with a = G / (1 - V G)."""
        new, valid = torch.empty_like(V), torch.ones(V.shape[1], dtype=torch.bool, device=V.device)
        for r in range(V.shape[1]):
            a = _sites(G[:, r].double(), V[:, r].double())
            factor, positive = self._factor(a, delta)
            if not positive.all():  # on the way only: a valid fixed point has a covariance
                valid[r] = False
                a = a.clamp(min=0)
                factor, _ = self._factor(a, delta)
            half = torch.linalg.solve_triangular(factor, self.root.T, upper=False)
            diagonal = delta * half.square().sum(-2)
            precision = 1 / diagonal - a
            floor = 1e-3 / diagonal
            valid[r] &= bool((precision > floor).all())
            new[:, r] = (1 / precision.clamp(min=floor)).to(V.dtype)
        return new, valid

    def entropy(self, G: Tensor, V: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """E (above), and the trace of the covariance of the weights, Delta (N - P) + Delta tr (1 + a Delta K)^-1."""
        E, variance = V.new_empty(V.shape[1]), V.new_empty(V.shape[1])
        rank = self.root.shape[1]
        for r in range(V.shape[1]):
            a = _sites(G[:, r], V[:, r])
            factor, positive = self._factor(a, delta)
            if not positive.all():
                E[r] = variance[r] = torch.nan
                continue
            log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum()
            E[r] = 0.5 * ((a * V[:, r]).log1p().sum() - log_det)
            trace = torch.cholesky_inverse(factor).diagonal(dim1=-2, dim2=-1).sum()
            variance[r] = delta * (len(a) * (self.num_inputs - rank) + trace)
        return E, variance


def _sites(G: Tensor, V: Tensor) -> Tensor:
    """Sites a = G / (1 - V G). The variance V - V^2 G of a field given its pattern is positive, so 1 - V G is."""
    return G / (1 - V * G).clamp(min=1e-12)
