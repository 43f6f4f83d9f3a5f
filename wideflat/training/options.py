"""How a training is computed, beside what is trained."""

from __future__ import annotations

import dataclasses

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
        if self.amp not in FORMATS:
            raise ValueError(f"amp must be off, bf16 or fp16, got {self.amp!r}")
        for field in ("evaluate_every", "batch_norm_images", "limit_data"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be >= 1, got {value}")
