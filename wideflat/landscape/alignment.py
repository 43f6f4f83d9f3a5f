r"""Two networks made comparable: the hidden units of one permuted so that its weights are nearest to the other's.

.. code-block:: text

    minimise |w - P w'|^2  over the permutations P of hidden units and channels under which w' computes the same

Given all other permutations the one of a layer is a linear assignment: unit i of w goes with unit j of w' with the gain
<weights attached to i, weights attached to j>. So it is solved layer by layer: first in the order of the computation,
with those weights alone whose other axis is settled, then again and again with all of them until nothing is gained.
The first sweep finds a permuted copy exactly; between networks that were trained apart it ends in a local optimum.
Other symmetries (the rescaling of ReLU units) are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from wideflat.evaluation.blocks import Block, cloned, seed_everything, truncated
from wideflat.evaluation.evaluation import Evaluation
from wideflat.kernels.float64 import doubled
from wideflat.landscape.assignment import assignment
from wideflat.landscape.hidden_units import Axis, Units, hidden_units

__all__ = ["aligned", "require_same_answers"]

#: Sweeps over all layers at most.
SWEEPS = 50
#: Examples on which two orders of the units are compared, and how much answers may differ, as a share of the largest
#: and in units of the precision of the weights: sums have another order.
LOOK, SHARE, ROUNDINGS = 8, 1e-3, 16


def aligned(model: nn.Module, other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dictionary ``other`` with its hidden units in the order of those of ``model``: the same function.

    Args:
        model: The network.
        other: Other weights of it.

    Raises:
        ValueError: For networks whose units cannot be told (:mod:`wideflat.landscape.hidden_units`).

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> state = model.state_dict()
        >>> p = torch.tensor([2, 0, 1])
        >>> copy = {**state, "0.weight": state["0.weight"][p], "0.bias": state["0.bias"][p],
        ...         "2.weight": state["2.weight"][:, p]}
        >>> torch.equal(aligned(model, copy)["2.weight"], state["2.weight"])
        True
    """
    groups = hidden_units(model)
    weights = {name for name, _ in model.named_parameters()}
    ours = {name: value.detach() for name, value in model.state_dict().items()}
    theirs = {name: value.detach().clone() for name, value in other.items()}
    if wrong := [name for name in ours if name not in theirs or theirs[name].shape != ours[name].shape]:
        raise ValueError(f"the other network has no {wrong[0]} of shape {tuple(ours[wrong[0]].shape)}")
    for k, units in enumerate(groups):
        _permute(theirs, units, _best(ours, theirs, units, _settled(units, groups[k + 1 :], weights)))
    nearness = _nearness(ours, theirs, weights)
    for _ in range(SWEEPS):
        before = nearness
        for units in groups:
            changed = dict(theirs)
            _permute(changed, units, _best(ours, theirs, units, [axis for axis in units.axes if axis.name in weights]))
            if (found := _nearness(ours, changed, weights)) > nearness:
                theirs, nearness = changed, found
        if nearness <= before:
            break
    return theirs


def _settled(units: Units, later: list[Units], weights: set[str]) -> list[Axis]:
    """The axes of weights whose other axes are in order already: not those of later groups, nor of the same one."""
    unsettled = {axis.name for others in later for axis in others.axes}
    names = [axis.name for axis in units.axes]
    return [a for a in units.axes if a.name in weights - unsettled and names.count(a.name) == 1]


def require_same_answers(
    evaluation: Evaluation, block: Block, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> None:
    """Refuse a network that answers differently when its units are permuted as its graph says that they may be.

    A graph does not show everything: hooks, the number of axes (a flattening that puts positions before units), masks.
    Weights and buffers are written to.

    Args:
        evaluation: The network, inside ``evaluation.prepared()``.
        block: Data, of which a few examples are looked at.
        before: Weights.
        after: The same with permuted units.
    """
    batch = evaluation.load(truncated(block.batch, min(LOOK, block.size)))
    ours, theirs = (_answers(evaluation, batch, state) for state in (before, after))
    precision = max(torch.finfo(p.dtype).eps for p in evaluation.model.parameters() if p.is_floating_point())
    for a, b in zip(ours, theirs, strict=True):
        largest = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
        allowed = max(SHARE, ROUNDINGS * precision) * largest
        if not torch.allclose(a, b, rtol=0.0, atol=allowed, equal_nan=True):
            raise ValueError(
                "the network cannot be aligned: it answers differently when its hidden units are permuted as its "
                "graph allows, so something treats them not alike (a hook, a mask, positions that are flattened "
                "before units). Give weights that are aligned already"
            )


def _answers(evaluation: Evaluation, batch: Any, state: Mapping[str, Tensor]) -> list[Tensor]:
    """What the network returns with other weights: all of its tensors of real numbers."""
    model = evaluation.model
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in state:
                tensor.copy_(state[name])
    seed_everything(0)
    found = evaluation.outputs(cloned(batch))[0]
    return [doubled(leaf) for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _nearness(ours: dict[str, Tensor], theirs: dict[str, Tensor], weights: set[str]) -> float:
    """<w, w'>: the larger, the nearer, as permutations leave lengths alone."""
    return sum(float((doubled(ours[name]) * doubled(theirs[name].to(ours[name]))).sum()) for name in weights)


def _best(ours: dict[str, Tensor], theirs: dict[str, Tensor], units: Units, axes: list[Axis]) -> np.ndarray:
    """Which unit of theirs goes in the place of each of ours; the order they have where no other gains."""
    assert units.size is not None
    gain = torch.zeros(units.size, units.size, dtype=torch.float64)
    for axis in axes:
        a, b = (
            state[axis.name].cpu().double().movedim(axis.axis, 0).reshape(units.size, -1) for state in (ours, theirs)
        )
        gain += a @ b.T
    found = assignment(gain.numpy())
    rows = np.arange(units.size)
    gained = float(gain[rows, found].sum() - gain.trace())
    return found if gained > 1e-9 * float(gain.abs().max()) else rows


def _permute(state: dict[str, Tensor], units: Units, order: np.ndarray) -> None:
    """Renumber units with everything that is attached to them."""
    assert units.size is not None
    index = torch.from_numpy(order)
    for axis in units.axes:
        tensor = state[axis.name].movedim(axis.axis, 0)
        blocks = tensor.reshape(units.size, -1, *tensor.shape[1:])[index.to(tensor.device)]
        state[axis.name] = blocks.reshape(tensor.shape).movedim(0, axis.axis).contiguous()
