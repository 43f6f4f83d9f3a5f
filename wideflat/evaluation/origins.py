"""Where tensors on a device come from: their numbers on the host, for those who must look at them and not wait.

To look at a number on an accelerator the host waits until all that was launched before it is done. Labels are looked at
in every batch (are they classes? which of them count?), and mostly they have been on the host already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["comes_from", "on_host", "small", "unwritten_copy"]

#: Of a tensor on a device, as long as it lives: its version, and what gives the same numbers on the host.
_ORIGINS: Any = WeakTensorKeyDictionary()


def small(tensor: Tensor) -> bool:
    """Whether a tensor may be labels, and is worth remembering."""
    return tensor.dim() <= 2 or (tensor.dim() == 3 and not tensor.is_floating_point())


def comes_from(tensor: Tensor, origin: Callable[[], Tensor | None]) -> Tensor:
    """Remember of a tensor on a device what gives its numbers without waiting for it; None where it no longer does.

    Example:
        >>> import torch
        >>> here, there = torch.arange(3), torch.empty(3, device="meta")  # of which nobody could see a number
        >>> on_host(comes_from(there, lambda: here))
        tensor([0, 1, 2])
    """
    if tensor.device.type != "cpu" and not tensor.is_inference():
        _ORIGINS[tensor] = tensor._version, origin
    return tensor


def on_host(tensor: Tensor) -> Tensor:
    """The numbers of a tensor where they can be seen without waiting; the tensor itself where there is no such place.

    One that was written to since then has no origin.
    """
    if tensor.device.type == "cpu" or tensor.is_inference():
        return tensor
    version, origin = _ORIGINS.get(tensor, (None, None))
    found = origin() if origin is not None and version == tensor._version else None
    return tensor if found is None else found


def unwritten_copy(source: Tensor) -> Callable[[], Tensor | None]:
    """An origin that is another tensor, as long as nobody writes into that."""
    if source.is_inference():
        return lambda: None
    version = source._version
    return lambda: source if source._version == version else None
