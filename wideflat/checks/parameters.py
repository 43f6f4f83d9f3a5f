"""What is asked of the parameters of an optimizer: that each of their elements has memory of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["check_parameter", "check_parameters", "refuse_shared_memory", "refuse_stale"]


def check_parameters(params: Iterable[Tensor], groups: Iterable[dict[str, Any]] = ()) -> None:
    """Refuse new parameters that cannot be trained each (`check_parameter`), or share memory with those of groups."""
    params = list(params)
    for p in params:
        check_parameter(p)
    refuse_shared_memory([*params, *(p for group in groups for p in group["params"])])


def refuse_shared_memory(params: Iterable[Tensor]) -> None:
    """Refuse trainable parameters with elements that have memory in common, in one of them or in two.

    Whoever keeps a copy of each and writes it back would write back one into the other.

    >>> both = torch.zeros(6)
    >>> refuse_shared_memory([nn.Parameter(both[:3]), nn.Parameter(both[3:])])
    >>> refuse_shared_memory([nn.Parameter(both[:4]), nn.Parameter(both[3:])])
    Traceback (most recent call last):
    ValueError: parameters of the shapes (4,) and (3,) share memory; make them one nn.Parameter, or give clones
    """
    plain = {id(p): p for p in params if type(p) in (Tensor, nn.Parameter) and p.requires_grad and not p.is_meta}
    here = [p for p in plain.values() if p.numel() and p.layout is torch.strided]
    for p in here:
        _check_own_memory(p)
    for near in _neighbourhoods(here):
        places = [_addresses(p) for p in near]
        for k, (p, place) in enumerate(zip(near, places, strict=True)):
            for q, other in zip(near[:k], places[:k], strict=True):
                if len(np.intersect1d(place, other)):
                    raise ValueError(
                        f"parameters of the shapes {tuple(q.shape)} and {tuple(p.shape)} share memory; make them one "
                        "nn.Parameter, or give clones"
                    )


def _span(p: Tensor) -> int:
    """Elements from the first to the last in memory."""
    return 1 + sum(stride * (size - 1) for stride, size in zip(p.stride(), p.shape, strict=True))


def _addresses(p: Tensor) -> np.ndarray:
    """Where the elements of a tensor lie."""
    places = np.zeros(1, dtype=np.int64)
    for stride, size in zip(p.stride(), p.shape, strict=True):
        places = np.add.outer(places, stride * np.arange(size, dtype=np.int64)).ravel()
    return p.data_ptr() + p.element_size() * places


def _neighbourhoods(params: list[Tensor]) -> list[list[Tensor]]:
    """Parameters whose stretches of memory overlap, though perhaps not their elements: columns of one matrix do."""
    found: list[list[Tensor]] = []
    end = 0
    for p in sorted(params, key=lambda p: p.data_ptr()):
        if p.data_ptr() >= end:
            found.append([])
        found[-1].append(p)
        end = max(end, p.data_ptr() + _span(p) * p.element_size())
    return [near for near in found if len(near) > 1]


def _check_own_memory(p: Tensor) -> None:
    """Refuse a parameter whose elements share memory, as those of an expanded tensor do, or that is negated lazily."""
    steps = sorted((stride, size) for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1)
    if any(stride == 0 for stride, _ in steps):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is expanded: its elements share memory and cannot be trained each; "
            "give the optimizer a clone of it"
        )
    apart = all(stride > sum(s * (n - 1) for s, n in steps[:k]) for k, (stride, _) in enumerate(steps))
    if p.numel() and (p.is_neg() or (not apart and len(np.unique(_addresses(p))) < p.numel())):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is a view whose elements share memory, or which is negated lazily; "
            "give the optimizer a clone of it"
        )


def check_parameter(p: Tensor) -> None:
    """Refuse a parameter whose elements share memory, as those of an expanded tensor do, or that is complex."""
    _check_own_memory(p)
    if p.is_complex():
        raise ValueError(
            f"complex parameters are not supported (one of shape {tuple(p.shape)}); store the real and imaginary "
            "parts, see torch.view_as_real"
        )


def refuse_stale(gradients: Iterable[Tensor], params: Iterable[Tensor]) -> None:
    """Refuse gradients of parameters that were given another type since, as `double()` does: they cannot be put back.

    >>> refuse_stale([torch.zeros(1)], [torch.zeros(1).double()])
    Traceback (most recent call last):
    ...
    RuntimeError: a gradient of torch.float32 is that of a parameter which has become torch.float64 since; call ...
    """
    for g, p in zip(gradients, params, strict=True):
        if g.dtype != p.dtype and getattr(p, "grad_dtype", p.dtype) not in (None, g.dtype):
            raise RuntimeError(
                f"a gradient of {g.dtype} is that of a parameter which has become {p.dtype} since; "
                "call zero_grad() and backward()"
            )
