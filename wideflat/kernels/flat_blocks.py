"""How tensors lie in memory, and lists of them cut into blocks that fit a processor's cache.

A chain of cheap element-wise operations over tensors that are together much larger than the cache reads and writes main
memory again for each operation. Run over one block after the other, the whole chain works in the cache and main memory
is touched once, as in a fused kernel, but with torch's own operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

__all__ = ["BLOCK", "Memory", "alike", "cache_blocks", "flat", "is_dense", "laid_out_like"]

#: Elements in a block: a megabyte a tensor in float32. With smaller ones Python's own time shows.
BLOCK = 262144


def alike(*tensors: Tensor) -> bool:
    """Do these lie alike in memory: one type and shape, without gaps, their elements in one order?

    Then, and only then, may a loop walk through their memory side by side. Everything else goes through torch's
    operations, which know strides.

    >>> alike(torch.zeros(2, 3), torch.ones(2, 3)), alike(torch.zeros(2, 3), torch.ones(3, 2).t())
    (True, False)
    """
    first = tensors[0]
    return is_dense(first) and all(
        t.shape == first.shape and t.stride() == first.stride() and t.dtype == first.dtype and t.device == first.device
        for t in tensors[1:]
    )


def laid_out_like(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor, or a copy of it, with its elements in the order of these strides."""
    own = tensor.stride()
    if own == strides or all(a == b for a, b, size in zip(own, strides, tensor.shape, strict=True) if size > 1):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Memory:
    """Where lists of tensors are, and how those of the first, which anybody may replace, lie there.

    It is asked for at every step. So it is compared by numbers: torch takes ten times as long to tell a shape or the
    strides, which are only asked of what is not contiguous.
    """

    def __init__(self, lists: Sequence[Sequence[Tensor] | None]) -> None:
        first = lists[0] or []
        self._lying, self._places = _lying(first), _places(lists)
        self._shapes, self._strides = list(map(Tensor.size, first)), list(map(Tensor.stride, first))
        self._dtypes = list(map(_DTYPE, first))

    def holds(self, lists: Sequence[Sequence[Tensor] | None]) -> bool:
        """Are these at the same places, lying as they did?"""
        return self._places == _places(lists) and self._lying == _lying(lists[0] or [])

    def in_order(self, gradients: list[Tensor], any_type: bool = False) -> list[Tensor]:
        """Gradients, or copies of them, with their elements in the order of their parameters, and of their type.

        torch lets gradients have another type than their parameter (``grad_dtype``); ``any_type`` leaves them theirs.
        """
        if (any_type or self._dtypes == list(map(_DTYPE, gradients))) and self._lying == _lying(gradients):
            return gradients
        if any(gradient.shape != shape for gradient, shape in zip(gradients, self._shapes, strict=True)):
            raise RuntimeError("a gradient has another shape than its parameter; call zero_grad() and backward()")
        ordered = [laid_out_like(gradient, order) for gradient, order in zip(gradients, self._strides, strict=True)]
        return ordered if any_type else [g.to(dtype) for g, dtype in zip(ordered, self._dtypes, strict=True)]


_DTYPE = attrgetter("dtype")


def _lying(tensors: Sequence[Tensor]) -> list[Any]:
    """The length of each and whether it is contiguous; the shape and the strides of those that are not."""
    contiguous = list(map(Tensor.is_contiguous, tensors))
    sizes = list(map(Tensor.numel, tensors))
    if all(contiguous):
        return sizes
    others = [(t.shape, t.stride()) for t, plain in zip(tensors, contiguous, strict=True) if not plain]
    return [sizes, contiguous, others]


def _places(lists: Sequence[Sequence[Tensor] | None]) -> list[Any]:
    return [None if tensors is None else list(map(Tensor.data_ptr, tensors)) for tensors in lists]


def cache_blocks(*lists: Sequence[Tensor], size: int = BLOCK) -> Iterator[list[list[Tensor]]]:
    """Cut parallel lists of tensors into blocks of about ``size`` elements, each of one device and dtype.

    Tensors larger than a block are cut into flat views, small ones are packed together. On an accelerator, where a
    launch costs more than a trip to memory, there is one block that holds everything; so there is for tensors that fit
    one block together.

    Args:
        *lists: The tensors at one place of each list have one shape, device and dtype. Empty lists are left out.
        size: Elements in a block.

    Yields:
        The pieces of every list.

    Example:
        >>> blocks = cache_blocks([torch.arange(5), torch.ones(1)], size=4)
        >>> [[piece.tolist() for piece in pieces] for (pieces,) in blocks]
        [[[0, 1, 2, 3]], [[4]], [[1.0]]]
    """
    lists = tuple(tensors for tensors in lists if tensors)
    if not lists:
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(lists[0]):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    for (device, _), members in kinds.items():
        chosen = lists if len(kinds) == 1 else tuple([tensors[index] for index in members] for tensors in lists)
        if device.type == "cpu" and sum(tensor.numel() for tensor in chosen[0]) >= size:
            yield from _cut(chosen, size)
        else:
            yield [list(tensors) for tensors in chosen]


def _cut(lists: tuple[Sequence[Tensor], ...], size: int) -> Iterator[list[list[Tensor]]]:
    pending: list[list[Tensor]] = [[] for _ in lists]
    filled = 0
    for tensors in zip(*lists, strict=True):
        if tensors[0].numel() <= size or not alike(*tensors):
            pieces: list[tuple[Tensor, ...]] = [(tensor,) for tensor in tensors]
        else:
            pieces = [flat(tensor).split(size) for tensor in tensors]
        for piece in zip(*pieces, strict=True):
            for kept, part in zip(pending, piece, strict=True):
                kept.append(part)
            filled += piece[0].numel()
            if filled >= size:
                yield pending
                pending, filled = [[] for _ in lists], 0
    if pending[0]:
        yield pending


def is_dense(tensor: Tensor) -> bool:
    """Do the elements fill one stretch of memory, in whatever order of the dimensions?

    >>> is_dense(torch.zeros(2, 3).t()), is_dense(torch.zeros(4)[::2])
    (True, False)
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, as a view.

    >>> flat(torch.tensor([[1, 2], [3, 4]]).t()).tolist()
    [1, 2, 3, 4]
    """
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
