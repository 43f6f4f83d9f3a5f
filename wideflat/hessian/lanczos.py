r"""Lanczos iteration: largest eigenvalues with vectors, and the quadrature rules that random vectors give.

A symmetric matrix A and a unit vector q give, after m products, a tridiagonal matrix T. Its eigenvalues theta_k and the
squares tau_k of the first components of its eigenvectors are a Gauss quadrature,

.. code-block:: text

    q^T f(A) q = sum_k tau_k f(theta_k),        exact for polynomials f of degree 2 m - 1.

Every new vector is made orthogonal to all before it, twice: without it eigenvalues appear several times.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from wideflat.kernels.float64 import fetched
from wideflat.progress import Progress

__all__ = ["Krylov", "Rule", "lanczos"]


class Rule:
    """The quadrature rule of one start vector.

    Attributes:
        nodes: The theta, rising.
        weights: The tau; their sum is 1.
        residuals: |A y - theta y| of each node's vector y, an upper bound of its distance to an eigenvalue.
    """

    def __init__(self, alpha: np.ndarray, beta: np.ndarray) -> None:
        matrix = np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1)
        self.nodes, vectors = np.linalg.eigh(matrix)
        self.weights = vectors[0] ** 2
        self.residuals = beta[-1] * np.abs(vectors[-1])


class Krylov:
    """Lanczos iterations of several start vectors side by side: what is asked for are products with their columns.

    Args:
        starts: The start vectors as columns, of any length but 0.
        steps: Products for each of them.

    Example:
        >>> a = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        >>> iteration = Krylov(torch.ones(3, 1, dtype=torch.float64), 3)
        >>> while not iteration.ended:
        ...     iteration.take(a[:, None] * iteration.columns)
        >>> rule = iteration.rules()[0]
        >>> rule.nodes.round(6).tolist(), rule.weights.round(6).tolist()
        ([1.0, 2.0, 3.0], [0.333333, 0.333333, 0.333333])
    """

    def __init__(self, starts: Tensor, steps: int) -> None:
        size, count = starts.shape
        self.steps, self._step = min(steps, size), 0
        self._basis = starts.new_zeros(count, self.steps, size)
        self._q = (starts / starts.norm(dim=0)).T  # (k, D)
        self._alpha, self._beta = np.zeros((self.steps, count)), np.zeros((self.steps, count))
        self._length = np.full(count, self.steps)

    @property
    def columns(self) -> Tensor:
        """The vectors whose products are needed next, shape (D, k)."""
        return self._q.T

    @property
    def ended(self) -> bool:
        """Whether no more products are needed."""
        return bool((self._length <= self._step).all())

    def take(self, products: Tensor) -> None:
        """Go on with the products of the columns."""
        j, v = self._step, products.T
        self._basis[:, j] = self._q
        along = (self._q * v).sum(1)
        known = self._basis[:, : j + 1]
        for _ in range(2):  # twice is enough
            v = v - torch.bmm(torch.bmm(known, v[:, :, None]).transpose(1, 2), known)[:, 0]
        self._alpha[j], beta = (numbers.numpy() for numbers in fetched([along, v.norm(dim=1)]))
        largest = np.maximum(np.abs(self._alpha[: j + 1]).max(0), self._beta[: j + 1].max(0))
        ended = beta <= 1e-6 * np.maximum(largest, 1e-30)  # the space that a vector lies in is used up
        self._length = np.where(ended & (self._length == self.steps), j + 1, self._length)
        self._beta[j] = np.where(ended, 0.0, beta)
        going = self._length > j + 1
        scale = np.where(going, 1 / np.where(going & (beta > 0), beta, 1.0), 0.0)
        self._q = v * torch.from_numpy(scale).to(v)[:, None]
        self._step += 1

    def rules(self) -> list[Rule]:
        """The quadrature rule of each start vector."""
        return [Rule(self._alpha[:n, k], self._beta[:n, k]) for k, n in enumerate(self._length)]


def lanczos(
    product: Callable[[Tensor], Tensor],
    like: Tensor,
    top: int,
    tolerance: float,
    max_iterations: int,
    generator: torch.Generator,
    bar: Progress,
) -> tuple[np.ndarray, np.ndarray, list[Tensor]]:
    """The ``top`` largest eigenvalues of a symmetric operator, with residuals and vectors (Lanczos, reorthogonalised).

    Args:
        product: Multiplies a matrix of columns by the operator.
        like: A vector of the right size, type and device.
        top: How many eigenvalues.
        tolerance: Residual relative to the eigenvalue of largest size at which the iteration ends.
        max_iterations: Most products.
        generator: Of the start vector.
        bar: Progress.
    """
    size = like.numel()
    top = min(top, size)
    if top == 0:
        return np.zeros(0), np.zeros(0), []
    q = torch.randn(size, generator=generator).to(like)
    basis = [q / q.norm()]
    alpha: list[float] = []
    beta: list[float] = []
    while True:
        v = product(basis[-1][:, None])[:, 0]
        along = basis[-1] @ v
        for _ in range(2):  # twice is enough
            for u in basis:
                v = v - (u @ v) * u
        for row, number in zip((alpha, beta), fetched([along, v.norm()]), strict=True):
            row.append(float(number))
        matrix = np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1)
        values, vectors = np.linalg.eigh(matrix)
        bound = beta[-1] * np.abs(vectors[-1])
        order = np.argsort(-values)[:top]
        largest = max(np.abs(values).max(), 1e-30)
        bar.advance(largest=float(values.max()))
        done = len(order) == top and bool((bound[order] <= tolerance * largest).all())
        exhausted = len(basis) == size or beta[-1] <= 1e-7 * largest
        if done or exhausted or len(basis) == max_iterations:
            if not (done or exhausted):
                warnings.warn(
                    f"{max_iterations} iterations left a relative residual of {bound[order].max() / largest:.1g} "
                    f"(tolerance {tolerance:g}); raise max_iterations or ask for fewer eigenvalues",
                    stacklevel=3,
                )
            found = [sum((float(c) * u for c, u in zip(vectors[:, k], basis, strict=True)), 0 * q) for k in order]
            return values[order], bound[order], found
        basis.append(v / beta[-1])
