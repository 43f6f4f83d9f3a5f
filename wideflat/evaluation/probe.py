"""What a network does with a batch, found out by a few evaluations at its weights.

A measurement evaluates the same examples many times, in batches that it may cut, repeat and keep. That is right only
for a network whose outputs are a function of weights and inputs, that leaves its inputs alone, and, where every example
has noise of its own, whose examples do not influence each other. Nothing of this is visible in its layers, so it is
tried: the batch, then the batch in reverse order without its first example, then some examples in company of themselves
alone. The second time a network that takes labels by name gets none, and none from then on if it answers the same
without them: its own loss is a tenth of the work of a language model. Where that second answer is another one, the
same batch is tried again, to tell random numbers, labels and examples that influence each other apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from wideflat.evaluation.agreement import agree, disagree, tensors
from wideflat.evaluation.blocks import Block, chosen, cloned, moved, random_state, seed_everything
from wideflat.evaluation.carried import Carried
from wideflat.evaluation.evaluation import Evaluation
from wideflat.evaluation.metrics import NamedMetric
from wideflat.seeds import derive_seed

#: Examples that are tried by themselves.
ALONE = 4
#: Of a network that cannot be measured, with when its outputs change.
CHANGING = (
    "{} gives other outputs for the same batch and weights when it {}, also from the same random state: it keeps "
    "something from call to call (a cache, a running mean, a hidden state, a counter). Reset it at the start of "
    "forward, or measure a network that does not"
)

__all__ = ["CHANGING", "Behaviour", "company", "comparable", "depends_on_company", "observe", "of_examples"]


@dataclass
class Behaviour:
    """What was found.

    Attributes:
        writes: The network writes into its input: every evaluation needs a copy.
        random: It draws random numbers although it is in eval mode: they are part of the average, as augmentation is.
        examples: ``"independent"``; ``"mixed"`` where the output of an example depends on the others of its batch;
            ``"unknown"`` where a batch of one example, or randomness, does not tell.
        per_example: The metric gives one number for each example, not one for the batch.
        carries: Names of what changes from call to call (:class:`~wideflat.evaluation.carried.Carried`).
    """

    writes: bool
    random: bool
    examples: Literal["independent", "mixed", "unknown"]
    per_example: bool
    carries: tuple[str, ...] = ()


def observe(evaluation: Evaluation, block: Block, seed: int) -> Behaviour:
    """Evaluate a block in several ways and compare; ``block`` itself is left as it is.

    Raises:
        ValueError: For a network whose outputs change from call to call for another reason than random numbers.
    """
    batch = evaluation.load(block.batch)
    states: list[tuple[Any, ...]] = []

    def run(part: Any, number: int = 0) -> tuple[Any, Any]:
        seed_everything(derive_seed(seed, "probe", number))
        states.append(random_state(evaluation.device))
        try:
            return evaluation.outputs(part)
        finally:
            states.append(random_state(evaluation.device))

    copy = cloned(batch)
    outputs, targets = cloned(run(copy))  # the network may answer in the same memory again
    writes = not _same(copy, batch)
    carried = Carried(evaluation.model)  # what only the first call makes is there by now
    per_example = evaluation.score(outputs, targets, block.size).dim() == 1
    shown = comparable(evaluation, (outputs, targets), block.size)
    with evaluation.trying_without_labels(batch) as trial:  # one evaluation tells all of it where nothing is odd
        if block.size > 2:
            trial.succeeded = _same_reversed(evaluation, run, batch, block.size, (outputs, targets))
        else:
            trial.succeeded = agree(comparable(evaluation, run(cloned(batch), 1), block.size), shown)
    random = not trial.succeeded and not agree(comparable(evaluation, run(cloned(batch), 1), block.size), shown)
    for _ in range(0 if trial.succeeded else 2):  # twice in a row: some change with every other call
        if not agree(comparable(evaluation, run(cloned(batch)), block.size), shown):
            raise ValueError(CHANGING.format(type(evaluation.model).__name__, "is called again"))
    if places := carried.drawn():
        raise ValueError(
            f"{type(evaluation.model).__name__} draws random numbers from a generator of its own ({places[0]}), which "
            "cannot be seeded with the others: let it draw from torch's own (no generator=), or measure it without"
        )
    random = random or _draws(states)
    examples: Literal["independent", "mixed", "unknown"] = "unknown"
    if block.size > 1 and not random:
        examples = _independent(evaluation, run, batch, block.size, (outputs, targets), not trial.succeeded)
    return Behaviour(writes, random, examples, per_example, tuple(carried.changed()))


def _draws(states: Sequence[tuple[Any, ...]]) -> bool:
    """Whether random numbers were drawn, seldom though they may matter, from the states before and after two calls.

    A network that sets a seed of its own in every call leaves the same state behind, whatever the state before was.
    """
    before, after, _, last = states[:4]
    return any(drawn and differs for drawn, differs in zip(moved(before, after), moved(after, last), strict=True))


def comparable(evaluation: Evaluation, result: tuple[Any, Any], size: int) -> Any:
    """The outputs where they are tensors in any nesting, else the metric of each example."""
    return result[0] if tensors(result[0]) else evaluation.score(*result, size).float()


def company(example: int, size: int) -> list[int]:
    """One example in company of itself alone, in a batch whose size is not ``size``."""
    return [example] * (3 if size == 2 else 2)


def depends_on_company(evaluation: Evaluation, batch: Any, size: int, outputs: Any, example: int) -> Tensor:
    """Whether an example of a batch has other outputs in company of itself alone: a flag that nobody waits for."""
    alone = company(example, size)
    found, _ = evaluation.outputs(cloned(chosen(batch, alone, size)))
    mine, theirs = of_examples(outputs, size, alone, found, len(alone))
    return disagree(mine, theirs, scale=outputs)


def _same_reversed(
    evaluation: Evaluation, run: Callable[[Any, int], tuple[Any, Any]], batch: Any, size: int, whole: tuple[Any, Any]
) -> bool:
    """Whether all outputs are of examples, and the same for the batch reversed without its first, from another seed."""
    order = list(range(size - 1, 0, -1))
    try:
        outputs, targets = run(cloned(chosen(batch, order, size)), 1)
        mine, theirs = of_examples(whole[0], size, order, outputs, len(order))
        complete = 0 < len(mine) == len(tensors(whole[0])) == len(tensors(outputs))
        mixed = _metric_mixes(evaluation, whole, size, (outputs, targets), order)
    except Exception:  # a network that cannot take another batch than this one
        return False
    return complete and not mixed and agree(mine, theirs, scale=tensors(whole[0]))


def _independent(
    evaluation: Evaluation,
    run: Callable[[Any], tuple[Any, Any]],
    batch: Any,
    size: int,
    whole: tuple[Any, Any],
    reverse_too: bool,
) -> Literal["independent", "mixed", "unknown"]:
    """Whether examples have the same outputs in other company: reversed without the first, and some by themselves."""
    reverse = [list(range(size - 1, 0, -1))] if size > 2 and reverse_too else []
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
        if mixed or not agree(mine, theirs, scale=tensors(whole[0])):
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
    pairs = list(zip(tensors(outputs), tensors(like), strict=False))
    known = [(a, b) for a, b in pairs if _axis(a, size, b, like_size) is not None]
    return [_picked(a, size, b, examples) for a, b in known], [b for _, b in known]


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
    pairs = zip(map(_dense, tensors(a)), map(_dense, tensors(b)), strict=True)
    return all(bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in pairs)


def _dense(tensor: Tensor) -> Tensor:
    """The values of a tensor, which sparse and nested ones keep in a layout of their own."""
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
