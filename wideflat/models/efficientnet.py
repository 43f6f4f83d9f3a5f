"""EfficientNet-B0.

Tan, Le, "EfficientNet: rethinking model scaling for convolutional neural networks", ICML 2019 (arXiv 1905.11946).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.models.arguments import checked
from wideflat.models.initialisation import kaiming_normal

__all__ = ["EfficientNet", "efficientnet_b0"]

#: Table 1 of the EfficientNet paper, rows 2 to 8: expansion, kernel, stride, channels, number of blocks.
B0 = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def _batch_norm(channels: int) -> nn.BatchNorm2d:
    """The authors' epsilon and momentum (0.99 in TensorFlow's convention)."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class InvertedBottleneck(nn.Module):
    """Expand (1x1), depthwise convolution, squeeze and excite, project (1x1); a shortcut where the shape stays.

    Args:
        in_channels: Channels that come.
        out_channels: Channels that go.
        expansion: How much wider the middle is.
        kernel: Size of the depthwise convolution.
        stride: Of the depthwise convolution.
        drop: Probability that the block is left out for an image in training (stochastic depth).
    """

    def __init__(
        self, in_channels: int, out_channels: int, expansion: int, kernel: int, stride: int, drop: float
    ) -> None:
        super().__init__()
        middle = in_channels * expansion
        squeezed = max(1, in_channels // 4)
        self.expand = (
            nn.Sequential(nn.Conv2d(in_channels, middle, 1, bias=False), _batch_norm(middle), nn.SiLU())
            if expansion != 1
            else nn.Identity()
        )
        self.depthwise = nn.Conv2d(
            middle, middle, kernel, stride=stride, padding=kernel // 2, groups=middle, bias=False
        )
        self.bn1 = _batch_norm(middle)
        self.squeeze = nn.Conv2d(middle, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, middle, 1)
        self.project = nn.Conv2d(middle, out_channels, 1, bias=False)
        self.bn2 = _batch_norm(out_channels)
        self.residual = stride == 1 and in_channels == out_channels
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """The block applied to (N, C, H, W)."""
        out = F.silu(self.bn1(self.depthwise(self.expand(x))))
        scale = self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(out, 1))))
        out = self.bn2(self.project(out * torch.sigmoid(scale)))
        if not self.residual:
            return out
        if self.training and self.drop > 0:
            keep = torch.rand(x.shape[0], 1, 1, 1, device=x.device, dtype=x.dtype) >= self.drop
            out = out * keep.to(x.dtype) / (1 - self.drop)
        return x + out


class EfficientNet(nn.Module):
    """A 3x3 convolution of stride 2, the inverted bottlenecks of ``B0``, a 1x1 convolution to 1280, dropout, dense."""

    def __init__(
        self, num_classes: int, dropout: float = 0.2, stochastic_depth: float = 0.2, in_channels: int = 3
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, 32, 3, stride=2, padding=1, bias=False), _batch_norm(32), nn.SiLU()
        )
        total = sum(row[-1] for row in B0)
        blocks: list[nn.Module] = []
        channels = 32
        for expansion, kernel, stride, out, repeats in B0:
            for j in range(repeats):
                drop = stochastic_depth * len(blocks) / total
                blocks.append(InvertedBottleneck(channels, out, expansion, kernel, stride if j == 0 else 1, drop))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Conv2d(channels, 1280, 1, bias=False), _batch_norm(1280), nn.SiLU())
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(1280, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) to scores (N, classes)."""
        x = self.head(self.blocks(self.stem(x)))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return self.dense(self.dropout(x))


@checked
def efficientnet_b0(
    num_classes: int = 100, dropout: float = 0.2, stochastic_depth: float = 0.2, in_channels: int = 3
) -> nn.Module:
    """EfficientNet-B0, for images of any size (made for 224x224, to which Table 1 enlarges CIFAR-100).

    Two departures from the authors' TensorFlow code, neither of which changes a shape at even image sizes: padding is
    symmetric, and the weights start Kaiming normal (Appendix C).

    Args:
        num_classes: Number of outputs.
        dropout: Before the dense layer; 0.2 as published for B0.
        stochastic_depth: Probability that the last block would be left out in training, growing linearly from 0 at
            the first; 0.2 as in the authors' code.
        in_channels: Channels of the images.

    Example:
        >>> sum(p.numel() for p in efficientnet_b0(1000).parameters())
        5288548
    """
    return kaiming_normal(EfficientNet(num_classes, dropout, stochastic_depth, in_channels))
