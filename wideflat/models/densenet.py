"""DenseNet-121.

Huang, Liu, van der Maaten, Weinberger, "Densely connected convolutional networks", CVPR 2017 (arXiv 1608.06993).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.checks import shown
from wideflat.models.arguments import checked
from wideflat.models.initialisation import kaiming_normal
from wideflat.models.resnet import Stem

__all__ = ["DenseNet", "densenet121"]


class DenseLayer(nn.Module):
    """BN - ReLU - conv1x1 (4 k channels) - BN - ReLU - conv3x3 (k channels), appended to what came."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C + k, H, W)."""
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.cat([x, out], 1)


class Transition(nn.Module):
    """BN - ReLU - conv1x1 to half the channels - mean over 2x2."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(in_channels)
        self.conv = nn.Conv2d(in_channels, in_channels // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C/2, H/2, W/2)."""
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class DenseNet(nn.Module):
    """Dense blocks joined by transitions, the mean over all pixels, one dense layer.

    Args:
        depths: Number of layers of each dense block.
        growth: Channels that each layer adds.
        num_classes: Number of outputs.
        stem: "imagenet": 7x7 convolution of stride 2, BN, ReLU, 3x3 max pool of stride 2; "cifar": one 3x3
            convolution and nothing else (the first layer begins with BN and ReLU anyway).
        in_channels: Channels of the images.
    """

    def __init__(
        self, depths: tuple[int, ...], growth: int, num_classes: int, stem: Stem = "cifar", in_channels: int = 3
    ) -> None:
        super().__init__()
        channels = 2 * growth
        if stem == "cifar":
            self.stem: nn.Module = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        elif stem == "imagenet":
            self.stem = nn.Sequential(
                nn.Conv2d(in_channels, channels, 7, stride=2, padding=3, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
        else:
            raise ValueError(f'stem must be "cifar" or "imagenet", got {shown(stem)}')
        blocks: list[nn.Module] = []
        for i, depth in enumerate(depths):
            if i > 0:
                blocks.append(Transition(channels))
                channels //= 2
            layers = [DenseLayer(channels + j * growth, growth) for j in range(depth)]
            blocks.append(nn.Sequential(*layers))
            channels += depth * growth
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(channels)
        self.dense = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) to scores (N, classes)."""
        x = F.relu(self.bn(self.blocks(self.stem(x))))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return self.dense(x)


@checked
def densenet121(num_classes: int = 200, stem: Stem = "cifar", in_channels: int = 3) -> nn.Module:
    """DenseNet-121: dense blocks 6-12-24-16 of growth 32, for images of any size from 8x8 (32x32 with "imagenet").

    Args:
        num_classes: Number of outputs.
        stem: "cifar" (one 3x3 convolution) or "imagenet" (as published, and in the preset of Table 1).
        in_channels: Channels of the images.

    Example:
        >>> sum(p.numel() for p in densenet121(1000, stem="imagenet").parameters())
        7978856
    """
    return kaiming_normal(DenseNet((6, 12, 24, 16), 32, num_classes, stem, in_channels))
