"""How a training is computed, beside what is trained."""

from __future__ import annotations

import dataclasses

from wideflat.checks import choice, number, whole
from wideflat.training.precision import FORMATS

__all__ = ["Options"]


@dataclasses.dataclass(frozen=True)
class Options:
    """How to compute, beside what (:class:`wideflat.presets.Preset`).

    Args:
        seed: Of everything random.
        limit_data: Train and test on at most this many images each.
        amp: ``off``, ``bf16`` or ``fp16`` (with gradient scaling): automatic mixed precision.
        compile: ``torch.compile`` the networks.
        channels_last: Memory format of images and convolutions; faster almost everywhere.
        evaluate_every: Epochs between two evaluations on the test set; the last epoch is always evaluated. A run may go
            on with another number.
        batch_norm_images: Training images that batch norm is refreshed on at the evaluations; the final model uses all.
        max_loss: The run has diverged when the mean training loss of an epoch exceeds this many times ``log(classes)``.
    """

    seed: int = 0
    limit_data: int | None = None
    amp: str = "off"
    compile: bool = False
    channels_last: bool = True
    evaluate_every: int = 1
    batch_norm_images: int = 10_000
    max_loss: float = 100.0

    def __post_init__(self) -> None:
        choice("amp", self.amp, FORMATS)
        whole("seed", self.seed, -(2**63), 2**63 - 1)
        for field in ("evaluate_every", "batch_norm_images"):
            object.__setattr__(self, field, whole(field, getattr(self, field), 1))
        if self.limit_data is not None:
            whole("limit_data", self.limit_data, 1)
        number("max_loss", self.max_loss, above=0)
