r"""A network evaluated on all data at several points of the space of weights, with the error bars of a sample of data.

Every example is evaluated at every point, so differences between points are paired: with v_pi the metric of example i
at point p and s_i its weight (1, or the size of a batch for a metric that gives one number a batch),

.. code-block:: text

    mean_p       = sum_i s_i v_pi / sum_i s_i
    covariance   = n / (n - 1)  sum_i s_i^2 (v_pi - mean_p) (v_qi - mean_q) / (sum_i s_i)^2

The covariance is that over the data, as if they were drawn anew: nothing else is random here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from wideflat.evaluation.blocks import Blocks, cloned
from wideflat.evaluation.evaluation import Evaluation
from wideflat.kernels.float64 import fetched
from wideflat.noise.shared_noise import SharedNoise
from wideflat.progress import Progress

__all__ = ["Sample", "move", "sample"]


class Sample:
    """The metric of every example at every point.

    Args:
        values: Shape (points, n).
        weights: What each column counts, shape (n,).

    Example:
        >>> found = Sample(np.array([[0.0, 1.0], [1.0, 1.0]]), np.ones(2))
        >>> found.mean.tolist(), found.contrast(np.array([[-1.0, 1.0]])).covariance.tolist()
        ([0.5, 1.0], [[0.25]])
    """

    def __init__(self, values: np.ndarray, weights: np.ndarray) -> None:
        self.values, self.weights = values, weights
        self._share = weights / weights.sum()

    @property
    def mean(self) -> np.ndarray:
        """At each point."""
        return self.values @ self._share

    @property
    def covariance(self) -> np.ndarray:
        """Of the means over data, shape (points, points); NaN for a single example."""
        count = int((self.weights > 0).sum())
        deviation = (self.values - self.mean[:, None]) * self._share
        with np.errstate(invalid="ignore"):
            return deviation @ deviation.T * (count / (count - 1) if count > 1 else np.nan)

    @property
    def stderr(self) -> np.ndarray:
        """Of the means over data."""
        return np.sqrt(np.diag(self.covariance))

    @property
    def one_more(self) -> float:
        """What one more wrong answer adds to the mean of an error.

        An example of many answers (the words of a sentence) has the share of wrong ones: one answer is the least of it
        that was seen to be wrong, or to be right.
        """
        shares = np.concatenate([self.values.ravel(), 1 - self.values.ravel()])
        seen = shares[shares > 1e-9]
        return float(seen.min()) / float(self.weights.sum()) if len(seen) else 0.0

    def contrast(self, matrix: np.ndarray) -> Sample:
        """Linear combinations of points, example by example."""
        return Sample(matrix @ self.values, self.weights)


def sample(
    evaluation: Evaluation, blocks: Blocks, places: Sequence[Callable[[], None]], bar: Progress, writes: bool = True
) -> Sample:
    """Evaluate all data at each point.

    Args:
        evaluation: The network, inside ``evaluation.prepared()``.
        blocks: The data.
        places: One function a point, which moves the network there.
        bar: Advanced by one a point.
        writes: Give the network a copy of every batch, which it may write into.
    """
    rows, weights = [], np.empty(0)
    for place in places:
        place()
        row, shares = [], []
        for block in blocks.visit(0):
            batch = evaluation.load(block.batch)
            values = evaluation.values(cloned(batch) if writes else batch, block.size).reshape(-1)
            row.append(values)
            shares.append(np.full(len(values), evaluation.counted / len(values)))
        rows.append(np.concatenate([values.numpy() for values in fetched(row)]))  # the host waits once a point
        weights = np.concatenate(shares)
        bar.advance()
    return Sample(np.stack(rows), weights)


def move(
    evaluation: Evaluation, change: SharedNoise, directions: dict[str, Tensor], buffers: dict[str, Tensor] | None = None
) -> Callable[[float], None]:
    """A function that moves a network to w + t d, its buffers too where these have a direction."""
    own = dict(evaluation.model.named_buffers())
    start = {name: own[name].detach().clone() for name in buffers or {}}

    def to(t: float) -> None:
        change.point(directions)
        change.apply(t)
        with torch.no_grad():
            for name, direction in (buffers or {}).items():
                own[name].copy_(start[name] + t * direction)

    return to
