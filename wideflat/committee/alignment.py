"""Hidden units of replicas in the same order: a committee machine does not change when its units are permuted."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["align", "assign"]


def assign(score: np.ndarray) -> np.ndarray:
    """The permutation p that maximises sum_i score[i, p[i]] (the Hungarian method with potentials).

    Example:
        >>> assign(np.array([[1.0, 9.0, 8.0], [0.0, 8.0, 1.0], [2.0, 3.0, 4.0]])).tolist()
        [2, 1, 0]
    """
    cost = -np.asarray(score, dtype=float)
    n = len(cost)
    row_potential, column_potential = np.zeros(n + 1), np.zeros(n + 1)
    row_of = np.zeros(n + 1, dtype=int)  # column -> row, both from 1; 0 is free
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        shortest, used = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=bool)
        before = np.zeros(n + 1, dtype=int)
        while row_of[column]:
            used[column] = True
            i = row_of[column]
            reduced = cost[i - 1] - row_potential[i] - column_potential[1:]
            better = ~used[1:] & (reduced < shortest[1:])
            shortest[1:][better] = reduced[better]
            before[1:][better] = column
            nearest = int(np.where(used, np.inf, shortest)[1:].argmin()) + 1
            delta = shortest[nearest]
            row_potential[row_of[used]] += delta
            column_potential[used] -= delta
            shortest[~used] -= delta
            column = nearest
        while column:
            row_of[column] = row_of[before[column]]
            column = before[column]
    permutation = np.empty(n, dtype=int)
    permutation[row_of[1:] - 1] = np.arange(n)
    return permutation


def align(weights: Tensor) -> Tensor:
    """Permute the hidden units of each replica to overlap most with those of the first; (y, H, N) -> (y, H, N).

    The network that a replica computes stays the same, since all units vote with equal weight.
    """
    first = weights[0].double()
    aligned = [weights[0]]
    for replica in weights[1:]:
        aligned.append(replica[torch.from_numpy(assign((first @ replica.double().T).numpy()))])
    return torch.stack(aligned)
