r"""A network on the line or plane w + x d_1 + y d_2, one batch at many points.

The layer that sees the input is linear in x and y, so three of its products serve every point,

.. code-block:: text

    (w + x d_1 + y d_2) * input = w * input + x (d_1 * input) + y (d_2 * input)

and batch norm is folded into convolutions where the network allows it. Whether that gives the outputs of the plain way
(write the weights, run) is tried on a few examples before anything is measured; where it does not, the plain way is
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from wideflat.energy.blocks import Block, cloned, truncated
from wideflat.energy.evaluation import Evaluation
from wideflat.energy.folding import FoldedNetwork
from wideflat.energy.metrics import scores
from wideflat.energy.shared_noise import SharedNoise, view_of

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
        self._prepare(cloned(evaluation.load(first.batch)))
        if not self._agrees(truncated(first.batch, min(LOOK, first.size)), min(LOOK, first.size)):
            self._take_plain_way()

    def _prepare(self, batch: Any) -> None:
        evaluation = self.evaluation
        evaluation.fold(batch)
        folded = isinstance(evaluation.module, FoldedNetwork)
        network = evaluation.module.network if isinstance(evaluation.module, FoldedNetwork) else evaluation.model
        self._change = SharedNoise(network, self.names)
        self._first = None if folded else FirstPlane(network, self.names, self.directions)

    def _take_plain_way(self) -> None:
        self._plain, self._first = True, None
        self.evaluation.module = self.evaluation.model
        self._change = SharedNoise(self.evaluation.model, self.names, in_place=True)
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
                    change.point(self._total(point))
                    change.apply(1.0)
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
        """The metric of the examples of the batch at a point."""
        return self.evaluation.score(*self._outputs(point), size)

    def _total(self, point: Sequence[float]) -> dict[str, Tensor]:
        """The change of each parameter, x d_1 + y d_2."""
        total = {name: point[0] * d for name, d in self.directions[0].items()}
        for x, more in zip(point[1:], self.directions[1:], strict=True):
            total = {name: torch.add(part, more[name], alpha=x) for name, part in total.items()}
        return total

    def _outputs(self, point: Sequence[float]) -> tuple[Any, Any]:
        if any(point):
            self._change.point(self._total(point))
            self._change.apply(1.0)
        else:
            self._change.apply(0.0)
        if isinstance(self.evaluation.module, FoldedNetwork):
            self.evaluation.module.refold()
        batch = cloned(self._batch) if self._plain else self._batch
        if self._first is None:
            return self.evaluation.outputs(batch)
        self._first.point = tuple(point)
        with self._first:
            return self.evaluation.outputs(batch)


class FirstPlane(TorchFunctionMode):
    """The first layer at any point of a plane from one product for w and one for each direction.

    Args:
        network: The network.
        names: The parameters that move.
        directions: By the names of the parameters.

    Attributes:
        point: Where the network is.
    """

    def __init__(self, network: torch.nn.Module, names: Sequence[str], directions: Sequence[dict[str, Tensor]]) -> None:
        super().__init__()
        parameters = dict(network.named_parameters())
        self._known = {id(parameter) for parameter in parameters.values()}
        self._start = {id(parameters[name]): parameters[name].data for name in names}
        self._ways = [{id(parameters[name]): d[name] for name in names} for d in directions]
        self._source: Tensor | None = None
        self._products: dict[tuple[Any, ...], list[Tensor]] = {}
        self._rows: dict[tuple[Any, ...], tuple[float, Tensor]] = {}
        self.point: tuple[float, ...] = (0.0,) * len(directions)

    def start(self, source: Any) -> None:
        """Begin with another batch."""
        self._source = source if isinstance(source, Tensor) else None
        self._products, self._rows = {}, {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the product of the first layer."""
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) >= 2 and id(args[1]) in self._start:
            view = view_of(args[0], self._source)
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if view is not None and (bias is None or id(bias) in self._known):
                return self._product(view, func, *args, **kwargs)
        return func(*args, **kwargs)

    def _product(
        self,
        view: tuple[Any, ...],
        product: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        key = (product, id(weight), id(bias), view, repr((args, kwargs)))
        if key not in self._products:
            b = None if bias is None else self._start.get(id(bias), bias)
            found = [product(x, self._start[id(weight)], b, *args, **kwargs)]
            found += [product(x, way[id(weight)], way.get(id(bias)), *args, **kwargs) for way in self._ways]
            self._products[key] = found
        *rest, last = self._products[key]
        return torch.add(self._row(key, rest), last, alpha=self.point[-1])

    def _row(self, key: tuple[Any, ...], products: list[Tensor]) -> Tensor:
        """The sum without the last direction, which all points of a row share."""
        if len(products) == 1:
            return products[0]
        known = self._rows.get(key)
        if known is None or known[0] != self.point[0]:
            known = self.point[0], torch.add(products[0], products[1], alpha=self.point[0])
            self._rows[key] = known
        return known[1]


_PRODUCTS = (F.linear, F.conv1d, F.conv2d, F.conv3d)


def _versions(batch: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and not leaf.is_inference()]
