"""Data that several measurements go through, read once: what a loader gave is kept as far as there is room for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from wideflat.evaluation.blocks import Blocks
from wideflat.evaluation.evaluation import Evaluation

__all__ = ["remembered"]

#: Bytes of batches that are kept.
ROOM = 2**30


def remembered(data: Any, evaluation: Evaluation, seed: int = 0, room: int = ROOM) -> Any:
    """The data, with the batches of a loader in a list where there is room for them.

    A measurement makes order and augmentation of a loader the same in every pass, so nothing is lost: the batches of
    one reading are those of all. Tensors in memory, data sets, lists and iterators that can be read once stay what they
    are, and so does a loader that gives every process its own share.

    Args:
        data: What :func:`wideflat.local_energy` takes.
        evaluation: Whose random states are as before afterwards.
        seed: Of the order and the augmentation.
        room: Bytes.

    Example:
        >>> import torch
        >>> class Loader:
        ...     readings = 0
        ...     def __iter__(self):
        ...         self.readings += 1
        ...         yield torch.zeros(2, 3), torch.zeros(2)
        >>> loader = Loader()
        >>> kept = remembered(loader, Evaluation(torch.nn.Linear(3, 2), "loss", "eval", None))
        >>> len(list(kept)), len(list(kept)), loader.readings
        (1, 1, 1)
    """
    if isinstance(data, (Dataset, list, tuple, dict, Tensor)) or not isinstance(data, Iterable):
        return data
    blocks = Blocks(data, 1, seed)
    if blocks.in_memory or blocks.indexed or blocks.sharded or blocks.one_pass:
        return data
    kept: list[Any] = []
    size = 0
    with evaluation.prepared():
        for block in blocks.visit(0):
            size += sum(leaf.numel() * leaf.element_size() for leaf in _tensors(block.batch))
            if size > room:
                return data
            kept.append(block.batch)
    return kept


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
