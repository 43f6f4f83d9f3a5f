"""Batches of a data set, exactly reproducible from (seed, replica, epoch, batch)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wideflat.checks import whole
from wideflat.checks.doors import asks
from wideflat.data.augmentation import Augmentation
from wideflat.data.images import ImageData
from wideflat.seeds import as_seed, derive_seed

__all__ = ["Batches"]


class Batches:
    """The batches of every epoch of a training.

    Every random number is a function of (seed, replica, epoch, batch): any batch can be asked for at any time, there is
    no state to save, and a training that goes on in the middle of an epoch sees what it would have seen.

    Images are float32, (n, C, H, W), channels last in memory, on ``device``. The last batch of an epoch is smaller
    where the batch size does not divide the number of images, as with ``torch.utils.data.DataLoader``.

    Args:
        data: The data set.
        batch_size: Images in a batch.
        split: "train" or "test".
        augment: What is done to the images; None for normalisation only.
        seed: Of the run.
        replica: Number of the replica: each has its own shuffles and its own augmentation.
        shuffle: A new order in every epoch; False for the order of the data set. By default as ``split`` says.
        drop_last: Leave out the smaller last batch.
        device: Where the batches are made. The data set itself stays where it is.

    Example:
        >>> from wideflat.data import ImageData, ImageSplit
        >>> pixels = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1)
        >>> part = ImageSplit(pixels, torch.arange(10))
        >>> data = ImageData.of("digits", tuple("0123456789"), part, part)
        >>> batches = Batches(data, batch_size=4, seed=1)
        >>> [len(targets) for images, targets in batches.epoch(0)], len(batches)
        ([4, 4, 2], 3)
        >>> first, second = (torch.cat([targets for _, targets in batches.epoch(k)]) for k in range(2))
        >>> torch.equal(first, second), torch.equal(first.sort().values, second.sort().values)
        (False, True)
    """

    @asks
    def __init__(
        self,
        data: ImageData,
        batch_size: int,
        *,
        split: str = "train",
        augment: Augmentation | None = None,
        seed: int = 0,
        replica: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        part = data.split(split)
        self.data = data
        self.batch_size = batch_size = whole("batch_size", batch_size, 1)
        self.augment = augment or Augmentation()
        self.seed = as_seed(seed)
        self.replica = whole("replica", replica)
        self.shuffle = split == "train" if shuffle is None else shuffle
        self.drop_last = drop_last
        self.device = torch.device(device)
        self._pixels = part.images.permute(0, 2, 3, 1).contiguous()  # a view, not a copy, where loaded by wideflat
        self._targets = part.targets
        self._generator = torch.Generator()
        self._order: tuple[int, Tensor] | None = None
        if drop_last and len(part) < batch_size:
            raise ValueError(f"drop_last leaves nothing: {len(part)} images, batch_size {batch_size}")

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(len(self._targets), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @asks
    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and targets of every batch of an epoch, in order."""
        return (self.batch(number, position) for position in range(len(self)))

    @asks
    def batch(self, epoch: int, position: int) -> tuple[Tensor, Tensor]:
        """Images and targets of one batch of an epoch."""
        whole("position", position, 0, len(self) - 1)
        start = position * self.batch_size
        if self.shuffle:
            index = self._shuffled(epoch)[start : start + self.batch_size]
            n = len(self._pixels)
            pixels = self._pixels.view(n, -1).index_select(0, index).view(len(index), *self._pixels.shape[1:])
            targets = self._targets.index_select(0, index)
        else:
            pixels = self._pixels[start : start + self.batch_size]
            targets = self._targets[start : start + self.batch_size]
        self._generator.manual_seed(derive_seed(self.seed, "augmentation", self.replica, epoch, position))
        images = self.augment(pixels.to(self.device, non_blocking=True), self.data.mean, self.data.std, self._generator)
        return images, targets.to(self.device, non_blocking=True)

    def _shuffled(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._generator.manual_seed(derive_seed(self.seed, "order", self.replica, epoch))
            self._order = (epoch, torch.randperm(len(self._targets), generator=self._generator))
        return self._order[1]
