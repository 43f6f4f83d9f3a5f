"""Numbers in float64 from a device, also from one that has no float64 (MPS)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["doubled", "fetched", "has_float64", "in_parts", "number", "squared_length", "summed"]


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


def summed(tensor: Tensor) -> Tensor:
    """The sum of all numbers, for which nobody waits: in float64, or as two numbers of float32 that add up to it.

    The latter where the device has no float64. The numbers are then counted in units of 2^-k of the largest, as whole
    numbers of 64 bits, whose sum is exact: with n of them k is 61 - log2(n), and 37 for ten million. `number` adds up.

    >>> number(summed(torch.tensor([1.0, 2.0**-30]))) == 1 + 2.0**-30
    True
    """
    if has_float64(tensor.device):
        return tensor.sum(dtype=torch.float64)
    return two_parts(tensor.reshape(-1))


def two_parts(numbers: Tensor) -> Tensor:
    """The sum of float32 numbers as two of them, without float64.

    >>> number(two_parts(torch.tensor([1.0, 2.0**-30, -0.5]))) == 0.5 + 2.0**-30
    True
    """
    if numbers.numel() == 0:
        return numbers.new_zeros(2)
    bits = 61 - numbers.numel().bit_length()
    largest = numbers.abs().amax()
    # the largest power of two that is not above it, from the bits of its exponent; 1 where it has none
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
    power = torch.where((power > 0) & torch.isfinite(power), power, 1.0)
    total = (numbers / power * 2.0**bits).round().to(torch.int64).sum()
    high = total.to(torch.float32)
    low = (total - high.to(torch.int64)).to(torch.float32)
    parts = torch.stack([high, low]) * 2.0**-bits * power
    plain = torch.stack([numbers.sum(), torch.zeros_like(high)])
    return torch.where(torch.isfinite(largest), parts, plain)


def number(part: Tensor) -> float:
    """A sum, in one part or two, as a number, for which the host waits.

    >>> number(torch.tensor(2.0)), number(torch.tensor([1.0, 0.5]))
    (2.0, 1.5)
    """
    return float(fetched([part])[0].sum()) if part.dim() else float(part)


def in_parts(value: float, count: int) -> list[float]:
    """A number as the sum of so many of float32; itself for one. Three hold a number of float64 whole, in their range.

    >>> in_parts(0.1, 1), sum(in_parts(0.1, 3)) == 0.1, in_parts(float("inf"), 2)
    ([0.1], True, [inf, 0.0])
    """
    if count == 1:
        return [value]
    parts: list[float] = []
    for _ in range(count):
        parts.append(float(torch.tensor(value, dtype=torch.float32)))
        value = value - parts[-1] if math.isfinite(parts[-1]) else 0.0
    return parts
