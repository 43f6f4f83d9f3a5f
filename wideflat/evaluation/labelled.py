"""Batches that are dictionaries with ``labels``, for networks that take them whole and return ``logits`` and ``loss``.

Such networks (those of Hugging Face) compare position t of their logits with label t, or, where they predict the next
token, with label t + 1. Which of them it is stands nowhere in the batch, and a wrong guess gives a number that looks
right. It is found out from the network's own loss of the first batch:

.. code-block:: text

    loss = cross-entropy of (logits[:, t], labels[:, t])         not shifted: classification, masked words, translation
    loss = cross-entropy of (logits[:, t], labels[:, t + 1])     shifted: the next word

with labels -100 left out. Where they are shifted, the labels move and the logits stay: the last position has the label
-100, and the logits, the largest tensor of a language model, are not copied. A network whose loss is neither (label
smoothing, a sum of several losses) is refused with the lines of ``forward=`` that say what is meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from wideflat.evaluation.labels import IGNORED
from wideflat.evaluation.metrics import scores
from wideflat.evaluation.origins import comes_from, on_host

__all__ = ["LabelAlignment", "has_labels"]


def has_labels(batch: Any) -> bool:
    """Whether a batch is a dictionary with a tensor of labels."""
    return isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor)


class LabelAlignment:
    """Which label belongs to which output of a network, decided once by the network's own loss.

    Example:
        >>> import torch
        >>> logits, labels = torch.randn(2, 4, 5), torch.randint(5, (2, 4))
        >>> own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        >>> outputs, targets = LabelAlignment().aligned({"logits": logits, "loss": own}, labels)
        >>> outputs.shape, targets.shape
        (torch.Size([2, 4, 5]), torch.Size([2, 4]))
        >>> bool((targets[:, :-1] == labels[:, 1:]).all()), targets[0, -1].item()
        (True, -100)
    """

    def __init__(self) -> None:
        self.shifted: bool | None = None

    def aligned(self, result: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets, position by position, from what the network returned for a batch with these labels."""
        result = _named(result)
        try:
            logits = scores(result, "loss")
        except TypeError as error:
            raise TypeError(
                f"{str(error).partition(' Say where')[0]} Say where the outputs are:\n    def forward(model, batch):\n"
                '        outputs = model(**batch)["their name"]\n        return outputs, batch["labels"]'
                '    # or outputs[:, :-1], batch["labels"][:, 1:]\nand give forward=forward'
            ) from None
        if self.shifted is None:
            own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
            self.shifted = _is_shifted(own.detach() if isinstance(own, Tensor) else None, logits.detach(), labels)
        if not self.shifted:
            return logits, labels
        host = on_host(labels)
        return logits, _next(labels) if host is labels else comes_from(_next(labels), lambda: _next(host))


def _next(labels: Tensor) -> Tensor:
    """The label of the position after each; none of the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _named(result: Any) -> Any:
    """A tuple as dictionary: (loss, logits, ...), as networks of Hugging Face return them, or (logits, ...).

    >>> import torch
    >>> list(_named((torch.tensor(1.0), torch.zeros(2, 3))))
    ['loss', 'logits']
    """
    tensors = isinstance(result, (tuple, list)) and len(result) > 0 and isinstance(result[0], Tensor)
    if not tensors or hasattr(result, "logits"):
        return result
    if result[0].numel() == 1 and len(result) > 1:
        return {"loss": result[0].reshape(()), "logits": result[1]}
    return {"logits": result[0]}


def _is_shifted(own: Tensor | None, logits: Tensor, labels: Tensor) -> bool:
    """Whether a network's own loss is that of the next label; an error where it is not told."""
    pairs = {False: (logits, labels)}
    if logits.dim() == 3 and logits.shape[:2] == labels.shape and labels.shape[1] > 1:
        pairs[True] = logits, _next(labels)
    found = [shifted for shifted, pair in pairs.items() if own is not None and _agrees(own, *pair)]
    if len(found) == 1:
        return found[0]
    if own is None:
        why = "it returned no loss"
    else:
        why = "its own loss is both" if found else f"its own loss, {float(own):.5g}, is neither"
    raise ValueError(
        "it cannot be told which label belongs to which output of this network (the same position, or the next): "
        f"{why}. Say it:\n    def forward(model, batch):\n        logits = model(**batch).logits\n"
        '        return logits[:, :-1], batch["labels"][:, 1:]    # or logits, batch["labels"]\n'
        "and give forward=forward"
    )


def _agrees(own: Tensor, logits: Tensor, labels: Tensor) -> bool:
    """Whether a network's own loss is the cross-entropy of these, to its rounding."""
    if labels.is_floating_point() or logits.shape[:-1] != labels.shape or not bool((labels != IGNORED).any()):
        return False
    if bool((labels >= logits.shape[-1]).any()):
        return False
    ours = float(F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), labels.long().reshape(-1)))
    precision = 1e-2 if own.element_size() < 4 else 2e-5
    return abs(ours - float(own)) <= precision * max(abs(ours), 1e-3)
