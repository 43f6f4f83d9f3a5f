"""What every measure that goes through all data several times begins with, and what it says of itself at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from wideflat.checks import choice, network
from wideflat.distributed.whole import whole_network
from wideflat.energy.profile import architecture, conventions
from wideflat.energy.request import whole_passes
from wideflat.evaluation.blocks import Blocks
from wideflat.evaluation.evaluation import Evaluation, Forward, Metric
from wideflat.evaluation.selection import Selection, select_parameters

__all__ = ["Opened", "opened"]


@dataclass
class Opened:
    """A network that is about to be measured.

    Attributes:
        model: The network, whole where it was sharded.
        evaluation: It with its metric.
        names: The parameters that move.
        words: These in words.
        blocks: The data.
        batch_size: Examples a block; None where the data have blocks of their own.
        seed: Of everything random.
    """

    model: nn.Module
    evaluation: Evaluation
    names: list[str]
    words: str
    blocks: Blocks
    batch_size: int | None
    seed: int

    def conventions(self, measure: str, *, batches_matter: bool = False, **more: Any) -> dict[str, Any]:
        """What the result depends on (:func:`wideflat.energy.profile.conventions`).

        Args:
            measure: What was measured.
            batches_matter: Whether the result depends on which examples are in a block.
            **more: The rest: how many numbers move, how many examples there are, what only this measure has.
        """
        evaluation = self.evaluation
        batch_norm = evaluation.batch_norm if evaluation.norms else None
        return conventions(
            measure,
            **{
                "metric": evaluation.metric_name,
                "meaning": evaluation.meaning,
                "batch_norm": batch_norm,
                "batch_size": self.batch_size if batches_matter or batch_norm == "batch" else None,
                "parameters": self.words,
                "architecture": architecture(self.model),
                "seed": self.seed,
                **more,
            },
        )


def opened(
    model: nn.Module,
    data: Any,
    metric: Metric,
    parameters: Selection,
    *,
    batch_norm: str,
    forward: Forward | None,
    batch_size: int | None,
    seed: int,
    statistics: Sequence[str] = ("eval", "batch"),
) -> Opened:
    """Check what measures have in common, gather a sharded network, choose its parameters, cut the data into blocks.

    Args:
        model: The network; all ranks give theirs where it is sharded.
        data: See :func:`wideflat.local_energy`.
        metric: See there.
        parameters: See there.
        batch_norm: One of ``statistics``.
        forward: See :func:`wideflat.local_energy`.
        batch_size: Examples a block, where blocks are made here.
        seed: Of the order of the data.
        statistics: The batch norms that the measure knows.
    """
    choice("batch_norm", batch_norm, statistics)
    model = whole_network(network(model))
    evaluation = Evaluation(model, metric, batch_norm, forward)
    names, words = select_parameters(model, parameters)
    blocks, batch_size = whole_passes(evaluation, data, batch_size, seed)
    return Opened(model, evaluation, names, words, blocks, batch_size, seed)
