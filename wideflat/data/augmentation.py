"""What is done to a batch of images before the network sees it: whole-tensor operations, no loop over images.

The order is: resize, policy (AutoAugment or Fast AutoAugment), flip, crop, normalise, Cutout. That is the order of the
code of Fast AutoAugment, whose settings the paper follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from wideflat.checks import whole
from wideflat.checks.doors import asks
from wideflat.data.policies import Policy, check_pixels, policy

__all__ = ["Augmentation", "crop", "cutout", "flip", "normalise", "resize"]

#: Wider images, and borders, are never meant.
MOST_SIDE = 4096


@asks
@dataclasses.dataclass(frozen=True)
class Augmentation:
    """The augmentation of one experiment.

    Args:
        padding: Zero padding of the random crops on each side (4 for CIFAR, 8 for Tiny ImageNet, 32 at 224x224); 0
            for no crops. The border is black, as is usual: zero before normalisation.
        flip: Mirror each image with probability 1/2.
        policy: None, "autoaugment" (the 25 sub-policies for CIFAR-10) or "fast-autoaugment" (those for ImageNet), one
            sub-policy drawn for every image.
        cutout: Side of the square set to the mean colour, at a random place of every image; 0 for none.
        size: Side to which the images are resized first, or None.
        mean: Of each channel, subtracted in place of the data set's own; None for that.
        std: Of each channel, divided by in place of the data set's own; None for that.

    Example:
        >>> cifar = Augmentation(padding=4, flip=True)
        >>> pixels = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
        >>> cifar(pixels, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), generator=torch.Generator()).shape
        torch.Size([2, 3, 32, 32])
    """

    padding: int = 0
    flip: bool = False
    policy: Literal["autoaugment", "fast-autoaugment"] | None = None
    cutout: int = 0
    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __repr__(self) -> str:
        """All that is done; other means and deviations than the data set's only where there are any."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shown = (f"{name}={value!r}" for name, value in values.items() if name not in ("mean", "std") or value)
        return f"Augmentation({', '.join(shown)})"

    def __post_init__(self) -> None:
        whole("padding", self.padding, most=MOST_SIDE)
        whole("cutout", self.cutout, most=MOST_SIDE)
        if self.size is not None:
            whole("size", self.size, 1, MOST_SIDE)
        if self.policy is not None:
            policy(self.policy)  # an unknown name fails here and not in the first batch

    def evaluation(self) -> Augmentation:
        """What is done to test images: resizing and normalisation only."""
        return Augmentation(size=self.size, mean=self.mean, std=self.std)

    @asks
    def __call__(
        self, pixels: Tensor, mean: Sequence[float], std: Sequence[float], generator: torch.Generator
    ) -> Tensor:
        """Augment a batch.

        Args:
            pixels: uint8, (n, H, W, C), on any device.
            mean: Of each channel of the data set, in units of the full range.
            std: Of each channel of the data set, in units of the full range.
            generator: On the CPU. All random numbers come from it, so they are the same on every device.

        Returns:
            float32, (n, C, H, W), channels last in memory.
        """
        mean, std = self.mean or mean, self.std or std
        check_pixels(pixels, mean, std)
        n, device = len(pixels), pixels.device
        if self.size is not None and self.size != pixels.shape[1]:
            pixels = resize(pixels, self.size)
        if self.policy is not None:
            drawn: Policy = policy(self.policy)
            pixels = drawn(pixels, generator, fill=[round(255 * m) for m in mean])
        if self.flip:
            pixels = flip(pixels, (torch.rand(n, generator=generator) < 0.5).to(device))
        if self.padding:
            offsets = torch.randint(2 * self.padding + 1, (2, n), generator=generator).to(device)
            pixels = crop(pixels, offsets[0], offsets[1], self.padding)
        images = normalise(pixels, mean, std)
        if self.cutout:
            height, width = images.shape[-2:]
            row = torch.randint(height, (n,), generator=generator).to(device)
            column = torch.randint(width, (n,), generator=generator).to(device)
            images = cutout(images, row, column, self.cutout)
        return images


