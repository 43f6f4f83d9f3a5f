"""Quadrature rules and eigenvalues of small matrices, whose spectra are known."""

import numpy as np
import pytest
import torch

from wideflat.hessian.lanczos import Krylov, lanczos
from wideflat.progress import Progress


def symmetric(values, seed=0):
    """A matrix of these eigenvalues in a random basis, and the basis."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.as_tensor(values, dtype=torch.float64)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    return q * values @ q.T, q


def largest(matrix, top, max_iterations=100, tolerance=1e-10):
    with Progress("lanczos", enabled=False) as bar:
        return lanczos(
            lambda columns: matrix @ columns, matrix[0], top, tolerance, max_iterations,
            torch.Generator().manual_seed(1), bar,
        )  # fmt: skip


def rules(matrix, starts, steps):
    iteration = Krylov(starts, steps)
    while not iteration.ended:
        iteration.take(matrix @ iteration.columns)
    return iteration.rules()


def test_the_rule_is_exact_for_polynomials_of_degree_2m_minus_1():
    matrix, _ = symmetric(np.linspace(-2, 3, 12))
    starts = torch.randn(12, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for start, rule in zip(starts.T, rules(matrix, starts, 4), strict=True):
        q = start / start.norm()
        moments = [float(q @ torch.linalg.matrix_power(matrix, k) @ q) for k in range(9)]
        found = [float((rule.weights * rule.nodes**k).sum()) for k in range(9)]
        assert found[:8] == pytest.approx(moments[:8], abs=1e-10)
        assert abs(found[8] - moments[8]) > 1e-3  # and not beyond


def test_residuals_bound_the_distance_to_an_eigenvalue():
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 16.5, 30.0, 31.0])
    matrix, _ = symmetric(values)
    (rule,) = rules(matrix, torch.ones(8, 1, dtype=torch.float64), 5)
    distance = np.abs(rule.nodes[:, None] - values).min(1)
    assert (distance <= rule.residuals + 1e-12).all() and rule.residuals.max() > 0.1


def test_a_start_within_few_eigenvectors_ends_early_beside_one_that_does_not():
    matrix, q = symmetric([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    starts = torch.stack([q[:, 0] + q[:, 3], q.sum(1)], 1)
    short, long = rules(matrix, starts, 6)
    assert short.nodes == pytest.approx([1, 4]) and short.weights == pytest.approx([0.5, 0.5])
    assert long.nodes == pytest.approx([1, 2, 3, 4, 5, 6]) and long.weights == pytest.approx([1 / 6] * 6)


def test_the_largest_eigenvalues_with_their_vectors():
    values = np.concatenate([np.linspace(-1, 1, 40), [5.0, 7.0, -20.0]])
    matrix, _ = symmetric(values)
    found, bounds, vectors = largest(matrix, 2)
    assert found == pytest.approx([7, 5]) and (bounds < 1e-8).all()  # by sign, not by size
    for value, vector in zip(found, vectors, strict=True):
        assert float(vector.norm()) == pytest.approx(1)
        assert torch.allclose(matrix @ vector, value * vector, atol=1e-8)
    assert abs(float(vectors[0] @ vectors[1])) < 1e-8


def test_no_eigenvalue_appears_twice_however_long_it_goes_on():
    values = 2.0 ** np.arange(30)  # where the plain iteration finds the largest again and again
    found, _, _ = largest(symmetric(values)[0], 4, tolerance=1e-14)
    assert found == pytest.approx(values[:-5:-1], rel=1e-6)


def test_an_iteration_that_is_cut_off_says_so():
    matrix, _ = symmetric(np.linspace(0, 1, 60))
    with pytest.warns(UserWarning, match="3 iterations left a relative residual"):
        found, bounds, _ = largest(matrix, 2, max_iterations=3)
    assert (np.abs(found[:, None] - np.linspace(0, 1, 60)).min(1) <= bounds + 1e-12).all()


def test_more_than_there_are_and_none():
    matrix, _ = symmetric([3.0, 1.0])
    assert largest(matrix, 5)[0] == pytest.approx([3, 1])
    assert len(largest(matrix, 0)[0]) == 0
