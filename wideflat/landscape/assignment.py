"""Linear assignment: the permutation of largest total gain (the Hungarian method by shortest augmenting paths)."""

from __future__ import annotations

import numpy as np

__all__ = ["assignment"]


def assignment(gain: np.ndarray) -> np.ndarray:
    """The columns p that maximise sum_i gain[i, p[i]], each used once; n^3 operations, n of them at a time.

    Example:
        >>> assignment(np.array([[1.0, 5.0], [0.0, 3.0]])).tolist()  # 5 + 0 < 1 + 3 is false: 5 + 0 = 5 is more
        [1, 0]
    """
    if gain.ndim != 2 or gain.shape[0] != gain.shape[1] or not np.isfinite(gain).all():
        raise ValueError(f"gain must be a square matrix of finite numbers, got shape {gain.shape}")
    n = len(gain)
    cost = -gain.astype(float)
    u, v = np.zeros(n + 1), np.zeros(n + 1)  # prices of rows and columns; column n is where a path begins
    row_of = np.full(n + 1, n)  # n: not assigned
    for i in range(n):
        row_of[n], column = i, n
        least, before = np.full(n, np.inf), np.full(n, n)
        seen = np.zeros(n + 1, dtype=bool)
        while row_of[column] != n:
            seen[column] = True
            row = row_of[column]
            reduced = cost[row] - u[row] - v[:n]
            closer = ~seen[:n] & (reduced < least)
            least[closer], before[closer] = reduced[closer], column
            following = int(np.where(seen[:n], np.inf, least).argmin())
            delta = least[following]
            u[row_of[seen]] += delta
            v[seen] -= delta
            least[~seen[:n]] -= delta
            column = following
        while column != n:
            row_of[column] = row_of[before[column]]
            column = before[column]
        row_of[n] = n
    found = np.empty(n, dtype=int)
    found[row_of[:n]] = np.arange(n)
    return found
