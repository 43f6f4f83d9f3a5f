r"""Max pooling as maxima of strided views: the same numbers, several times as fast as torch's own on the CPU.

.. code-block:: text

    rows_ij = max_k  x[s i + k, j]          k = 0 .. kernel - 1, s the stride
    out_ij  = max_k  rows[i, s j + k]

torch's kernel also finds where each maximum is (which only a gradient needs) and goes value by value where channels
come first in memory; these maxima are vectorised in either order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wideflat.noise.uses import is_differentiated

__all__ = ["FastPooling", "max_pool2d", "pair"]

#: Sizes of windows for which it pays.
LARGEST = 3


class FastPooling(TorchFunctionMode):
    """Replaces max pooling of values that nobody differentiates.

    A pooling that is not of that kind (padded, dilated, with its indices, on another device) is left to torch.

    Attributes:
        seen: Whether the network has pooled so; one that has not is better off without this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a pooling."""
        kwargs = kwargs or {}
        if func is F.max_pool2d or func is torch.max_pool2d:
            result = max_pool2d(*args, **kwargs)
            if result is not None:
                self.seen = True
                return result
        return func(*args, **kwargs)


def max_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """As ``torch.nn.functional.max_pool2d``; None for what it does not do.

    Example:
        >>> max_pool2d(torch.arange(16.0).view(1, 4, 4), 2)
        tensor([[[ 5.,  7.],
                 [13., 15.]]])
        >>> max_pool2d(torch.zeros(1, 4, 4), 2, padding=1) is None
        True
    """
    if type(input) is not Tensor or input.device.type != "cpu" or input.layout is not torch.strided:
        return None
    if input.dim() not in (3, 4) or not input.is_floating_point() or is_differentiated(input):
        return None
    kernel, steps = pair(kernel_size), pair(kernel_size if stride is None or stride == [] else stride)
    if kernel is None or steps is None or pair(padding) != (0, 0) or pair(dilation) != (1, 1):
        return None
    if ceil_mode or return_indices or not 1 <= min(kernel) <= max(kernel) <= LARGEST or min(steps) < 1:
        return None
    if min(side - k for side, k in zip(input.shape[-2:], kernel, strict=True)) < 0 or max(kernel) == 1:
        return None
    return _maxima(_maxima(input, -2, kernel[0], steps[0]), -1, kernel[1], steps[1])


def _maxima(x: Tensor, axis: int, kernel: int, step: int) -> Tensor:
    """Maxima over windows along one axis."""
    reach = (x.shape[axis] - kernel) // step * step + 1
    windows = [slice(k, k + reach, step) for k in range(kernel)]
    parts = [x[..., window] if axis == -1 else x[..., window, :] for window in windows]
    total = parts[0]
    for part in parts[1:]:
        total = torch.maximum(total, part)
    return total


def pair(value: Any) -> tuple[int, int] | None:
    """A size of a window, step or border as torch takes it: a number, or one for each axis; None for anything else.

    Example:
        >>> pair(2), pair([1, 3]), pair("same")
        ((2, 2), (1, 3), None)
    """
    values = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(values) == 1:
        values *= 2
    return values if len(values) == 2 and all(type(v) is int for v in values) else None
