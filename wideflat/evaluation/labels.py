"""Targets as class labels: in which axis of the outputs the classes are, which positions count, and what they say.

Labels have the shape of the outputs without the axis of the classes: (B,) for outputs (B, C), (B, T) for (B, T, C) or
for (B, C, T), which is torch's own order. Where T = C both of these fit. The rule is then: in outputs of three axes the
classes are last (a sequence), in those of more they are second (images), unless another batch of the data has told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wideflat.evaluation.origins import on_host

__all__ = ["IGNORED", "Labels", "are_probabilities", "class_axis", "distribution_axis", "sums_to_one"]

#: The target that does not count, as in torch's cross-entropy.
IGNORED = -100


@dataclass
class Labels:
    """Targets as class labels: where the classes are, which positions count, how many, and of how many examples."""

    labels: Tensor
    axis: int
    counts: Tensor | None  # None where all positions count
    examples: int
    soft: Tensor | None = None  # a distribution over the classes instead of labels
    some: int = 0  # positions that count, where not all do

    @classmethod
    def of(cls, labels: Tensor, axis: int, classes: int, name: str, seen: Tensor | None = None) -> Labels:
        """Labels that are classes, and which of them count; an error that names the metric where they are not.

        Args:
            labels: Whole numbers.
            axis: The axis of the classes.
            classes: How many there are.
            name: Of the metric.
            seen: The same numbers where the host does not wait for them.
        """
        seen = on_host(labels) if seen is None else seen
        low, high = seen.aminmax()
        if int(low) >= 0 and int(high) < classes:
            return cls(labels, axis, None, len(labels))
        counts = seen != IGNORED
        outside = seen[counts & ((seen < 0) | (seen >= classes))]
        if len(outside):
            raise ValueError(
                f'metric="{name}": labels must be 0 to {classes - 1} for {classes} outputs (or {IGNORED}, which is '
                f"left out), got {int(outside[0])}"
            )
        examples = int(counts.flatten(1).any(1).sum() if counts.dim() > 1 else counts.sum())
        if examples == 0:
            raise ValueError(
                f'metric="{name}": no target of a batch counts, all are {IGNORED}; make batches larger, or leave '
                "examples out that have no target"
            )
        return cls(labels, axis, labels != IGNORED, examples, some=int(counts.sum()))

    @property
    def positions(self) -> int:
        """How many positions count."""
        return self.labels.numel() if self.counts is None else self.some

    def over_positions(self, values: Tensor) -> Tensor:
        """One value an example: the mean over its positions that count, scaled so that the plain mean is over examples.

        Args:
            values: One at every position, in the shape of the labels.
        """
        if self.counts is None:
            return values if values.dim() == 1 else values.flatten(1).mean(1)
        counts = self.counts.reshape(len(values), -1)
        total = torch.where(counts, values.reshape(counts.shape), 0).sum(1)
        return total / counts.sum(1).clamp_min(1) * (len(values) / self.examples)


def class_axis(outputs: torch.Size, targets: torch.Size, known: int | None = None) -> int:
    """The axis of the classes in outputs of this shape with labels of that shape (the rule at the head of the module).

    Args:
        outputs: Shape of the outputs, at least two axes.
        targets: Shape of the labels.
        known: What other batches told; it decides where both axes fit.

    Example:
        >>> class_axis(torch.Size([8, 5, 3]), torch.Size([8, 5])), class_axis(torch.Size([8, 3, 5]), torch.Size([8, 5]))
        (2, 1)
        >>> class_axis(torch.Size([8, 5, 5]), torch.Size([8, 5]))
        2
    """
    last = len(outputs) - 1
    fits = [axis for axis in dict.fromkeys((last, 1)) if outputs[:axis] + outputs[axis + 1 :] == targets]
    if not fits or (known is not None and known not in fits):
        before = "" if not fits else f"; the classes were in axis {known} of the batches before"
        raise ValueError(
            f"outputs of shape {tuple(outputs)} and targets of shape {tuple(targets)} do not go together: labels have "
            f"the shape of the outputs without the axis of the classes, (B, T) for outputs (B, T, C){before}. Give "
            "forward=, a function of the model and a batch that returns (outputs, targets), or metric=, a function of "
            "these that gives one number for each example"
        )
    if len(fits) == 2:
        return known if known is not None else (last if len(outputs) == 3 else 1)
    return fits[0]


def distribution_axis(targets: Tensor) -> int | None:
    """The axis along which targets sum to one; where two do, that of :func:`class_axis`."""
    last = targets.dim() - 1
    return next((axis for axis in ((last, 1) if last == 2 else (1, last)) if sums_to_one(targets, axis)), None)


def sums_to_one(values: Tensor, axis: int) -> bool:
    """Whether the numbers along an axis are probabilities, to the rounding of their type."""
    return bool(are_probabilities(values, axis))


def are_probabilities(values: Tensor, axis: int) -> Tensor:
    """As :func:`sums_to_one`, where the numbers are."""
    tolerance = 2e-2 if values.is_floating_point() and values.element_size() < 4 else 1e-3
    return ~(values < 0).any() & ((values.sum(axis, dtype=torch.float32) - 1).abs() < tolerance).all()
