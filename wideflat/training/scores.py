"""Errors and losses of networks, and of their ensemble."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wideflat.kernels.float64 import doubled

__all__ = ["Scores", "evaluate"]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Errors (fractions) and mean cross-entropy losses of networks on the same images, and of their ensemble."""

    errors: tuple[float, ...]
    losses: tuple[float, ...]
    ensemble_error: float


def evaluate(
    networks: Sequence[nn.Module],
    batches: Iterator[tuple[Tensor, Tensor]],
    votes: Callable[[Tensor], Tensor] = lambda probabilities: probabilities,
) -> Scores:
    """Error and loss of each network, and the error of the sum of their predicted probabilities.

    The networks are evaluated in eval mode, and are in the mode they were in afterwards.

    Args:
        networks: What to evaluate.
        batches: Images and their classes.
        votes: Adds the probabilities of networks elsewhere to those of the networks here.

    Example:
        >>> constant = nn.Linear(1, 2)
        >>> _ = nn.init.zeros_(constant.weight), constant.bias.data.copy_(torch.tensor([1.0, 0.0]))
        >>> batch = torch.zeros(4, 1), torch.tensor([0, 0, 0, 1])
        >>> evaluate([constant], iter([batch])).errors
        (0.25,)
    """
    modes = [network.training for network in networks]
    for network in networks:
        network.eval()
    wrong: Tensor | int = 0
    loss: Tensor | int = 0
    ensemble: Tensor | int = 0
    count = 0
    try:
        with torch.inference_mode():
            for x, y in batches:
                logits = torch.stack([network(x).float() for network in networks])
                wrong = wrong + (logits.argmax(-1) != y).sum(-1)
                loss = loss + doubled(torch.stack([F.cross_entropy(each, y, reduction="sum") for each in logits]))
                ensemble = ensemble + (votes(logits.softmax(-1).sum(0)).argmax(-1) != y).sum()
                count += len(y)
    finally:
        for network, mode in zip(networks, modes, strict=True):
            network.train(mode)
    if not count:
        raise ValueError("there are no images to evaluate on")
    errors, losses = torch.as_tensor(wrong).tolist(), torch.as_tensor(loss).tolist()
    return Scores(tuple(n / count for n in errors), tuple(total / count for total in losses), int(ensemble) / count)
