"""What a card is measured of: the network, so many of its examples, and how much is asked of each measure.

How many examples is decided by what one costs (floating-point operations of a forward pass), never by the clock: two
networks of one architecture are measured on the same examples, and their cards can be compared.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from wideflat.evaluation.blocks import Blocks, as_tensors, batch_length, cloned, truncated
from wideflat.evaluation.evaluation import Evaluation, Forward, Metric
from wideflat.evaluation.selection import Selection
from wideflat.seeds import derive_seed
from wideflat.volume.fixed_data import FixedData

__all__ = ["Effort", "Subject"]

#: Fewest and most examples that the dear measures see; the cheap ones see four times as many.
FEWEST, MOST, MORE = 64, 4096, 4


@dataclass(frozen=True)
class Effort:
    """How much is asked of each measure.

    Attributes:
        flops: Floating-point operations of one pass over the examples of the dear measures.
        sigmas: Of the local energies.
        layer_sigma: Of the layer profile.
        worst_sigmas: Of the worst case and the average beside it.
        worst_steps: Of the ascent.
        restarts: Of the ascent.
        probes: Of the spectrum.
        steps: Of the spectrum.
        points: Of the slice, along each axis.
        bits: Of the shift table.
        fractions: Of the shift table.
        entropy_sigma: Of the free entropy.
        entropy_examples: How many examples the free entropy sees at most.
        passes: Of the local energies over their examples, in one round; chosen by them when left out.
    """

    flops: float = 4e9
    sigmas: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    layer_sigma: float = 0.3
    worst_sigmas: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05)
    worst_steps: int = 12
    restarts: int = 1
    probes: int = 8
    steps: int = 24
    points: int = 15
    bits: tuple[int, ...] = (8, 6, 4, 3, 2)
    fractions: tuple[float, ...] = (0.3, 0.6, 0.9)
    entropy_sigma: float = 0.1
    entropy_examples: int = 256
    passes: int | None = None


QUICK = Effort(flops=1e9, worst_sigmas=(0.01, 0.02, 0.05), worst_steps=6, restarts=0, steps=16, points=9,
               entropy_examples=64)  # fmt: skip


@dataclass
class Subject:
    """A network with its data, as the measures of a card take them.

    Attributes:
        model: The network.
        many: The examples of the cheap measures.
        few: Those of the dear ones, a part of them.
        fewest: Those of the free entropy, whose price grows faster than their number.
        effort: What is asked.
        metric: What the local energies, the layers and the shifts are of.
        loss: What is differentiated.
        options: What all measures are told: ``forward``, ``batch_norm``, ``parameters``.
        seed: Of everything random.
        conventions: What all of it depends on.
    """

    model: nn.Module
    many: Any
    few: Any
    fewest: Any
    effort: Effort
    metric: Metric
    loss: Metric
    options: dict[str, Any]
    seed: int
    conventions: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        data: Any,
        effort: Effort,
        metric: Metric,
        loss: Metric,
        examples: int | None,
        forward: Forward | None,
        batch_norm: str,
        parameters: Selection,
        seed: int,
    ) -> Subject:
        """Choose the examples and say what was chosen."""
        evaluation = Evaluation(model, metric, batch_norm, forward)
        with evaluation.prepared():
            few = examples or _affordable(evaluation, data, effort.flops, seed)
            many, there = _some(data, MORE * few, seed)
            part, seen = _some(many, few, seed)
            fewest, least = _some(part, min(few, effort.entropy_examples), seed)
            digest = FixedData(many, 256).digest
        options = {"forward": forward, "batch_norm": batch_norm, "parameters": parameters}
        words = {
            "examples": there,
            "few": seen,
            "fewest": least,
            "data": digest,
            "quick": effort.flops == QUICK.flops,
            "seed": seed,
        }
        return cls(model, many, part, fewest, effort, metric, loss, options, seed, words)


def _affordable(evaluation: Evaluation, data: Any, flops: float, seed: int) -> int:
    """As many examples as may be passed for so many operations: a power of two."""
    first = Blocks(data, 32, seed).first()
    counted = 0
    with contextlib.suppress(Exception), FlopCounterMode(display=False) as counter:
        evaluation.outputs(evaluation.load(cloned(truncated(first.batch, 1))))
        counted = counter.get_total_flops()
    if not counted:  # nothing that is counted: by the number of parameters
        counted = 2 * sum(parameter.numel() for parameter in evaluation.model.parameters())
    return int(min(max(2 ** round(math.log2(flops / counted)), FEWEST), MOST))


def _some(data: Any, count: int, seed: int) -> tuple[Any, int]:
    """So many examples, or all if there are fewer, and their number: drawn at random, or the first of a loader."""
    if isinstance(data, TensorDataset):
        data = data.tensors if len(data.tensors) > 1 else data.tensors[0]
    generator = torch.Generator().manual_seed(derive_seed(seed, "examples"))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        total = len(data)  # type: ignore[arg-type]
        index = torch.randperm(total, generator=generator)[:count].sort().values
        return (data, total) if total <= count else (Subset(data, index.tolist()), len(index))
    blocks = Blocks(data, 256, seed)
    if blocks.in_memory:
        tensors = as_tensors(data)
        total = len(tree_leaves(tensors)[0])
        index = torch.randperm(total, generator=generator)[:count].sort().values
        if total <= count:
            return tensors, total
        return tree_map(lambda leaf: leaf[index.to(leaf.device)] if isinstance(leaf, Tensor) else leaf, tensors), count
    batches: list[Any] = []
    seen = 0
    for block in blocks.visit(0):
        batch = block.batch if seen + block.size <= count else truncated(block.batch, count - seen)
        batches.append(batch)
        seen += batch_length(batch)
        if seen >= count:
            break
    return batches, seen


def spread_of(values: Sequence[float]) -> float:
    """The largest of some sizes, 0 for none."""
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0)
