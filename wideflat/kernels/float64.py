"""Numbers in float64 from a device, also from one that has no float64 (MPS)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["doubled", "has_float64"]


def has_float64(device: torch.device) -> bool:
    """Whether tensors of float64 can be on a device.

    >>> has_float64(torch.device("cpu")), has_float64(torch.device("mps"))
    (True, False)
    """
    return device.type != "mps"


def doubled(tensor: Tensor) -> Tensor:
    """In float64, on the CPU where the device has none.

    >>> doubled(torch.ones(1)).dtype
    torch.float64
    """
    return tensor.double() if has_float64(tensor.device) else tensor.cpu().double()
