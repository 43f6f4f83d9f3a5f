"""Lists of tensors in blocks: large tensors cut to fit a processor's cache, small ones put together.

An optimizer step is a chain of cheap element-wise operations over tensors that are together much larger than the cache.
Run one after the other over whole tensors, each operation reads and writes main memory again. Run over one block after
the other, the whole chain works in the cache and main memory is touched once, as in a fused kernel, but with torch's
own operations. For tensors that are much smaller than a block it is the other way round: an operation costs as much
for a bias of ten numbers as for ten thousand weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK", "Block", "FlatBlocks", "cache_blocks"]

#: Elements in a block: a megabyte a tensor in float32. With smaller ones Python's own time shows.
BLOCK = 262144

#: Elements in a piece of `FlatBlocks`, where the operations are in place: four megabytes a tensor in float32.
PIECE = 1048576

#: Elements that `FlatBlocks` gathers from small tensors, and what counts as small.
GATHERED, SMALL = 8192, 4096


@dataclass
class Block:
    """What `FlatBlocks` yields: parallel lists of tensors, and where their elements come from."""

    tensors: list[list[Tensor]]
    #: Lengths of the parts of a gathered tensor that have a place of their own.
    lengths: list[int] | None
    places: list[int]

    def parts(self, index: int) -> list[Tensor]:
        """The tensors of one of the lists, one for each of ``places``."""
        return self.tensors[index] if self.lengths is None else list(self.tensors[index][0].split(self.lengths))


class FlatBlocks:
    """Parallel lists of tensors as a few flat pieces, to be walked through many times.

    Large tensors are cut into flat views. Small ones are gathered into one piece and, after the work on it, scattered
    back. Tensors on an accelerator, and those whose elements have gaps or lie differently from list to list, come as
    they are, all in one block.

    Args:
        *lists: The tensors at one place of each list have one shape, device and dtype.
        offsets: The place of the first element of each tensor.

    Example:
        >>> a, b = [torch.zeros(2, 2), torch.zeros(3)], [torch.ones(2, 2), torch.arange(3.0)]
        >>> for block in FlatBlocks(a, b, offsets=[0, 4])(changed=[0]):
        ...     (x,), (y,) = block.tensors
        ...     _ = x.add_(y)
        >>> a[0].tolist(), a[1].tolist()
        ([[1.0, 1.0], [1.0, 1.0]], [0.0, 1.0, 2.0])
    """

    def __init__(self, *lists: list[Tensor], offsets: list[int]) -> None:
        self._addresses, self._offsets = addresses(lists), offsets
        self._cut: list[tuple[int, int, list[tuple[Tensor, ...]]]] = []
        self._gathered: list[tuple[list[int], list[list[Tensor]], list[int], list[int], list[int]]] = []
        self._whole: list[tuple[list[int], list[list[Tensor]], list[int]]] = []
        self._layouts: dict[int, tuple[int, ...]] = {}  # of tensors that are not contiguous
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(lists[0]):
            kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
        for (device, _), members in kinds.items():
            small: list[int] = []
            whole: list[int] = []
            for index in members:
                tensors = [tensors[index].detach() for tensors in lists]
                strides = tensors[0].stride()
                if device.type != "cpu" or not all(t.stride() == strides and is_dense(t) for t in tensors):
                    whole.append(index)
                    continue
                if not tensors[0].is_contiguous():
                    self._layouts[index] = strides
                if tensors[0].numel() <= SMALL:
                    small.append(index)
                else:
                    views = list(zip(*(_flat(tensor).split(PIECE) for tensor in tensors), strict=True))
                    self._cut.append((index, offsets[index], views))
            if whole:
                chosen = [[tensors[index].detach() for index in whole] for tensors in lists]
                self._whole.append((whole, chosen, [offsets[index] for index in whole]))
            self._gather(lists, small, offsets)

    def _gather(self, lists: Sequence[list[Tensor]], small: list[int], offsets: list[int]) -> None:
        """Put small tensors together; their places are joined where they follow each other."""
        members: list[int] = []
        filled = 0
        for index in [*small, None]:
            numel = 0 if index is None else lists[0][index].numel()
            if members and (index is None or filled + numel > GATHERED):
                lengths: list[int] = []
                places: list[int] = []
                for member in members:
                    size = lists[0][member].numel()
                    if places and offsets[member] == places[-1] + lengths[-1]:
                        lengths[-1] += size
                    else:
                        lengths.append(size)
                        places.append(offsets[member])
                views = [[_flat(tensors[member].detach()) for member in members] for tensors in lists]
                sizes = [view.numel() for view in views[0]]
                self._gathered.append((members, views, sizes, lengths, places))
                members, filled = [], 0
            if index is not None:
                members.append(index)
                filled += numel

    def _join(self, tensors: list[Tensor], members: list[int]) -> Tensor:
        """Fresh small tensors as one, in the order of the others."""
        if not self._layouts:
            return torch._utils._flatten_dense_tensors(tensors)
        layouts = [self._layouts.get(member) for member in members]
        return torch.cat([_flat_as(tensor, layout) for tensor, layout in zip(tensors, layouts, strict=True)])

    def still_of(self, *lists: list[Tensor], offsets: list[int]) -> bool:
        """Are these the same lists, at the same memory? The views here keep it, so that nobody else has its address."""
        return self._offsets == offsets and self._addresses == addresses(lists)

    def __call__(self, *fresh: list[Tensor], changed: list[int]) -> Iterator[Block]:
        """Walk through the blocks.

        Args:
            *fresh: Further lists, whose memory is another each time: gradients. They come after the others.
            changed: The lists that the caller changes, by number: the small tensors of those are written back.
        """
        for member, place, pieces in self._cut:
            parts = [_flat_as(tensors[member], self._layouts.get(member)).split(PIECE) for tensors in fresh]
            for index, views in enumerate(pieces):
                tensors = [[view] for view in views] + [[part[index]] for part in parts]
                yield Block(tensors, None, [place + index * PIECE])
        for members, small, sizes, lengths, places in self._gathered:
            joined = [torch.cat(views) for views in small]
            joined += [self._join([tensors[member] for member in members], members) for tensors in fresh]
            yield Block([[tensor] for tensor in joined], lengths, places)
            for index in changed:
                torch.split_with_sizes_copy(joined[index], sizes, out=small[index])
        for members, chosen, places in self._whole:
            yield Block([*chosen, *([tensors[member] for member in members] for tensors in fresh)], None, places)


def _flat_as(tensor: Tensor, layout: tuple[int, ...] | None) -> Tensor:
    """The elements in the order of memory of a tensor with these strides; None stands for contiguous ones."""
    if layout is None:
        return tensor.reshape(-1)
    return _flat(lying_as(tensor, layout))


def lying_as(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor, or a copy of it, with its elements in the order of these strides."""
    own = tensor.stride()
    if own == strides or all(a == b for a, b, size in zip(own, strides, tensor.shape, strict=True) if size > 1):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def addresses(lists: Sequence[list[Tensor]]) -> list[list[int]]:
    return [[tensor.data_ptr() for tensor in tensors] for tensors in lists]


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
        numel, strides = tensors[0].numel(), tensors[0].stride()
        if numel <= size or not all(tensor.stride() == strides and is_dense(tensor) for tensor in tensors):
            pieces: list[tuple[Tensor, ...]] = [(tensor,) for tensor in tensors]
        else:
            pieces = [_flat(tensor).split(size) for tensor in tensors]
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


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