def resize(pixels: Tensor, size: int) -> Tensor:
    """Resize to ``size`` x ``size``: bilinear, smoothed when it shrinks, rounded to whole values.

    Args:
        pixels: uint8, (n, H, W, C).
        size: The new height and width.
    """
    shrinks = size < max(pixels.shape[1:3])
    values = F.interpolate(
        pixels.permute(0, 3, 1, 2).float(), (size, size), mode="bilinear", align_corners=False, antialias=shrinks
    )
    return values.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def flip(pixels: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror left and right the images for which ``mirrored`` (n,) holds.

    Example:
        >>> pixels = torch.arange(3, dtype=torch.uint8).view(1, 1, 3, 1)
        >>> flip(pixels, torch.tensor([True])).flatten().tolist()
        [2, 1, 0]
    """
    other = pixels.permute(0, 3, 1, 2).flip(3).permute(0, 2, 3, 1)
    n = len(pixels)
    a, b = other.reshape(n, -1), pixels.reshape(n, -1)
    if a.shape[1] % 8 == 0:  # eight bytes at a time
        a, b = a.view(torch.int64), b.view(torch.int64)
    return torch.where(mirrored[:, None], a, b).view(torch.uint8).view(pixels.shape)


def crop(pixels: Tensor, top: Tensor, left: Tensor, padding: int) -> Tensor:
    """Cut from each image, padded with zeros on all sides, a window of the image's size.

    One gather: a row of the window is a run of bytes of the padded image, and all runs of that length are a view.

    Args:
        pixels: uint8, (n, H, W, C), contiguous.
        top: First row of each window, 0 to 2 padding.
        left: First column of each window, 0 to 2 padding.
        padding: Width of the zero border.

    Example:
        >>> pixels = torch.arange(1, 5, dtype=torch.uint8).view(1, 2, 2, 1)
        >>> crop(pixels, torch.tensor([0]), torch.tensor([1]), padding=1).flatten().tolist()
        [0, 0, 1, 2]
    """
    n, height, width, channels = pixels.shape
    padded = F.pad(pixels, (0, 0, padding, padding, padding, padding))
    rows, columns = height + 2 * padding, width + 2 * padding
    first = torch.arange(n, device=pixels.device) * rows + top
    start = (first[:, None] + torch.arange(height, device=pixels.device)) * columns + left[:, None]
    windows = padded.reshape(-1).unfold(0, width * channels, channels)
    return windows.index_select(0, start.view(-1)).view(pixels.shape)


def normalise(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Bytes (n, H, W, C) to floats (n, C, H, W), channels last in memory: (pixel / 255 - mean) / std.

    Example:
        >>> round(normalise(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8), (0.5,), (0.25,)).item(), 5)
        2.0
    """
    n, height, width, channels = pixels.shape
    mean_, std_ = (torch.tensor(v, dtype=torch.float32, device=pixels.device) for v in (mean, std))
    scale, shift = (1 / (255 * std_)).repeat(width), (-mean_ / std_).repeat(width)
    # A row of pixels at once: the innermost dimension is long enough for vector instructions.
    values = torch.addcmul(shift, pixels.reshape(n * height, width * channels).float(), scale)
    return values.view(n, height, width, channels).permute(0, 3, 1, 2)


def cutout(images: Tensor, row: Tensor, column: Tensor, size: int) -> Tensor:
    """Set a square of each image to zero, after normalisation the mean colour.

    DeVries, Taylor, "Improved regularization of convolutional neural networks with cutout" (arXiv 1708.04552): the
    center may be any pixel, so the square may stick out of the image.

    Args:
        images: (n, C, H, W), channels last in memory.
        row: Row of each center, (n,).
        column: Column of each center, (n,).
        size: Side of the square.
    """
    n, channels, height, width = images.shape

    def inside(center: Tensor, length: int) -> Tensor:
        start = (center - size // 2)[:, None]
        position = torch.arange(length, device=images.device)
        return (position >= start) & (position < start + size)

    columns = inside(column, width).repeat_interleave(channels, 1)
    cut = inside(row, height)[:, :, None] & columns[:, None, :]
    values = images.permute(0, 2, 3, 1).reshape(n, height, width * channels)
    return values.masked_fill(cut, 0.0).view(n, height, width, channels).permute(0, 3, 1, 2)
