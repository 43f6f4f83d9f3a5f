"""Images in memory: a data set with its training and test part."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from wideflat.checks import choice
from wideflat.checks.doors import asks

__all__ = ["ImageData", "ImageSplit", "channel_statistics"]


@asks
@dataclasses.dataclass(frozen=True)
class ImageSplit:
    """One part of a data set.

    Args:
        images: uint8, (N, C, H, W). Pixels of one image lie together (channels last in memory); may be a memory map.
        targets: int64, (N,).
    """

    images: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise ValueError(f"images must be uint8 (N, C, H, W), got {self.images.dtype} {tuple(self.images.shape)}")
        if self.targets.dtype != torch.int64 or self.targets.shape != self.images.shape[:1]:
            raise ValueError(
                f"targets must be int64 ({len(self.images)},), got {self.targets.dtype} {tuple(self.targets.shape)}"
            )

    def __len__(self) -> int:
        return len(self.targets)


@asks
@dataclasses.dataclass(frozen=True)
class ImageData:
    """A data set of small images, held as bytes; :class:`wideflat.data.Batches` makes normalised floats of it.

    Args:
        name: Of the data set.
        classes: Names of the classes; target k means ``classes[k]``.
        train: The training part.
        test: The test part (for Tiny ImageNet the labelled validation part, as in the paper).
        mean: Mean of each channel over the training part, in units of the full range (0 to 1).
        std: Standard deviation of each channel over the training part, in the same units.
        source: Where it was read from.
        altered: Files whose checksum is not the published one, where that was allowed.
        digest: Of pixels and labels, for data that nobody has published.

    Example:
        >>> pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
        >>> part = ImageSplit(pixels, torch.tensor([0, 1]))
        >>> data = ImageData.of("two", ("black", "white"), part, part)
        >>> data.mean, data.std, data.num_classes, data.image_size
        ((0.5,), (0.5,), 2, 1)
    """

    name: str
    classes: tuple[str, ...]
    train: ImageSplit
    test: ImageSplit
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str = ""
    altered: tuple[str, ...] = ()
    digest: str = ""

    @classmethod
    @asks
    def of(
        cls,
        name: str,
        classes: tuple[str, ...],
        train: ImageSplit,
        test: ImageSplit,
        source: str = "",
        altered: tuple[str, ...] = (),
    ) -> ImageData:
        """Make a data set, with the mean and deviation of its training images."""
        for part in (train, test):
            if len(part) and not 0 <= int(part.targets.min()) <= int(part.targets.max()) < len(classes):
                raise ValueError(
                    f"targets of {name} must lie in 0 to {len(classes) - 1}, "
                    f"got {int(part.targets.min())} to {int(part.targets.max())}"
                )
        mean, std = channel_statistics(train.images)
        return cls(name, classes, train, test, mean, std, source, altered)

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def image_size(self) -> int:
        """Height and width of the images."""
        return self.train.images.shape[-1]

    @property
    def channels(self) -> int:
        """3 for colour, 1 for grey."""
        return self.train.images.shape[1]

    def split(self, name: str) -> ImageSplit:
        """The part called "train" or "test"."""
        return self.train if choice("split", name, ("train", "test")) == "train" else self.test

    @asks
    def subset(self, train: int | None = None, test: int | None = None) -> ImageData:
        """The first images of each part (all of them where None); mean and deviation stay those of the whole."""

        def first(part: ImageSplit, count: int | None) -> ImageSplit:
            if count is not None and not 1 <= count <= len(part):
                raise ValueError(f"a subset must have 1 to {len(part)} images, got {count}")
            return part if count is None else ImageSplit(part.images[:count], part.targets[:count])

        return dataclasses.replace(self, train=first(self.train, train), test=first(self.test, test))

    @asks
    def limited(self, limit: int | None, whole_test: bool = False) -> ImageData:
        """At most the first ``limit`` images of each part; all of them where it is None.

        Args:
            limit: How many, at most.
            whole_test: Leave the test part whole.

        Example:
            >>> part = ImageSplit(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
            >>> data = ImageData.of("zeros", ("0",), part, part)
            >>> [(len(cut.train), len(cut.test)) for cut in (data.limited(2), data.limited(9), data.limited(2, True))]
            [(2, 2), (3, 3), (2, 3)]
        """
        if limit is None:
            return self
        return self.subset(min(limit, len(self.train)), None if whole_test else min(limit, len(self.test)))


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over all images and pixels, in units of the full range.

    Counted with a table of the 256 values, so it is exact and needs no floating-point copy of the images.

    Args:
        images: uint8, (N, C, H, W).
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        counts = torch.zeros(256, dtype=torch.float64)
        for part in channel.split(8192):  # bincount makes an int64 copy: keep it small
            counts += torch.bincount(part.reshape(-1), minlength=256)
        weights = counts / counts.sum().clamp_min(1)
        mean = weights @ values
        means.append(mean.item())
        deviations.append((weights @ (values - mean) ** 2).sqrt().item())
    return tuple(means), tuple(deviations)
