"""What a network does with a batch, found out by a few evaluations at its weights.

A measurement evaluates the same examples many times, in batches that it may cut, repeat and keep. That is right only
for a network whose outputs are a function of weights and inputs, that leaves its inputs alone, and, where every example
has noise of its own, whose examples do not influence each other. Nothing of this is visible in its layers, so it is
tried: twice the same batch, then the batch in reverse order without its first example, then some examples in company of
themselves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from wideflat.energy.blocks import Block, chosen, cloned, seed_everything
from wideflat.energy.evaluation import Evaluation
from wideflat.energy.metrics import NamedMetric
from wideflat.seeds import derive_seed

#: Examples that are tried by themselves.
ALONE = 4

__all__ = ["Behaviour", "agree", "company", "comparable", "observe", "of_examples"]


@dataclass
class Behaviour:
    """What was found.

    Attributes:
        writes: The network writes into its input: every evaluation needs a copy.
        random: It draws random numbers although it is in eval mode: they are part of the average, as augmentation is.
        examples: ``"independent"``; ``"mixed"`` where the output of an example depends on the others of its batch;
            ``"unknown"`` where a batch of one example, or randomness, does not tell.
        per_example: The metric gives one number for each example, not one for the batch.
    """

    writes: bool
    random: bool
    examples: Literal["independent", "mixed", "unknown"]
    per_example: bool


def observe(evaluation: Evaluation, block: Block, seed: int) -> Behaviour:
    """Evaluate a block in several ways and compare; ``block`` itself is left as it is.

    Raises:
        ValueError: For a network whose outputs change from call to call for another reason than random numbers.
    """
    batch = evaluation.load(block.batch)

    def run(part: Any, number: int = 0) -> tuple[Any, Any]:
        seed_everything(derive_seed(seed, "probe", number))
        return evaluation.outputs(part)

    copy = cloned(batch)
    outputs, targets = run(copy)
    writes = not _same(copy, batch)
    per_example = evaluation.score(outputs, targets, block.size).dim() == 1
    shown = comparable(evaluation, (outputs, targets), block.size)
    random = not agree(comparable(evaluation, run(cloned(batch), 1), block.size), shown)
    if random and not agree(comparable(evaluation, run(cloned(batch)), block.size), shown):
        raise ValueError(
            f"{type(evaluation.model).__name__} gives other outputs for the same batch and weights when it is called "
            "again, also from the same random state: it keeps something from call to call (a running mean, a hidden "
            "state, a counter). Reset it at the start of forward, or measure a network that does not"
        )
    examples: Literal["independent", "mixed", "unknown"] = "unknown"
    if block.size > 1 and not random:
        examples = _independent(evaluation, run, batch, block.size, (outputs, targets))
    return Behaviour(writes, random, examples, per_example)


def comparable(evaluation: Evaluation, result: tuple[Any, Any], size: int) -> Any:
    """The outputs where they are tensors in any nesting, else the metric of each example."""
    return result[0] if _tensors(result[0]) else evaluation.score(*result, size).float()


def company(example: int, size: int) -> list[int]:
    """One example in company of itself alone, in a batch whose size is not ``size``."""
    return [example] * (3 if size == 2 else 2)


def _independent(
    evaluation: Evaluation, run: Callable[[Any], tuple[Any, Any]], batch: Any, size: int, whole: tuple[Any, Any]
) -> Literal["independent", "mixed", "unknown"]:
    """Whether examples have the same outputs in other company: reversed without the first, and some by themselves."""
    reverse = [list(range(size - 1, 0, -1))] if size > 2 else []
    single = sorted({round(k * (size - 1) / (ALONE - 1)) for k in range(ALONE)})
    for order in (*reverse, *(company(example, size) for example in single)):
        try:
            outputs, targets = run(cloned(chosen(batch, order, size)))
            mixed = _metric_mixes(evaluation, whole, size, (outputs, targets), order)
        except Exception:  # a network that cannot take another batch than this one
            return "mixed"
        mine, theirs = of_examples(whole[0], size, order, outputs, len(order))
        if not mine:
            return "unknown"
        if mixed or not agree(mine, theirs, scale=_tensors(whole[0])):
            return "mixed"
    return "independent"


def _metric_mixes(
    evaluation: Evaluation, whole: tuple[Any, Any], size: int, part: tuple[Any, Any], order: list[int]
) -> bool:
    """Whether the metric of an example depends on the others of its batch: the same outputs, in this order."""
    if isinstance(evaluation.metric, NamedMetric):  # ours do not, but for the share of examples that count
        return False
    values = evaluation.score(*whole, size)
    leaves, form = tree_flatten(whole[0])
    if values.dim() == 0 or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return False
    picked = [_picked(a, size, b, order) for a, b in zip(leaves, tree_leaves(part[0]), strict=True)]
    other = evaluation.score(tree_unflatten(picked, form), part[1], len(order))
    expected = values[torch.tensor(order, device=values.device)]
    return not agree(expected.float(), other.float(), scale=values)


def _picked(a: Any, size: int, b: Any, order: list[int]) -> Any:
    """The examples of ``a`` in this order, where ``b``, of as many examples as that, shows their axis."""
    axis = _axis(a, size, b, len(order)) if isinstance(a, Tensor) and isinstance(b, Tensor) else None
    return a if axis is None else a.index_select(axis, torch.tensor(order, device=a.device))


def of_examples(outputs: Any, size: int, examples: list[int], like: Any, like_size: int) -> tuple[Any, Any]:
    """The parts of ``outputs`` that belong to ``examples``, and ``like``, the outputs of a batch of just these.

    Tensors without an axis of examples are left out of both.
    """
    pairs = list(zip(_tensors(outputs), _tensors(like), strict=False))
    known = [(a, b) for a, b in pairs if _axis(a, size, b, like_size) is not None]
    return [_picked(a, size, b, examples) for a, b in known], [b for _, b in known]


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
    ours, theirs = _tensors(a), _tensors(b)
    known = [part[torch.isfinite(part)].abs() for part in (ours if scale is None else _tensors(scale))]
    largest = max((float(part.max()) for part in known if part.numel()), default=0.0)
    return len(ours) == len(theirs) and all(_close(x, y, slack, largest) for x, y in zip(ours, theirs, strict=True))


def _close(a: Tensor, b: Tensor, slack: float, largest: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    unit = torch.finfo(a.dtype).eps
    slack = slack if unit < 1e-5 else slack**0.25  # half precision rounds each result, not each term of a sum
    return bool(torch.isclose(a, b, rtol=0.0, atol=slack * unit * largest, equal_nan=True).all())


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree; a mapping of any kind counts as a dictionary."""
    tree = dict(tree) if isinstance(tree, Mapping) else tree
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _axis(a: Tensor, size: int, b: Tensor, other: int) -> int | None:
    """The axis that counts examples, found by two batches of different sizes; None where there is none."""
    if a.dim() != b.dim():
        return None
    differing = [i for i in range(a.dim()) if a.shape[i] != b.shape[i]]
    if len(differing) != 1 or (a.shape[differing[0]], b.shape[differing[0]]) != (size, other):
        return None
    return differing[0]


def _same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same numbers, to the bit (NaN counts as equal)."""
    return all(bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in zip(_tensors(a), _tensors(b), strict=True))
