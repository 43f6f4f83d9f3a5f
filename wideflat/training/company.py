"""In whose company a training is: alone, on the ranks of ``torchrun``, or among jobs that come and go.

The loop (:mod:`wideflat.training.loop`) and the training (:mod:`wideflat.training.training`) are written once. What
they have to ask others about, they ask their company:

==============================  ===========================  ==========================  ==============================
what                            :class:`Alone`               `Ranks`                     `Elastic`
==============================  ===========================  ==========================  ==============================
who writes                      this process                 the first rank              every job, its own run
which replicas are here         all                          one, or a part of its data  one
what the others say (gather)    nothing                      asked                       not asked: they may be dead
stopping and saving             when it is asked to          agreed on by all            each for itself
a mini-batch                    whole                        divided over a replica's    whole
                                                             ranks
what is on disk                 the state                    the state, as of one        the state of this replica, and
                                                             process                     how often it met the others
an error                        ends it                      ends all ranks, with it     ends this job; others go on
==============================  ===========================  ==========================  ==============================
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wideflat.presets import Preset
from wideflat.replicas import ReplicaGroup, Replicas

if TYPE_CHECKING:
    from wideflat.distributed.split_batch import SplitBatch
    from wideflat.training.training import Training

__all__ = ["Alone", "Company", "WholeBatch", "on_torchrun"]


def on_torchrun() -> bool:
    """Whether ``torchrun`` has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


class WholeBatch:
    """A network that sees its mini-batches whole; `wideflat.distributed.split_batch.SplitBatch` divides them.

    Args:
        network: The network.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def share(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The part of a mini-batch for this process: all of it."""
        return x, y

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs."""
        return self.network(x)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The cross-entropy."""
        return F.cross_entropy(logits, y)

    def own(self, loss: Tensor) -> Tensor:
        """The mean loss over the images of this process, from what `loss` gave."""
        return loss

    def mean(self, loss: Tensor) -> Tensor:
        """The mean loss over the whole mini-batch, from what `loss` gave here and elsewhere."""
        return loss


class Alone(contextlib.AbstractContextManager["Alone"]):
    """Nobody else: all replicas are in this process. What the other companies change is said in the table above."""

    #: Whether this process keeps a run on disk.
    writes = True
    #: Whether all replicas can be asked for something at any time.
    sees_all = True
    #: Whether others wait for this process at every coupling, even when it leaves out its step.
    must_meet = False
    #: Which of the processes that ask and answer together this is, and of how many.
    place, size = 0, 1
    #: What tells the noise inside the networks here from that of other processes with the same replica.
    own_noise: tuple[int, ...] = ()
    #: What is noted about a start beside the machine.
    about: dict[str, Any] = {}  # noqa: RUF012 # nobody writes into it
    #: The end of the sentence "resumed ... at epoch ...".
    words = ""
    #: Where messages of the company itself go.
    say: Callable[[str], object] = staticmethod(lambda message: None)

    def __exit__(self, *_: object) -> None:
        return None

    def check(self, preset: Preset) -> None:
        """Refuse what cannot be trained in this company, before anything is written."""

    # ---- who has what

    def local_replicas(self, num_replicas: int) -> list[int]:
        """Which replicas are in this process."""
        return list(range(num_replicas))

    def group(self, replicas: Replicas) -> Replicas | ReplicaGroup:
        """The group of all replicas, from those in this process."""
        return replicas

    def share(self, network: nn.Module) -> WholeBatch | SplitBatch:
        """The part that this process has in the mini-batches of a network."""
        return WholeBatch(network)

    def device(self, device: torch.device | str) -> torch.device:
        """Where this process computes, if it was asked to do so on ``device``."""
        return torch.device(device)

    # ---- what all know

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in all of them."""
        return [value]

    def of_replicas(self, value: Any) -> list[Any]:
        """The values of those processes that have the replicas between them, in order, in all processes."""
        return [value]

    def all(self, here: bool) -> bool:
        """Whether something is true in all processes that take their steps together."""
        return here

    def votes(self, probabilities: Tensor) -> Tensor:
        """The sum over all replicas of something that was summed over those in this process."""
        return probabilities

    def agree(self, step: int, urgent: bool, stop: str | None, save: bool) -> tuple[str | None, bool]:
        """What to do now: stop (and because of what), save.

        Args:
            step: Iterations done.
            urgent: Whether it must be agreed on now; otherwise it may take a few iterations.
            stop: Why this process was asked to stop, if it was.
            save: Whether it is time for this process to save.
        """
        return stop, save

    # ---- what is on disk

    def folder(self, out: str | os.PathLike[str]) -> Path:
        """The run directory of this process."""
        return Path(out)

    def packed(self, state: dict[str, Any]) -> dict[str, Any]:
        """What is saved of a state of the training."""
        return state

    def unpacked(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state of the training from what was saved."""
        return saved

    def about_epoch(self) -> dict[str, Any]:
        """What this company adds to the metrics of an epoch."""
        return {}

    # ---- the beginning

    def begin(self, training: Training, saved: dict[str, Any] | None) -> None:
        """Begin a training, or go on from a state of it."""
        if saved is None:
            training.begin()
        else:
            training.resume(saved)


#: Any of them; the others are derived from `Alone`.
Company: TypeAlias = Alone
