"""Mini-batches for replicas: each goes through the same data in a shuffled order of its own, and can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from wideflat.checks import shown, whole
from wideflat.seeds import as_seed, derive_seed

__all__ = ["ReplicaBatches"]


class ReplicaBatches:
    """Epochs of mini-batches, one for each replica at a time.

    The order is a function of (seed, replica, epoch), so that a resumed training sees what the whole one would have
    seen. A loop that was left early, or a state that was loaded, goes on in the middle of its epoch.

    Args:
        loader: Says what the data are and how they become batches: data set, batch size, ``collate_fn``, workers,
            ``drop_last``. Its own order is not used.
        num_replicas: y.
        seed: Of the orders.

    Example:
        >>> loader = DataLoader([0, 1, 2, 3], batch_size=2)
        >>> batches = ReplicaBatches(loader, num_replicas=2)
        >>> first, second = zip(*batches)
        >>> [sorted(torch.cat(stream).tolist()) for stream in (first, second)], batches.epoch
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 1)
    """

    def __init__(self, loader: DataLoader[Any], num_replicas: int, *, seed: int = 0) -> None:
        if not isinstance(loader, DataLoader):
            raise TypeError(f"expected a torch DataLoader, got {type(loader).__name__}")
        if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            raise TypeError(
                "replicas shuffle the data each in its own way, which takes a data set with indices and a batch size; "
                "for streams make a loader for each replica, and zip(*loaders)"
            )
        self.loader, self.seed = loader, as_seed(seed)
        self.num_replicas = whole("num_replicas", num_replicas, 1)
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """The mini-batches of an epoch, of each replica."""
        return len(self.loader)

    def __iter__(self) -> Iterator[list[Any]]:
        """What is left of this epoch."""
        if self.position >= len(self):  # saved at the last mini-batch of an epoch
            self._end_epoch()
        for batches in zip(*(self._stream(replica) for replica in range(self.num_replicas)), strict=True):
            self.position += 1
            yield list(batches)
        self._end_epoch()

    def _end_epoch(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def _stream(self, replica: int) -> DataLoader[Any]:
        """What is left of this epoch for one replica."""
        size = self.loader.batch_size
        assert size is not None
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "replica", replica, self.epoch))
        order = torch.randperm(len(self.loader.dataset), generator=generator).tolist()  # type: ignore[arg-type]
        batches = [order[first : first + size] for first in range(0, len(self) * size, size)]
        return DataLoader(
            self.loader.dataset,
            batch_sampler=batches[self.position :],
            num_workers=self.loader.num_workers,
            collate_fn=self.loader.collate_fn,
            pin_memory=self.loader.pin_memory,
            timeout=self.loader.timeout,
            worker_init_fn=self.loader.worker_init_fn,
            multiprocessing_context=self.loader.multiprocessing_context,
            generator=generator,  # for the seeds of the workers
        )

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "num_replicas": self.num_replicas}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from what `state_dict` gave."""
        if not isinstance(state_dict, dict) or not state_dict.keys() >= self.state_dict().keys():
            names = ", ".join(self.state_dict())
            raise ValueError(f"a state of replica batches is a dictionary with {names}; got {shown(state_dict)}")
        if whole("num_replicas", state_dict["num_replicas"]) != self.num_replicas:
            raise ValueError(
                f"the saved batches are for {state_dict['num_replicas']} replicas, these for {self.num_replicas}"
            )
        self.epoch, self.position = whole("epoch", state_dict["epoch"]), whole("position", state_dict["position"])
        self.seed = as_seed(state_dict["seed"])
