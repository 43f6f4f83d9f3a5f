r"""A network on the line or plane w + x d_1 + y d_2, one batch at many points.

The layer that sees the input is linear in x and y, so three of its products serve every point
(:mod:`wideflat.noise.first_layer`), maxima are pooled by a faster way (:mod:`wideflat.landscape.pooling`), and batch
norm is folded into convolutions where the network allows it. Whether that gives the outputs of the plain way (write the
weights, run) is tried on a few examples before anything is measured; where it does not, the plain way is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from wideflat.evaluation.blocks import Block, cloned, truncated
from wideflat.evaluation.evaluation import Evaluation
from wideflat.evaluation.folding import FoldedNetwork
from wideflat.evaluation.metrics import scores
from wideflat.landscape.pooling import FastPooling
from wideflat.noise.first_layer import FirstLayer
from wideflat.noise.shared_noise import SharedNoise

__all__ = ["Plane"]

#: Examples on which both ways are compared, and where.
LOOK, PLACE = 8, 0.37


class Plane:
    """A network that can be put at points of a plane through its weights.

    Args:
        evaluation: The network, inside ``evaluation.prepared()``.
        names: The parameters that move.
        directions: One or two directions, by the names of the parameters.
        first: A block of the data, to look at.

    Attributes:
        notes: What the reader of the result should know.
    """

    def __init__(
        self, evaluation: Evaluation, names: Sequence[str], directions: Sequence[dict[str, Tensor]], first: Block
    ) -> None:
        self.evaluation, self.names, self.directions = evaluation, list(names), list(directions)
        self.notes: list[str] = []
        self._batch: Any = None
        self._plain = False
        self._pooling: FastPooling | None = FastPooling()
        self._prepare(cloned(evaluation.load(first.batch)))
        if not self._agrees(truncated(first.batch, min(LOOK, first.size)), min(LOOK, first.size)):
            self._take_plain_way()
        elif self._pooling is not None and not self._pooling.seen:
            self._pooling = None

    def _prepare(self, batch: Any) -> None:
        evaluation = self.evaluation
        evaluation.fold(batch)
        folded = isinstance(evaluation.module, FoldedNetwork)
        network = evaluation.module.network if isinstance(evaluation.module, FoldedNetwork) else evaluation.model
        self._change = SharedNoise(network, self.names)
        self._ways = self._flattened(self._change)
        weights = self._change.originals()
        self._first = None if folded else FirstLayer(network, weights, self.directions, reuse=True)

    def _flattened(self, change: SharedNoise) -> list[list[Tensor]]:
        return [change.flattened(direction) for direction in self.directions]

    def _take_plain_way(self) -> None:
        self._plain, self._first, self._pooling = True, None, None
        self.evaluation.module = self.evaluation.model
        self._change = SharedNoise(self.evaluation.model, self.names, in_place=True)
        self._ways = self._flattened(self._change)
        self.notes.append("plain way: the fast one gave other outputs at the same point")

    def _agrees(self, batch: Any, size: int) -> bool:
        """Whether both ways have the same outputs at one point, and the network leaves its input alone."""
        point = (PLACE,) * len(self.directions)
        batch = self.evaluation.load(batch)
        try:
            with self:
                self.start(batch)
                before = _versions(self._batch)
                fast = scores(self._outputs(point)[0]).clone()
                if _versions(self._batch) != before:
                    return False
            module, self.evaluation.module = self.evaluation.module, self.evaluation.model
            try:
                with SharedNoise(self.evaluation.model, self.names, in_place=True) as change:
                    change.move(point, self._flattened(change))
                    slow = scores(self.evaluation.outputs(cloned(batch))[0])
            finally:
                self.evaluation.module = module
        except TypeError:  # outputs that are no tensor: only the metric knows what they are
            return False
        scale = max(float(slow.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()), 1e-6)
        return fast.shape == slow.shape and bool(
            torch.allclose(fast, slow, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)
        )

    def __enter__(self) -> Plane:
        self._change.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._change.__exit__()

    def start(self, batch: Any) -> None:
        """Begin with another batch."""
        self._batch = batch
        if self._first is not None:
            self._first.start(self.evaluation.source(batch))

    def values(self, point: Sequence[float], size: int) -> Tensor:
        """The metric of the examples of the batch at a point; copy what shall outlive the next one."""
        return self.evaluation.score(*self._outputs(point), size)

    def _outputs(self, point: Sequence[float]) -> tuple[Any, Any]:
        self._change.move(point, self._ways)
        if isinstance(self.evaluation.module, FoldedNetwork):
            self.evaluation.module.refold()
        batch = cloned(self._batch) if self._plain else self._batch
        with contextlib.ExitStack() as ways:
            if self._pooling is not None:
                ways.enter_context(self._pooling)
            if self._first is not None:
                self._first.at(*point)
                ways.enter_context(self._first)
            return self.evaluation.outputs(batch)


def _versions(batch: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and not leaf.is_inference()]
