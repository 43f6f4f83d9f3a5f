"""Whether two answers of a network are the same to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["SLACK", "agree", "disagree", "tensors"]

#: Rounding that may lie between two ways of computing the same, in units of the last place: products are reordered.
SLACK = 8192.0


def agree(a: Any, b: Any, scale: Any = None, slack: float = 256.0) -> bool:
    """Whether two trees of tensors are equal to rounding: ``slack`` units in the last place of the largest number.

    Args:
        a: Tensors in any nesting.
        b: The same number of tensors.
        scale: Tensors whose largest number counts; default ``a``.
        slack: Units in the last place, in single and double precision; its fourth root in half precision.

    Example:
        >>> agree(torch.ones(2), torch.ones(2) + 1e-6), agree(torch.ones(2), torch.ones(2) + 1e-2)
        (True, False)
    """
    ours, theirs = tensors(a), tensors(b)
    largest = max(map(_largest, ours if scale is None else tensors(scale)), default=0.0)
    return len(ours) == len(theirs) and all(_close(x, y, slack, largest) for x, y in zip(ours, theirs, strict=True))


def disagree(a: Any, b: Any, scale: Any, slack: float = SLACK) -> Tensor:
    """Not `agree`, as a flag where the tensors are, which nobody has to wait for.

    Example:
        >>> one = torch.ones(2)
        >>> disagree(one, one + 1e-4, one), disagree(one, one - 1, one)
        (tensor(False), tensor(True))
    """
    flags = []
    sizes = [part.abs() for part in tensors(scale) if part.numel() and (part.is_floating_point() or part.is_complex())]
    for x, y in zip(tensors(a), tensors(b), strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            flags.append(torch.ones((), dtype=torch.bool, device=x.device))
        elif not (x.is_floating_point() or x.is_complex()):
            flags.append((x != y).any())
        elif x.numel():
            largest = torch.stack(
                [size.nan_to_num(0.0, 0.0, 0.0).max().to(x.device, torch.float32) for size in sizes]
            ).max()
            gap = torch.where((x == y) | ((x != x) & (y != y)), 0, (x - y).abs()).to(torch.float32)
            flags.append((gap.nan_to_num(torch.inf) > _bound(x.dtype, slack) * largest).any())
    return (
        torch.stack([flag.to(flags[0].device) for flag in flags]).any() if flags else torch.zeros((), dtype=torch.bool)
    )


def _largest(part: Tensor) -> float:
    """The largest finite size of a number; 0 where there is none. Most tensors have no others: one look tells."""
    if part.numel() == 0:
        return 0.0
    if not part.is_complex() and math.isfinite(largest := float(part.abs().max())):
        return largest
    return float(torch.where(torch.isfinite(part), part.abs(), 0).max())


def _close(a: Tensor, b: Tensor, slack: float, largest: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    bound = _bound(a.dtype, slack) * largest
    if a.numel() == 0 or (not a.is_complex() and bool((a - b).abs_().max() <= bound)):  # NaN is not below it
        return True
    return bool(torch.isclose(a, b, rtol=0.0, atol=bound, equal_nan=True).all())


def _bound(dtype: torch.dtype, slack: float) -> float:
    """What may lie between two results, as a share of the largest number."""
    unit = torch.finfo(dtype).eps
    return unit * (slack if unit < 1e-5 else slack**0.25)  # half precision rounds each result, not each term of a sum


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree; a mapping of any kind counts as a dictionary."""
    tree = dict(tree) if isinstance(tree, Mapping) else tree
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
