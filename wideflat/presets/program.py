r"""The cells of Table 1 as the authors' program has them, where public copies of it differ from the text.

Facts read in two third-party copies of the program, in our terms (w_bar is the barycenter, y the number of replicas):

- **rSGD.** The loss is the mean over the replicas' mini-batches, the attraction is :math:`g` times the mean of
  :math:`|w_a - \bar w|^2` without the 1/2, weight decay is the optimizer's, and the learning rate is multiplied with y:

  .. math:: w_a \leftarrow w_a - \eta y \left[ \tfrac1y (\nabla L(w_a) + 2 g (w_a - \bar w)) + \lambda w_a \right]
            = w_a - \eta \left[ \nabla L(w_a) + 2 g (w_a - \bar w) + y \lambda w_a \right]

  So the rate is the printed one, **weight decay is y times the printed one, and gamma is 2 g**. The automatic g is the
  loss over the mean squared distance, half of the text's gamma_0, so that 2 g is the text's again: no change there. g
  grows once an epoch. The barycenter's batch norm is the mean of the replicas'.
- **rSGD with RMSprop** divides the gradient by its own size, and the 1/y of the mean cancels: the rate is **y times**
  the printed one, and the stabiliser within the root y squared times. (The mean square, which starts at 1, would start
  at y squared here; that is forgotten after some ten steps and left out.)
- **eSGD.** The noise is :math:`\epsilon \sqrt{2 \eta'}`; gamma is :math:`\gamma_0 (1 + \gamma_1)^t` after t outer steps
  and the same within a cycle; the outer rate is :math:`\eta \gamma`; both loops are SGD; batch norm has what the inner
  loop has gathered.
- **Normalisation** by constants, not by what the training set gives.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from wideflat.data.catalogue import FACTS
from wideflat.presets.settings import Preset

__all__ = ["PIXELS", "as_the_program"]

#: What the program normalises with: mean and deviation of each channel. Of Tiny ImageNet nothing is known.
PIXELS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}

#: By field: its value in the program, and why.
Changes = dict[str, tuple[Any, str]]


def as_the_program(cell: Preset) -> Preset:
    """A cell of Table 1 as the authors' program has it; what is changed is in ``coded``, with the reason.

    Args:
        cell: One of the four columns as printed. Of the baseline only the normalisation changes.

    Example:
        >>> from wideflat.presets import preset
        >>> cell = preset("cifar10-smallconvnet", "rsgd", as_coded=True)
        >>> cell.lr, round(cell.weight_decay, 9), cell.gamma0
        (0.05, 0.0003, 0.002)
        >>> cell = preset("cifar10-smallconvnet", "esgd", as_coded=True)
        >>> cell.gamma_in_lr, round(cell.gamma_factor, 2), round(cell.epsilon / 1e-4, 3)
        (True, 1.6, 1.414)
    """
    changes = _normalisation(cell)
    if cell.num_replicas > 1:
        changes |= _replicated(cell)
    if cell.inner_steps > 1:
        changes |= _entropic(cell)
    return dataclasses.replace(
        cell,
        **{field: value for field, (value, _) in changes.items()},
        as_coded=True,
        notes=tuple(note for note in cell.notes if note[0] not in changes),
        coded=tuple((field, reason) for field, (_, reason) in changes.items()),
    )


def _normalisation(cell: Preset) -> Changes:
    if cell.dataset not in PIXELS:
        return {}
    mean, std = PIXELS[cell.dataset]
    return {
        "pixel_mean": (mean, "constants of the program, in place of the training set's mean"),
        "pixel_std": (std, "constants of the program, in place of the training set's deviations"),
    }


def _replicated(cell: Preset) -> Changes:
    y = cell.num_replicas
    changes: Changes = {
        "weight_decay": (
            y * cell.weight_decay,
            f"{y} times the printed one: the loss is a mean over replicas at {y} times the rate, weight decay is not",
        )
    }
    if cell.gamma0 is not None:
        reason = "twice the printed one: the attraction is g |w - w_bar|^2 without the 1/2"
        changes["gamma0"] = 2 * cell.gamma0, reason
    if cell.focusing == "exponential":
        changes["gamma_clock"] = "epoch", "gamma grows once an epoch"
    if cell.model != "smallconvnet":
        changes["batch_norm"] = "gathered", "the barycenter has the mean of the replicas' statistics"
    if cell.optimizer == "rmsprop-tf":
        changes["lr"] = y * cell.lr, f"{y} times the printed one: RMSprop cancels the 1/{y} of the mean over replicas"
        changes["stabiliser"] = (
            y**2 * cell.stabiliser,
            f"{y**2} times: it is added to the square of a gradient that is {y} times smaller there",
        )
    return changes


def _entropic(cell: Preset) -> Changes:
    changes: Changes = {
        "epsilon": (math.sqrt(2) * cell.epsilon, "sqrt(2) times the printed one: the noise is epsilon sqrt(2 eta')"),
        "gamma_in_lr": (True, "the outer learning rate is multiplied with gamma (gscale, on by default)"),
        "gamma_clock": ("cycle", "gamma grows once an outer step"),
    }
    if cell.paper_gamma1 is not None:
        outer_steps = cell.epochs * math.ceil(FACTS[cell.dataset].train / cell.batch_size)
        changes["gamma_factor"] = (
            (1 + cell.paper_gamma1) ** outer_steps,
            f"the printed gamma_1 over {outer_steps:,} outer steps",
        )
    if cell.model != "smallconvnet":
        changes["batch_norm"] = "gathered", "the program's Entropy-SGD leaves the statistics as the inner loop has them"
    if cell.optimizer != "sgd":
        changes["optimizer"] = "sgd", "the program's Entropy-SGD has SGD in both loops"
    return changes
