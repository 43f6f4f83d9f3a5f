"""When a training saves and shows something, and how fast it is."""

from __future__ import annotations

import time
from typing import Any

from wideflat.environment import now
from wideflat.training.training import Training

__all__ = ["Clock"]

#: Seconds between two updates of the progress.
SHOW_EVERY = 0.5


class Clock:
    """The clock of one training.

    Args:
        training: The training.
        checkpoint_minutes: Between two states that are saved within an epoch.
    """

    def __init__(self, training: Training, checkpoint_minutes: float) -> None:
        self.training = training
        self.interval = 60 * checkpoint_minutes
        self.last_save = self.last_show = self.start = self.end = time.monotonic()
        self.first_step = training.step

    def save_is_due(self) -> bool:
        """Whether the last state was saved long enough ago."""
        return time.monotonic() - self.last_save > self.interval

    def saved(self) -> None:
        """A state has been saved."""
        self.last_save = time.monotonic()
        if self.training.at_epoch_end:
            self.start, self.first_step = self.last_save, self.training.step

    def show_is_due(self) -> bool:
        """Whether something was shown long enough ago; if so, it will be now."""
        if time.monotonic() - self.last_show < SHOW_EVERY:
            return False
        self.last_show = time.monotonic()
        return True

    def trained(self) -> None:
        """The iterations of an epoch are done; what follows is evaluation and saving."""
        self.end = time.monotonic()

    def row(self) -> dict[str, Any]:
        """The row of ``timing.jsonl`` of the epoch that has just ended."""
        seconds, done = self.end - self.start, time.monotonic() - self.end
        images = (self.training.step - self.first_step) * self.training.images_per_step
        return {
            "epoch": self.training.epoch,
            "time": now(),
            "seconds": round(seconds, 3),
            "images_per_second": round(images / max(seconds, 1e-6), 1),
            "evaluation_seconds": round(done, 3),
        }
