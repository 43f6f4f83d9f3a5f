"""Lists of tensors cut into blocks that fit a processor's cache.

An optimizer step is a chain of cheap element-wise operations over tensors that are together much larger than the cache.
Run one after the other over whole tensors, each operation reads and writes main memory again. Run over one block after
the other, the whole chain works in the cache and main memory is touched once, as in a fused kernel, but with torch's
own operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK", "cache_blocks"]

#: Elements in a block: a megabyte a tensor in float32. With smaller ones Python's own time shows.
BLOCK = 262144


def cache_blocks(
    *lists: Sequence[Tensor], offsets: Sequence[int] | None = None, size: int = BLOCK
) -> Iterator[tuple[list[list[Tensor]], list[int]]]:
    """Cut parallel lists of tensors into blocks of about ``size`` elements, each of one device and dtype.

    Tensors larger than a block are cut into flat views, small ones are packed together. On an accelerator, where a
    launch costs more than a trip to memory, there is one block that holds everything; so there is for tensors that fit
    one block together.

    Args:
        *lists: The tensors at one place of each list have one shape, device and dtype. Empty lists are left out.
        offsets: A number for each tensor, handed back for each piece with the start of the piece added.
        size: Elements in a block.

    Yields:
        The pieces of every list, and the offset of each piece.

    Example:
        >>> cut = list(cache_blocks([torch.arange(5), torch.arange(2)], offsets=[0, 8], size=4))
        >>> [[piece.tolist() for piece in pieces] for (pieces,), _ in cut], [offsets for _, offsets in cut]
        ([[[0, 1, 2, 3]], [[4], [0, 1]]], [[0], [4, 8]])
    """
    lists = tuple(tensors for tensors in lists if tensors)
    if not lists:
        return
    if offsets is None:
        offsets = [0] * len(lists[0])
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(lists[0]):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    for (device, _), members in kinds.items():
        if len(kinds) == 1:
            chosen, places = lists, offsets
        else:
            chosen = tuple([tensors[index] for index in members] for tensors in lists)
            places = [offsets[index] for index in members]
        if device.type == "cpu" and sum(tensor.numel() for tensor in chosen[0]) >= size:
            yield from _cut(chosen, places, size)
        else:
            yield [list(tensors) for tensors in chosen], list(places)


def _cut(
    lists: tuple[Sequence[Tensor], ...], offsets: Sequence[int], size: int
) -> Iterator[tuple[list[list[Tensor]], list[int]]]:
    pending: list[list[Tensor]] = [[] for _ in lists]
    pending_offsets: list[int] = []
    filled = 0
    for start, *tensors in zip(offsets, *lists, strict=True):
        numel, strides = tensors[0].numel(), tensors[0].stride()
        if numel <= size or not all(tensor.stride() == strides and _is_dense(tensor) for tensor in tensors):
            pieces: list[tuple[Tensor, ...]] = [(tensor,) for tensor in tensors]
        else:
            pieces = [_flat(tensor).split(size) for tensor in tensors]
        for piece in zip(*pieces, strict=True):
            for kept, part in zip(pending, piece, strict=True):
                kept.append(part)
            pending_offsets.append(start)
            start += size
            filled += piece[0].numel()
            if filled >= size:
                yield pending, pending_offsets
                pending, pending_offsets, filled = [[] for _ in lists], [], 0
    if pending_offsets:
        yield pending, pending_offsets


def _is_dense(tensor: Tensor) -> bool:
    """Do the elements fill one stretch of memory, in whatever order of the dimensions?

    >>> _is_dense(torch.zeros(2, 3).t()), _is_dense(torch.zeros(4)[::2])
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


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
