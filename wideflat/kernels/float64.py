"""Numbers in float64 from a device, also from one that has no float64 (MPS)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["doubled", "fetched", "has_float64", "squared_length"]


#: Types of devices on which there is no float64.
WITHOUT = {"mps"}


def has_float64(device: torch.device) -> bool:
    """Whether tensors of float64 can be on a device.

    >>> has_float64(torch.device("cpu")), has_float64(torch.device("mps"))
    (True, False)
    """
    if device.type == "xpu":
        return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", True))
    return device.type not in WITHOUT


def doubled(tensor: Tensor) -> Tensor:
    """In float64, on the CPU where the device has none.

    >>> doubled(torch.ones(1)).dtype
    torch.float64
    """
    return tensor.double() if has_float64(tensor.device) else tensor.cpu().double()


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Several tensors in float64 on the CPU; the host waits once for all that are of one type on one device.

    >>> fetched([torch.ones(2), torch.tensor(3.0)])
    [tensor([1., 1.], dtype=torch.float64), tensor(3., dtype=torch.float64)]
    """
    found: list[Tensor] = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for k, tensor in enumerate(found):
        if tensor.device.type != "cpu":
            places.setdefault((tensor.device, tensor.dtype), []).append(k)
    for members in places.values():
        flat = torch.cat([found[k].reshape(-1) for k in members]).cpu()
        parts = flat.split([found[k].numel() for k in members])
        for k, part in zip(members, parts, strict=True):
            found[k] = part.view(found[k].shape)
    return [tensor if tensor.dtype == torch.float64 else tensor.double() for tensor in found]


def squared_length(tensors: Iterable[Tensor]) -> float:
    """The sum of the squares of all numbers, in float64; the host waits once where the device has that.

    >>> squared_length([torch.ones(3), torch.tensor([2.0])])
    7.0
    """
    return sum(float(part) for part in fetched([doubled(tensor).square().sum() for tensor in tensors]))
