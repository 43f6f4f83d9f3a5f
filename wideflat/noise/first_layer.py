r"""The layer that sees the input of a network is linear in its weights: a few of its products serve many points.

.. code-block:: text

    (w + sum_k t_k d_k) x = w x + sum_k t_k (d_k x)

With one direction, d = a z, it serves every sigma of a noise that is shared by a batch
(:mod:`wideflat.energy.block_energy`); with two, every point of a plane (:mod:`wideflat.landscape.plane`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wideflat.noise.uses import is_differentiated

__all__ = ["FirstLayer", "view_of"]

_PRODUCTS = (F.linear, F.conv1d, F.conv2d, F.conv3d)


class FirstLayer(TorchFunctionMode):
    """Replaces the products of the first layer at w + sum_k t_k d_k by sums of those at w and of each d_k.

    A product is kept only for weights and biases that are parameters of the network, under all that it depends on: the
    operation, its tensors, how it sees the input (:func:`view_of`) and its other arguments.

    Args:
        network: The network.
        weights: w, of the parameters that move.
        directions: The d_k, by the names of these parameters. Whoever changes them calls :meth:`start`.
        reuse: Write the sums of all points into the same memory (new memory costs more than the sum itself). For those
            who are done with the outputs of a point, and all that is made of them, before they go to the next.
    """

    def __init__(
        self,
        network: nn.Module,
        weights: Mapping[str, Tensor],
        directions: Sequence[Mapping[str, Tensor]],
        reuse: bool = False,
    ) -> None:
        super().__init__()
        parameters = dict(network.named_parameters())
        self._known = {id(parameter) for parameter in parameters.values()}
        self._weights = {id(parameters[name]): weight for name, weight in weights.items()}
        self._ways = [{id(parameters[name]): d[name] for name in weights} for d in directions]
        self._source: Tensor | None = None
        self._products: dict[tuple[Any, ...], list[Tensor]] = {}
        self._rows: dict[tuple[Any, ...], tuple[tuple[float, ...], Tensor]] = {}
        self._sums: dict[tuple[Any, ...], Tensor] = {}
        self._point: tuple[float, ...] = (0.0,) * len(directions)
        self._reuse = reuse
        self._free: dict[tuple[Any, ...], Tensor] = {}  # memory of sums that nobody at this point holds

    def start(self, source: Any) -> None:
        """Begin with another batch, or with other directions."""
        self._source = source if isinstance(source, Tensor) else None
        self._products, self._rows, self._sums = {}, {}, {}

    def at(self, *point: float) -> None:
        """Go to another point, the t_k."""
        self._point = point
        self._free = dict(self._sums)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the product of the first layer."""
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) >= 2 and id(args[1]) in self._weights:
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
            b = None if bias is None else self._weights.get(id(bias), bias)
            found = [product(x, self._weights[id(weight)], b, *args, **kwargs)]
            found += [product(x, way[id(weight)], way.get(id(bias)), *args, **kwargs) for way in self._ways]
            self._products[key] = found
        *rest, last = self._products[key]
        total = torch.add(self._row(key, rest), last, alpha=self._point[-1], out=self._free.pop(key, None))
        if self._reuse:
            self._sums[key] = total
        return total

    def _row(self, key: tuple[Any, ...], products: list[Tensor]) -> Tensor:
        """The sum without the last direction, which all points of a row share."""
        if len(products) == 1:
            return products[0]
        known = self._rows.get(key)
        if known is None or known[0] != self._point[:-1]:
            total = products[0]
            for t, more in zip(self._point, products[1:], strict=False):
                total = torch.add(total, more, alpha=t, out=None if known is None else known[1])
            known = self._rows[key] = self._point[:-1], total
        return known[1]


def view_of(x: Any, source: Tensor | None) -> tuple[Any, ...] | None:
    """How ``x`` sees the input of the network: what its values depend on; None where it is not a view of all of it.

    Example:
        >>> x = torch.zeros(3, 3)
        >>> view_of(x, x) == view_of(x[:], x), view_of(x, x) == view_of(x.T, x), view_of(x + 0, x)
        (True, False, None)
    """
    if source is None or type(x) is not Tensor or x.layout is not torch.strided or is_differentiated(x):
        return None
    try:
        if x.data_ptr() != source.data_ptr() or x.numel() != source.numel():
            return None
    except RuntimeError:  # a tensor without memory, as inside of torch.vmap
        return None
    version = 0 if x.is_inference() else x._version
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg(), version
