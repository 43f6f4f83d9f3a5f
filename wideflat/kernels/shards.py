"""Tensors of which a rank holds a part (`torch.distributed.tensor.DTensor`): the part, its places in the whole, sums.

What is computed weight by weight is computed on the part that a rank holds, by the same code as on a whole tensor. What
depends on where a weight stands, the noise, asks `place_of`; what is summed over weights, a distance or a norm, asks
`total`. A tensor that is not sharded goes through all of them as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Patch", "Place", "is_sharded", "like", "local", "local_gradient", "norm", "place_of", "replace", "total"]
__all__ += ["any_sharded", "anywhere", "counted", "is_walkable", "of_one_kind", "placed", "sharding", "stretch"]
__all__ += ["stretches"]

_PLAIN = (Tensor, torch.nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Is this a DTensor? It takes longer to import than all of wideflat; where nobody has, there is none.

    >>> is_sharded(torch.zeros(3))
    False
    """
    return type(tensor) not in _PLAIN and _is_sharded_kind(type(tensor))


def _is_sharded_kind(kind: type) -> bool:
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind not in _PLAIN and sharded is not None and issubclass(kind, sharded)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Is one of these a DTensor?"""
    return any(map(_is_sharded_kind, set(map(type, tensors)).difference(_PLAIN)))


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory; a plain tensor itself."""
    if not is_sharded(tensor):
        return tensor
    whole: Any = tensor.detach() if torch.is_grad_enabled() else tensor
    return whole.to_local()


def local_gradient(p: Tensor) -> Tensor:
    """This rank's part of the gradient of a parameter. Where the ranks hold summands of it, as tensor-parallel layers
    may leave them, it is summed first, and kept so.
    """
    gradient: Any = p.grad
    if is_sharded(gradient) and gradient.placements != p.placements:  # type: ignore[attr-defined] # a DTensor too
        gradient = p.grad = gradient.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return local(gradient)


def like(part: Tensor, whole: Tensor) -> Tensor:
    """The inverse of `local`: a tensor cut as ``whole`` is, of which this rank holds ``part``, in the same memory."""
    if not is_sharded(whole):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = whole.device_mesh, whole.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def placed(value: Tensor, p: Tensor) -> Tensor:
    """What was saved of a parameter, cut as the parameter is now. All ranks call it."""
    if value.shape != p.shape or not (is_sharded(value) or is_sharded(p)):
        return value
    if not is_sharded(p):
        return value.full_tensor()  # type: ignore[attr-defined]
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    if is_sharded(value):
        same = value.device_mesh == mesh and value.placements == placements  # type: ignore[attr-defined]
        if same:
            return value
        value = value.full_tensor()  # type: ignore[attr-defined]
    offset = _offset(p)
    box = tuple(slice(first, first + size) for first, size in zip(offset, local(p).shape, strict=True))
    return like(value[box].clone(), p)


def replace(tensor: Tensor, new: Tensor) -> None:
    """Give a tensor other memory, type or layout, and let it stay the same object."""
    if is_sharded(tensor) or is_sharded(new):  # ``.data =`` leaves the part of a DTensor as it was
        torch.utils.swap_tensors(tensor, new)
    else:
        tensor.data = new


def of_one_kind(tensors: Iterable[Tensor]) -> bool:
    """Are these all plain, or all sharded? torch works on lists of the one or the other."""
    return len({is_sharded(tensor) for tensor in tensors}) < 2


# ------------------------------------------------------------------------------------------------------------- places


