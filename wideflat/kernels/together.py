"""What SAM and its family do to lists of tensors, by a number of operations that does not depend on their length.

torch has lists of sums and products, but no choice between two lists and no inner product of them. Here the tensors of
one type and device are laid side by side for that, which is one more copy of them in memory. Of sharded tensors it is
the part that a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wideflat.kernels.branchless import memory_order
from wideflat.kernels.flat_blocks import flat, is_dense, laid_out_like
from wideflat.kernels.shards import local, sharding, total

__all__ = ["chosen", "clones", "inner_product", "multiply_", "put_", "times"]


def _kinds(*lists: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of those whose types and devices are the same, list by list."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, tensors in enumerate(zip(*lists, strict=True)):
        kind = tuple(key for tensor in tensors for key in (tensor.dtype, tensor.device))
        kinds.setdefault(kind, []).append(number)
    return list(kinds.values())


def _laid(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """Side by side, each in the order of the memory of its model."""
    pieces = []
    for tensor, model in zip(tensors, like, strict=True):
        if is_dense(model):
            pieces.append(flat(laid_out_like(tensor, model.stride())))
        else:
            pieces.append(tensor.reshape(-1))
    return torch.cat(pieces)


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies; of sharded tensors, of the parts that are here.

    >>> clones([torch.ones(2)])
    [tensor([1., 1.])]
    """
    parts = [local(tensor).detach() for tensor in tensors]
    copies = [torch.empty_like(part) for part in parts]
    put_(copies, parts)
    return copies


def put_(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values into tensors."""
    if tensors:
        torch._foreach_copy_([local(tensor) for tensor in tensors], [local(value) for value in values])


def times(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors times one number each; the numbers are few, those of param groups.

    >>> number = torch.tensor(2.0)
    >>> times([torch.ones(2), torch.ones(1)], [number, number])
    [tensor([2., 2.]), tensor([2.])]
    """
    found: list[Tensor] = list(tensors)
    groups: dict[tuple[int, torch.device], list[int]] = {}
    for number, (tensor, factor) in enumerate(zip(tensors, factors, strict=True)):
        groups.setdefault((id(factor), tensor.device), []).append(number)
    for (_, device), numbers in groups.items():
        products = torch._foreach_mul([tensors[k] for k in numbers], factors[numbers[0]].to(device))
        for k, product in zip(numbers, products, strict=True):
            found[k] = product
    return found


def multiply_(tensors: Sequence[Tensor], number: Tensor) -> None:
    """Multiply all elements by a number."""
    for numbers in _kinds(tensors):
        same = [tensors[k] for k in numbers]
        torch._foreach_mul_(same, number.to(same[0].device, same[0].dtype))


def chosen(condition: Tensor, new: Sequence[Tensor], old: Sequence[Tensor] | None) -> list[Tensor]:
    """The new ones if a condition holds, else the old, or zeros; what is not chosen may be infinite.

    >>> chosen(torch.tensor(False), [torch.tensor([torch.inf])], [torch.tensor([1.0])])
    [tensor([1.])]
    """
    found: list[Tensor] = list(new)
    for numbers in _kinds(new):
        models = [new[k] for k in numbers]
        before = None if old is None else [old[k].to(models[0]) for k in numbers]
        there = _laid(models, models)
        other = torch.zeros((), dtype=there.dtype, device=there.device) if before is None else _laid(before, models)
        pieces = torch.where(condition.to(there.device), there, other).split([model.numel() for model in models])
        for k, piece, model in zip(numbers, pieces, models, strict=True):
            found[k] = memory_order(piece, model)
    return found


def inner_product(x: dict[Tensor, Tensor], y: dict[Tensor, Tensor]) -> Tensor:
    """The sum over what both have of the products, in float32 or wider, on one device; the same on every rank.

    >>> p, q = torch.zeros(2), torch.zeros(1)
    >>> inner_product({p: torch.ones(2), q: torch.ones(1)}, {p: torch.full((2,), 3.0)})
    tensor(6.)
    """
    both = [p for p in x if p in y]
    if not both:
        return torch.zeros(())
    ways: dict[object, list[Tensor]] = {}
    for p in both:
        ways.setdefault((sharding(p), x[p].dtype, y[p].dtype, x[p].device), []).append(p)
    sums = []
    for params in ways.values():
        left, right = ([_real(values[p]) for p in params] for values in (x, y))
        wide = torch.promote_types(left[0].dtype, torch.float32)
        product = _laid(left, left).to(wide) * _laid(right, left).to(wide)
        sums.append((params[0], product.sum()))
    first = sums[0][1]
    found = total((p, number.to(first)) for p, number in sums)
    assert found is not None
    return found


def _real(tensor: Tensor) -> Tensor:
    """What is here of a tensor; a complex one as two real ones."""
    part = local(tensor)
    return torch.view_as_real(part) if part.is_complex() else part
