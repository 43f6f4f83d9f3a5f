"""The processes of ``torch.distributed`` that share a measurement; one process counts as rank 0 of 1."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["gathered", "rank", "world_size"]


def rank() -> int:
    """The number of this process."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(value: Any) -> list[Any]:
    """What each process has given, in the order of their ranks; all must call it.

    Example:
        >>> gathered(3)
        [3]
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