@dataclass(frozen=True)
class Patch:
    """The places of a part that is no single stretch of the whole, such as some columns of a matrix.

    Attributes:
        start: The place of the first element of the whole.
        shape: Of the whole, its dimensions in the order in which its memory runs through them.
        offset: Where the part begins, in the same order.
        size: Its shape, too.
        order: That order of the dimensions.
        in_order: Does the memory of the part run through its dimensions in the same order, without gaps?
        first: The elements of the part from this one on,
        count: and so many; None for all.
    """

    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    order: tuple[int, ...]
    in_order: bool = True
    first: int = 0
    count: int | None = None

    def gather(self, draw: Callable[[int, int], Tensor], most: int) -> Iterator[tuple[Tensor, int]]:
        """What is drawn at these places, piece by piece.

        Args:
            draw: A function of a place and a count: so many numbers from there on.
            most: Numbers that are drawn at a time, about.

        Yields:
            Numbers for the part, in that order of its dimensions, and where in it they begin.

        Example:
            Columns 1 and 2 of a matrix of 2 rows and 4 columns:

            >>> patch = Patch(100, shape=(2, 4), offset=(0, 1), size=(2, 2), order=(0, 1))
            >>> [numbers.tolist() for numbers, _ in patch.gather(lambda p, n: torch.arange(p, p + n), most=4)]
            [[101, 102], [105, 106]]
        """
        end = math.prod(self.size) if self.count is None else self.first + self.count
        # The first `outer` dimensions are walked through; a slab of the one after them is drawn at a time.
        outer = 0
        while outer < len(self.shape) - 1 and math.prod(self.shape[outer + 1 :]) > most:
            outer += 1
        rest, kept = math.prod(self.shape[outer + 1 :]), math.prod(self.size[outer + 1 :])
        inside = tuple(slice(o, o + n) for o, n in zip(self.offset[outer + 1 :], self.size[outer + 1 :], strict=True))
        rows, at = max(most // max(rest, 1), 1), -self.first
        for index in itertools.product(*map(range, self.size[:outer])):
            row = 0
            for i, size, offset in zip(index, self.shape, self.offset, strict=False):
                row = row * size + offset + i
            row = row * self.shape[outer] + self.offset[outer]
            for above in range(0, self.size[outer], rows):
                count = min(rows, self.size[outer] - above)
                if at + count * kept > 0 and at < end - self.first:
                    numbers = draw(self.start + (row + above) * rest, count * rest)
                    numbers = numbers.view(count, *self.shape[outer + 1 :])[(slice(None), *inside)].reshape(-1)
                    yield numbers[max(-at, 0) : end - self.first - at], max(at, 0)
                at += count * kept


#: Where the elements of a part stand in the whole: from a place on, or at those of a patch.
Place: TypeAlias = int | Patch


def stretch(place: Place, first: int, count: int) -> Place:
    """The places of so many elements from ``first`` on, of those that stand at ``place``."""
    if isinstance(place, int):
        return place + first
    return dataclasses.replace(place, first=place.first + first, count=count)


def counted(place: Place, count: int, device: torch.device) -> Tensor:
    """The places themselves, one for each element, in the order of memory."""
    if isinstance(place, int):
        return torch.arange(place, place + count, device=device)
    pieces = [numbers for numbers, _ in place.gather(lambda p, n: torch.arange(p, p + n, device=device), 1 << 20)]
    return torch.cat(pieces)


def stretches(places: Sequence[Place]) -> list[int] | None:
    """The places of first elements, if all others follow them; None where there is a patch.

    >>> stretches([0, 7])
    [0, 7]
    """
    firsts = [place for place in places if isinstance(place, int)]
    return firsts if len(firsts) == len(places) else None


def is_walkable(place: Place) -> bool:
    """Do the places of these elements follow from the order in which they lie in memory?"""
    return isinstance(place, int) or place.in_order


def place_of(p: Tensor, start: int) -> Place:
    """The places of this rank's part of a tensor whose first element stands at ``start``; places count in the order of
    memory, of the whole.
    """
    if not is_sharded(p):
        return start
    placement: Any = p
    part = local(p)
    order, shape, offset, size = _patch(p.shape, p.stride(), placement.device_mesh, placement.placements)
    if size != tuple(part.shape[d] for d in order):
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} is cut by {placement.placements} so that this rank holds "
            f"{tuple(part.shape)} of it, which is no rectangle; shard it with Shard(dim)"
        )
    if 0 in size:
        return start
    in_order = part.permute(order).is_contiguous()
    cut = [d for d in range(len(shape)) if size[d] != shape[d]]
    if in_order and all(size[d] == 1 for d in range(cut[-1] if cut else 0)):  # all of what lies below what is cut
        place = 0
        for n, first in zip(shape, offset, strict=True):
            place = place * n + first
        return start + place
    return Patch(start, shape, offset, size, order, in_order)


@lru_cache(maxsize=4096)
def _patch(shape: torch.Size, strides: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[Any, ...]:
    """The order of the dimensions in memory; in it the shape, and the offset and the shape of this rank's part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in placements):
        raise RuntimeError(f"a parameter of shape {tuple(shape)} is the sum of what ranks hold ({placements})")
    size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    order = tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], d)))
    return order, *(tuple(int(numbers[d]) for d in order) for numbers in (shape, offset, size))


def _offset(p: Tensor) -> tuple[int, ...]:
    """The index of the first element of this rank's part."""
    placement: Any = p
    order, _, offset, _ = _patch(p.shape, p.stride(), placement.device_mesh, placement.placements)
    found = [0] * len(order)
    for d, first in zip(order, offset, strict=True):
        found[d] = first
    return tuple(found)


# --------------------------------------------------------------------------------------------------------------- sums


def sharding(p: Tensor) -> tuple[Any, tuple[int, ...]] | None:
    """Over which dimensions of which mesh a tensor is cut into parts; None if every rank has all of it."""
    if not is_sharded(p):
        return None
    placement: Any = p
    dimensions = tuple(d for d, each in enumerate(placement.placements) if each.is_shard())
    return (placement.device_mesh, dimensions) if dimensions else None


def total(values: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
    """The sum of one number a tensor, each computed on the part that is here; the same on every rank.

    Args:
        values: Pairs of a tensor and its number (or numbers, in a tensor). All ranks give the same tensors.

    Returns:
        Their sum, with the type and on the device of the first number; None of nothing.
    """
    sums: dict[Any, Tensor] = {}
    for p, value in values:
        where = sharding(p)
        sums[where] = sums[where] + value if where in sums else value
    for where, value in sums.items():
        if where is not None:
            sums[where] = _reduced(value, *where)
    first = next(iter(sums.values()), None)
    return None if first is None else torch.stack([value.to(first) for value in sums.values()]).sum(0)


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of tensors together, of which this rank may hold parts; in float32 at least."""
    parts = [local(tensor) for tensor in tensors]
    wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
    norms = torch._foreach_norm(wide)
    if not any(is_sharded(tensor) for tensor in tensors):
        return torch.linalg.vector_norm(torch.stack([each.to(norms[0]) for each in norms]))
    square = total((tensor, each.square()) for tensor, each in zip(tensors, norms, strict=True))
    assert square is not None
    return square.sqrt()


def anywhere(flags: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Is one of these true, each computed on the part of a tensor that is here? The same answer on every rank."""
    count = total((p, flag.to(torch.float32)) for p, flag in flags)
    return count is not None and bool(count > 0)


def _reduced(value: Tensor, mesh: Any, dimensions: tuple[int, ...]) -> Tensor:
    import torch.distributed as dist

    there = value.clone() if value.device.type == mesh.device_type else value.to(mesh.device_type)
    for dimension in dimensions:
        dist.all_reduce(there, group=mesh.get_group(dimension))
    return there.to(value.device)
