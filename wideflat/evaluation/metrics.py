r"""What is measured: the error and the loss of every example, or a refusal where that cannot be what was meant.

``"error"`` and ``"loss"`` mean something only for certain outputs and targets, and what they mean is decided by shapes
and values that are looked at, never by shapes that happen to agree:

.. code-block:: text

    outputs          targets                         error: wrong where               loss
    (B, C)           labels (B,), one-hot (B, C)     the largest output is another    cross-entropy
                     soft labels (B, C)              (refused)                        cross-entropy
    (B,), (B, 1)     0, 1 or -1, +1                  the sign of the output differs   binary cross-entropy of logits
      all in [0, 1]  0, 1                            it is on the other side of 0.5   binary cross-entropy
    (B, T, C)        labels (B, T)                   as (B, C), at every position     as (B, C), at every position
    (B, C, ...)      labels (B, ...)                 the same                         the same

``"normalized loss"`` is the loss with the logits of every position divided by their standard deviation over classes.

Outputs (B, C) that are probabilities (no softmax is missing: rows in [0, 1] that sum to 1) have the loss -log p.

Where T = C both of the last two rows fit; :mod:`wideflat.evaluation.labels` has the rule for that (a sequence).

Targets -100 are left out: the value of an example is the mean over its positions that count, and examples without any
do not count. Everything else (regression, several labels an example, labels that are no classes, targets of another
shape) is refused with the line that measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wideflat.evaluation.doubts import Doubts
from wideflat.evaluation.labels import IGNORED, Labels, are_probabilities, class_axis, distribution_axis, sums_to_one
from wideflat.evaluation.origins import on_host

__all__ = [
    "ErrorMetric",
    "LossMetric",
    "NamedMetric",
    "NormalizedLossMetric",
    "error_metric",
    "loss_metric",
    "scores",
]

_REGRESSION = "for regression give metric=lambda outputs, targets: {}.square()"
_SEVERAL_LABELS = (
    "for several labels an example give metric=lambda outputs, targets: ((outputs > 0) != (targets > 0)).float()"
    ".mean(1), the share of wrong labels, or metric=lambda outputs, targets: "
    'torch.nn.functional.binary_cross_entropy_with_logits(outputs, targets.float(), reduction="none").mean(1)'
)


def error_metric(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the answer is wrong, for every example of one batch alone; see :class:`ErrorMetric`.

    Example:
        >>> error_metric(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1])).tolist()
        [0.0, 1.0]
        >>> error_metric(torch.tensor([0.3, -2.0]), torch.tensor([1.0, 1.0])).tolist()
        [0.0, 1.0]
        >>> error_metric(torch.tensor([0.3, 0.9]), torch.tensor([0.0, 1.0])).tolist()
        [0.0, 0.0]
    """
    return ErrorMetric()(outputs, targets)


