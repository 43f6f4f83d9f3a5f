"""The data of an energy: read once, kept, the same for every evaluation and every network that is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from wideflat.checks import whole
from wideflat.evaluation.blocks import Block, Blocks, as_tensors
from wideflat.seeds import derive_seed

__all__ = ["FixedData"]


class FixedData:
    """All blocks of a data set, in memory.

    Args:
        data: What :func:`wideflat.local_energy` takes: tensors, a data set, a loader, an iterable of batches.
        batch_size: Examples a block, where the blocks are made here.
        subset: So many of the examples, drawn at random; None for all. Needs tensors or a data set.
        subset_seed: Which of them: the same for all networks that are compared.

    Attributes:
        blocks: The blocks.
        examples: n.
        digest: Of all examples, whatever their order.

    Raises:
        ValueError: If the data change from one reading to the next, as those of random augmentation do.

    Example:
        >>> data = FixedData((torch.arange(5.0), torch.zeros(5)), batch_size=2, subset=3)
        >>> data.examples, len(data.blocks)
        (3, 2)
    """

    def __init__(self, data: Any, batch_size: int = 512, subset: int | None = None, subset_seed: int = 0) -> None:
        if subset is not None:
            data = _subset(data, subset, subset_seed)
        source = Blocks(data, batch_size, seed=0)
        self.blocks: list[Block] = list(source.visit(0))
        self.examples = sum(block.size for block in self.blocks)
        seen = _signatures(self.blocks)
        self.digest = hashlib.blake2b("".join(f"{x:.6e}" for x in seen).encode(), digest_size=6).hexdigest()
        if not (source.in_memory or source.one_pass or isinstance(data, Sequence)):
            again = _signatures(list(Blocks(data, batch_size, seed=1).visit(0)))
            if again.shape != seen.shape or not np.allclose(again, seen, rtol=1e-5, atol=1e-6):
                raise ValueError(
                    "the data are not the same in another reading (random augmentation, or a loader that shuffles and "
                    "drops the last batch): the energy has to be a fixed function. Give the data without it, or the "
                    "batches of one reading as a list"
                )


def _has_examples(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _subset(data: Any, count: int, seed: int) -> Any:
    """Some of the examples, in memory or as a data set."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    as_tensors(data)  # which refuses what is nested too deeply
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        total = len(data)  # type: ignore[arg-type]
    elif isinstance(data, (tuple, dict, Tensor)) and (leaves := tree_leaves(data)) and all(map(_has_examples, leaves)):
        total = len(leaves[0])
        if any(len(leaf) != total for leaf in leaves):
            shapes = [tuple(leaf.shape) for leaf in leaves]
            raise ValueError(f"tensors in memory must have the same length, got {shapes}")
    else:
        raise ValueError(
            f"subset needs tensors in memory or a data set, got {type(data).__name__}; give its data set, or fewer "
            "batches"
        )
    whole("the number of examples", total, 1)
    if whole("subset", count, 1, 2**62) > total:
        raise ValueError(f"subset must be between 1 and the {total} examples there are, got {count}")
    generator = torch.Generator().manual_seed(derive_seed(seed, "subset"))
    index = torch.randperm(total, generator=generator)[:count].sort().values
    if isinstance(data, Dataset):
        return Subset(data, index.tolist())
    return tree_map(lambda leaf: leaf[index.to(leaf.device)], data)


def _signatures(blocks: list[Block]) -> np.ndarray:
    """A number for each example, sorted: its components times fixed random weights. Turned images differ."""
    found = []
    for block in blocks:
        total = torch.zeros(block.size, dtype=torch.float64)
        for k, leaf in enumerate(tree_leaves(block.batch)):
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != block.size:
                continue
            flat = leaf.detach().cpu().reshape(block.size, -1).double()
            generator = torch.Generator().manual_seed(k)
            total += flat @ torch.rand(flat.shape[1], generator=generator, dtype=torch.float64)
        found.append(total)
    return torch.cat(found).sort().values.numpy()
