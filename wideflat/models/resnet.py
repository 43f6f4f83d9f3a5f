"""Residual networks: ResNet-18 and ResNet-50, and the ResNet-110 of the original CIFAR experiments.

He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016 (arXiv 1512.03385).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.checks import shown
from wideflat.models.arguments import checked
from wideflat.models.initialisation import kaiming_normal

__all__ = ["ResNet", "Stem", "quick_network", "resnet18", "resnet50", "resnet110"]

#: How a network begins: "cifar" is one 3x3 convolution at full resolution, "imagenet" a 7x7 one of stride 2 followed
#: by a 3x3 max pool of stride 2.
Stem = Literal["cifar", "imagenet"]


class PaddedShortcut(nn.Module):
    """The parameter-free shortcut (option A): every second pixel, new channels zero (appended after the old ones)."""

    def __init__(self, stride: int, extra_channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra_channels = extra_channels

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C + extra, H / stride, W / stride)."""
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.extra_channels))


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Option B: a 1x1 convolution with batch norm."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class BasicBlock(nn.Module):
    """conv3x3 - BN - ReLU - conv3x3 - BN, plus the shortcut, then ReLU."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """The block applied to (N, C, H, W)."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class Bottleneck(nn.Module):
    """conv1x1 - BN - ReLU - conv3x3 - BN - ReLU - conv1x1 - BN, plus the shortcut, then ReLU.

    The stride sits in the 3x3 convolution (the common later form; the original has it in the first 1x1; the number of
    parameters is the same).
    """

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """The block applied to (N, C, H, W)."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network: a stem, stages of blocks (the first block of each stage but the first halves the image),
    the mean over all pixels, one dense layer.

    Args:
        block: :class:`BasicBlock` or :class:`Bottleneck`.
        depths: Number of blocks of each stage.
        width: Channels of the first stage; doubled by every further one.
        num_classes: Number of outputs.
        stem: "cifar" or "imagenet".
        option: "A", parameter-free shortcuts where the shape changes, or "B", 1x1 convolutions there.
        in_channels: Channels of the images.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, ...],
        width: int,
        num_classes: int,
        stem: Stem = "cifar",
        option: Literal["A", "B"] = "B",
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        if stem == "cifar":
            conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
            pool: nn.Module = nn.Identity()
        elif stem == "imagenet":
            conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
            pool = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            raise ValueError(f'stem must be "cifar" or "imagenet", got {shown(stem)}')
        self.conv1, self.bn1, self.pool = conv1, nn.BatchNorm2d(width), pool
        channels = width
        stages: list[nn.Module] = []
        for i, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for j in range(depth):
                stride = 2 if i > 0 and j == 0 else 1
                out = width * 2**i * block.expansion
                shortcut: nn.Module = nn.Identity()
                if stride != 1 or channels != out:
                    shortcut = (
                        PaddedShortcut(stride, out - channels) if option == "A" else _projection(channels, out, stride)
                    )
                blocks.append(block(channels, width * 2**i, stride, shortcut))
                channels = out
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.dense = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) to scores (N, classes)."""
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.stages(x)
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return self.dense(x)


@checked
def resnet18(num_classes: int = 10, stem: Stem = "cifar", in_channels: int = 3) -> nn.Module:
    """ResNet-18: basic blocks 2-2-2-2 of width 64 to 512, for images of any size.

    Args:
        num_classes: Number of outputs.
        stem: "cifar" (3x3 convolution, no pooling) or "imagenet" (what the presets of Table 1 have).
        in_channels: Channels of the images.

    Example:
        >>> sum(p.numel() for p in resnet18().parameters())
        11173962
    """
    return kaiming_normal(ResNet(BasicBlock, (2, 2, 2, 2), 64, num_classes, stem, "B", in_channels))


@checked
def resnet50(num_classes: int = 10, stem: Stem = "cifar", in_channels: int = 3) -> nn.Module:
    """ResNet-50: bottleneck blocks 3-4-6-3, for images of any size.

    Args:
        num_classes: Number of outputs (200 for Tiny ImageNet).
        stem: "cifar" (3x3 convolution, no pooling) or "imagenet" (what the presets of Table 1 have, also at 64x64).
        in_channels: Channels of the images.

    Example:
        >>> sum(p.numel() for p in resnet50(1000, stem="imagenet").parameters())
        25557032
    """
    return kaiming_normal(ResNet(Bottleneck, (3, 4, 6, 3), 64, num_classes, stem, "B", in_channels))


@checked
def resnet110(num_classes: int = 10, option: Literal["A", "B"] = "A", in_channels: int = 3) -> nn.Module:
    """ResNet-110 of the original CIFAR experiments: 3 stages of 18 basic blocks, 16, 32 and 64 channels.

    Args:
        num_classes: Number of outputs.
        option: "A" as published for CIFAR (parameter-free shortcuts), or "B" (1x1 convolutions).
        in_channels: Channels of the images.

    Example:
        >>> sum(p.numel() for p in resnet110().parameters())  # published as 1.7M
        1727962
    """
    return kaiming_normal(ResNet(BasicBlock, (18, 18, 18), 16, num_classes, "cifar", option, in_channels))


@checked
def quick_network(num_classes: int = 2, in_channels: int = 1) -> nn.Module:
    """A residual network of 2 narrow blocks with batch norm: stands for the deep ones in --quick."""
    return kaiming_normal(ResNet(BasicBlock, (1, 1), 16, num_classes, "imagenet", "B", in_channels))