def loss_metric(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every example of one batch alone; see :class:`LossMetric`.

    Example:
        >>> loss_metric(torch.zeros(1, 4), torch.tensor([2]))  # log 4
        tensor([1.3863])
        >>> loss_metric(torch.zeros(2, 3, 4), torch.tensor([[2, 0, -100], [1, 1, 1]]))
        tensor([1.3863, 1.3863])
    """
    return LossMetric()(outputs, targets)


class _Last:
    """The tensor that was looked at last, and whether another is the same with the same content."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._version, self._shape = -1, torch.Size()

    def same(self, tensor: Tensor, shape: torch.Size) -> bool:
        """Whether it is the tensor that was kept, beside outputs of the same shape, and nobody wrote into it."""
        return (
            tensor is self._tensor
            and shape == self._shape
            and not tensor.is_inference()  # those do not count who wrote into them
            and tensor._version == self._version
        )

    def keep(self, tensor: Tensor, shape: torch.Size) -> None:
        """Remember this one."""
        self._tensor, self._shape = tensor, shape
        self._version = -1 if tensor.is_inference() else tensor._version


class NamedMetric:
    """A metric that has a name: decides at the first batch what outputs and targets are, and holds all others to it.

    Attributes:
        name: ``"error"`` or ``"loss"``.
        meaning: What exactly was measured, in words; None before the first batch.
        counted: Examples of the last batch that have a target that counts.
        answers: Targets of the last batch that count: one an example, or several (tokens, pixels).
        doubts: What a device has found and nobody has read yet.
    """

    name: str

    def __init__(self) -> None:
        self.meaning: str | None = None
        self.counted = self.answers = 0
        self.doubts = Doubts()
        self._one = _OneOutput(self.name, self.doubts)
        self._axis: int | None = None
        self._last = _Last()
        self._known: Labels | None = None

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """One value an example; their mean is that over the examples that count."""
        outputs = scores(outputs, self.name)
        if not isinstance(targets, Tensor):
            raise TypeError(
                f'metric="{self.name}" compares outputs with targets; got {type(targets).__name__} for the targets. '
                "Data are (inputs, targets), or give metric=, a function of outputs and targets"
            )
        if outputs.dim() == 0 or targets.dim() == 0 or len(outputs) != len(targets):
            raise ValueError(
                f'metric="{self.name}" needs one target for each example; got outputs of shape {tuple(outputs.shape)} '
                f"and targets of shape {tuple(targets.shape)}"
            )
        if outputs.dim() == 1 or (outputs.dim() == 2 and outputs.shape[1] == 1):
            self.counted = self.answers = len(outputs)
            return self._one_output(outputs.reshape(-1), targets)
        known = self._labels(outputs, targets)
        self.counted, self.answers = known.examples, known.positions
        return known.over_positions(self._classes(outputs, known))

    def _labels(self, outputs: Tensor, targets: Tensor) -> Labels:
        """The targets as labels, checked; those of the batch before are not checked again."""
        if self._known is None or not self._last.same(targets, outputs.shape):
            self._known = self._read(outputs, targets)
            self._axis = self._known.axis
            self._last.keep(targets, outputs.shape)
        return self._known

    def _read(self, outputs: Tensor, targets: Tensor) -> Labels:
        if targets.shape == outputs.shape:
            return self._distribution(outputs, targets)
        seen = on_host(targets)
        if targets.is_floating_point():
            if not bool((seen == seen.round()).all()):
                raise ValueError(
                    f'metric="{self.name}" needs class labels for {_several(outputs)}, and these targets are other '
                    f"numbers ({_some(seen)}): {_REGRESSION.format('(outputs[:, 0] - targets)')}"
                )
            targets, seen = targets.long(), seen.long()
        if outputs.dim() == 2 and targets.dim() == 2 and targets.shape[1] == 1:
            targets, seen = targets[:, 0], seen[:, 0]
        axis = class_axis(outputs.shape, targets.shape, self._axis)
        return Labels.of(targets.long(), axis, outputs.shape[axis], self.name, seen.long())

    def _distribution(self, outputs: Tensor, targets: Tensor) -> Labels:
        """Targets with a number for each class: one-hot; soft labels, of which only the loss is defined; or others."""
        seen = on_host(targets)
        axis = self._axis or distribution_axis(seen)
        whole = bool(((seen == 0) | (seen == 1)).all())
        if axis is None or not sums_to_one(seen, axis):
            about = f"{_several(outputs)} and as many targets that are"
            if whole:
                raise ValueError(f'metric="{self.name}": {about} 0 or 1, not one 1 an example: {_SEVERAL_LABELS}')
            raise ValueError(
                f'metric="{self.name}": {about} neither one-hot nor probabilities ({_some(seen)}); '
                f"{_REGRESSION.format('(outputs - targets).flatten(1).norm(dim=1)')}"
                if targets.is_floating_point()
                else f'metric="{self.name}": {about} no one-hot labels ({_some(seen)}); give class labels of shape '
                f"{(*outputs.shape[: axis or 1], *outputs.shape[(axis or 1) + 1 :])}"
            )
        if whole:
            return Labels(targets.byte().argmax(axis), axis, None, len(targets))  # torch has no argmax of bool
        return Labels(targets.argmax(axis), axis, None, len(targets), soft=targets)

    def _one_output(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def _classes(self, outputs: Tensor, known: Labels) -> Tensor:
        """The value at every position, in the shape of the labels."""
        raise NotImplementedError


class ErrorMetric(NamedMetric):
    """1 where the answer is wrong, else 0: by the largest output, or by one output (see the head of this module).

    An output that is not a number is wrong.

    Example:
        >>> error = ErrorMetric()
        >>> error(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, -100])).tolist(), error.counted
        ([0.0, 0.0], 1)
        >>> error(torch.tensor([[1.0, 0.0]]), torch.tensor([7]))
        Traceback (most recent call last):
        ValueError: metric="error": labels must be 0 to 1 for 2 outputs (or -100, which is left out), got 7
    """

    name = "error"

    def _one_output(self, outputs: Tensor, targets: Tensor) -> Tensor:
        positive = self._one.positive(outputs, targets)
        probability = self._one.is_probability(outputs, needed=_between_thresholds)
        self.meaning = f"one output, above {'0.5' if probability else '0'} for the positive class"
        threshold = 0.5 if probability else 0.0
        return (~torch.where(positive, outputs > threshold, outputs <= threshold)).float()

    def _classes(self, outputs: Tensor, known: Labels) -> Tensor:
        if known.soft is not None:
            raise ValueError(
                'metric="error" needs labels, and these targets are probabilities (soft labels): use metric="loss", or '
                "the largest as the label, metric=lambda outputs, targets: "
                "(outputs.argmax(1) != targets.argmax(1)).float()"
            )
        self.meaning = "the largest output is not the label" + _where(outputs, known)
        top, answer = outputs.max(known.axis)
        return ((answer != known.labels) | top.isnan()).float()


class LossMetric(NamedMetric):
    """Cross-entropy, binary where there is one output (see the head of this module); ``meaning`` says which.

    Example:
        >>> loss = LossMetric()
        >>> [round(value, 3) for value in loss(torch.tensor([0.0, -3.0]), torch.tensor([1.0, -1.0])).tolist()]
        [0.693, 0.049]
        >>> loss.meaning
        'binary cross-entropy of one output, a logit'
    """

    name = "loss"

    def __init__(self) -> None:
        super().__init__()
        self._probabilities: bool | None = None

    def _one_output(self, outputs: Tensor, targets: Tensor) -> Tensor:
        positive = self._one.positive(outputs, targets)
        outputs = _at_least_single(outputs)
        probability = self._one.is_probability(outputs)
        self.meaning = f"binary cross-entropy of one output, a {'probability' if probability else 'logit'}"
        if not probability:
            return F.binary_cross_entropy_with_logits(outputs, positive.to(outputs.dtype), reduction="none")
        unknown = outputs.isnan()  # which torch's function refuses; it stays what it is
        loss = F.binary_cross_entropy(torch.where(unknown, 0.5, outputs), positive.to(outputs.dtype), reduction="none")
        return torch.where(unknown, torch.nan, loss)

    def _classes(self, outputs: Tensor, known: Labels) -> Tensor:
        if self._probabilities is not False:
            self._probabilities = self._still_probabilities(outputs.detach(), known.axis)
        outputs = _at_least_single(outputs)
        kind = "cross-entropy of probabilities" if self._probabilities else "cross-entropy"
        self.meaning = kind + _where(outputs, known)
        logits = outputs.clamp_min(torch.finfo(outputs.dtype).tiny).log() if self._probabilities else outputs
        target = known.labels if known.soft is None else known.soft.to(outputs.dtype)
        if known.soft is None and known.axis == outputs.dim() - 1:
            flat = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none", ignore_index=IGNORED)
            return flat.view(target.shape)
        target = target if known.soft is None else target.movedim(known.axis, 1)
        return F.cross_entropy(logits.movedim(known.axis, 1), target, reduction="none", ignore_index=IGNORED)

    def _still_probabilities(self, outputs: Tensor, axis: int) -> bool:
        """Whether the outputs are probabilities: the first batch decides, and no other may contradict it."""
        found = are_probabilities(outputs, axis)
        if self._probabilities is None:
            return bool(found)
        self.doubts.refuse(
            ~found & ~outputs.isnan().any(),
            'metric="loss": the outputs of the first batch were probabilities (rows that sum to 1), these are not. '
            "Say what they are: metric=lambda outputs, targets: torch.nn.functional.cross_entropy(outputs, "
            'targets, reduction="none") for logits',
        )
        return True


class NormalizedLossMetric(LossMetric):
    """Cross-entropy of normalised logits, f / sqrt(mean over classes of (f - mean f)^2): blind for the size of f.

    A network of which the last layer is multiplied by a number has the same answers and another loss; this one is the
    same for both. It is the logit normalisation of measures of sharpness.

    Example:
        >>> loss, y = NormalizedLossMetric(), torch.tensor([0])
        >>> a, b = (loss(c * torch.tensor([[2.0, 0.0]]), y).item() for c in (1.0, 9.0))  # both the loss of (2, 0)
        >>> round(a, 6) == round(b, 6) == round(loss_metric(torch.tensor([[2.0, 0.0]]), y).item(), 6)
        True
    """

    name = "normalized loss"

    def _one_output(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise ValueError(
            f'metric="{self.name}" needs the logits of several classes, and there is one output an example'
        )

    def _classes(self, outputs: Tensor, known: Labels) -> Tensor:
        self.doubts.refuse(
            are_probabilities(outputs.detach(), known.axis),
            f'metric="{self.name}" needs logits, and these outputs are probabilities',
        )
        outputs = _at_least_single(outputs)
        deviation = (outputs - outputs.mean(known.axis, keepdim=True)).square().mean(known.axis, keepdim=True)
        size = deviation.clamp_min(torch.finfo(outputs.dtype).tiny).sqrt()
        value = super()._classes(outputs / size, known)
        self.meaning = f"{self.meaning}, logits normalised"
        return value


# ---------------------------------------------------------------------------------------------- what outputs are


def scores(outputs: Any, name: str = "error") -> Tensor:
    """The tensor of scores in what a network returned: itself, its ``.logits``, or its ``["logits"]``.

    Example:
        >>> scores({"logits": torch.zeros(2, 3), "loss": None}).shape
        torch.Size([2, 3])
    """
    found = outputs
    if not isinstance(outputs, Tensor):
        found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(found, Tensor) and not found.is_complex():
        return found
    kind, place = type(outputs).__name__, ".their_name"
    if isinstance(outputs, Mapping):
        kind, place = f"{kind} with the keys {', '.join(map(str, outputs))}", f"[{next(iter(outputs), '...')!r}]"
    elif isinstance(outputs, (tuple, list)):
        kind, place = f"{kind} of {len(outputs)}", "[0]"
    raise TypeError(
        f'metric="{name}" needs a tensor of real outputs, or an object with .logits; the network returned {kind}. Say '
        "where the outputs are:\n    def forward(model, batch):\n        inputs, targets = batch\n"
        f"        return model(inputs){place}, targets\nand give forward=forward"
    )


#: Outputs that are not all in [0, 1] by chance.
MANY = 16


class _OneOutput:
    """How one output an example is read: as a probability (threshold 0.5) or as a logit or margin (threshold 0).

    It is a margin if an output outside [0, 1] or a target -1 was seen, else a probability if a target 0 was, else a
    margin. Nothing is decided before an answer depends on it, and a decision that later batches contradict is an error.
    """

    def __init__(self, name: str, doubts: Doubts) -> None:
        self._name, self._doubts = name, doubts
        self._unit = True  # all outputs so far were in [0, 1]
        self._zero = self._minus = False  # targets that were seen
        self._probability: bool | None = None
        self._last = _Last()
        self._positive: Tensor | None = None

    def positive(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Whether each example is of the positive class."""
        if self._positive is None or not self._last.same(targets, outputs.shape):
            self._positive = self._read(outputs, targets)
            self._last.keep(targets, outputs.shape)
        return self._positive

    def _read(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.numel() != outputs.numel():
            raise ValueError(
                f'metric="{self._name}": one output an example needs one target each; got targets of shape '
                f"{tuple(targets.shape)} for {len(outputs)} examples"
            )
        seen = on_host(targets).reshape(-1)
        zero, minus = seen == 0, seen == -1
        if not bool(((seen == 1) | zero | minus).all()):
            raise ValueError(
                f'metric="{self._name}": for one output an example targets must be 0 and 1, or -1 and +1; got '
                f"{_some(seen)}; {_REGRESSION.format('(outputs.flatten() - targets.flatten())')}"
            )
        self._zero |= bool(zero.any())
        self._minus |= bool(minus.any())
        if self._zero and self._minus:
            raise ValueError(f'metric="{self._name}": targets must be 0 and 1, or -1 and +1; got -1, 0 and 1')
        return targets.reshape(-1) == 1

    def is_probability(self, outputs: Tensor, needed: Any = None) -> bool:
        """Whether the outputs are probabilities; ``needed`` tells whether an answer depends on it."""
        if self._unit:
            low, high = outputs.detach().aminmax()
            outside = (low < 0) | (high > 1)
            if self._probability and self._zero:
                self._doubts.refuse(outside, self._taken_for_the_wrong())
                return True
            self._unit = not bool(outside)
        found = self._unit and self._zero
        if self._probability is None:
            if self._unit and self._minus and outputs.numel() >= MANY:
                raise ValueError(
                    f'metric="{self._name}": targets are -1 and +1, and all outputs are in [0, 1], which may be '
                    "probabilities or margins that are never negative. Give targets 0 and 1 for probabilities, or "
                    "metric=lambda outputs, targets: ((outputs.flatten() > 0) != (targets.flatten() > 0)).float()"
                )
            certain = not self._unit or self._minus
            if certain or needed is None or needed(outputs):
                self._probability = found
        elif self._probability != found:
            raise ValueError(self._taken_for_the_wrong())
        return found

    def _taken_for_the_wrong(self) -> str:
        return (
            f'metric="{self._name}": the outputs of the first batches did not tell whether they are probabilities '
            "(all of them were in [0, 1]), and were taken for the wrong. Say what they are: metric=lambda outputs, "
            "targets: ((outputs.flatten() > 0.5) != (targets.flatten() > 0)).float() for probabilities, > 0 for logits"
        )


def _between_thresholds(outputs: Tensor) -> bool:
    return bool(((outputs > 0) & (outputs <= 0.5)).any())


def _at_least_single(outputs: Tensor) -> Tensor:
    return outputs if outputs.dtype in (torch.float32, torch.float64) else outputs.float()


def _several(outputs: Tensor) -> str:
    return f"outputs of shape {tuple(outputs.shape)}"


def _where(outputs: Tensor, known: Labels) -> str:
    if outputs.dim() == 2:
        return ""
    return f", mean over the positions of an example (classes in axis {known.axis})"


def _some(values: Tensor) -> str:
    """A few different values, in words."""
    few = values.flatten()[:64].unique()[:4].tolist()
    return ", ".join(f"{value:.4g}" for value in few) + ("" if len(few) < 4 else ", ...")
