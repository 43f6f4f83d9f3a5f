"""PyramidNet with ShakeDrop.

Han, Kim, Kim, "Deep pyramidal residual networks", CVPR 2017 (arXiv 1610.02915);
Yamada, Iwamura, Akiba, Kise, "ShakeDrop regularization for deep residual learning", IEEE Access 7, 2019
(arXiv 1802.02375).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.models.arguments import checked
from wideflat.models.initialisation import kaiming_normal

__all__ = ["PyramidNet", "ShakeDrop", "pyramidnet272"]


class ShakeDrop(nn.Module):
    r"""Disturb a residual branch: now and then scale it by random numbers, by others backward than forward.

    For the residual :math:`F(x)` of one block, with :math:`b` = 1 with probability 1 - drop and else 0,

    .. math::
        \text{training, forward: } (b + \alpha - b \alpha) F(x), \quad
        \text{backward: } (b + \beta - b \beta)\, \partial F, \quad
        \text{evaluation: } E[b + \alpha - b \alpha]\, F(x)

    with :math:`\alpha` uniform on [-1, 1] and :math:`\beta` uniform on [0, 1], so the expectation is 1 - drop.
    b is one draw a block and mini-batch, alpha and beta one draw an image (the "Image" level of the ShakeDrop paper),
    as in the code of Fast AutoAugment, whose settings our paper follows.

    The numbers come from torch's global generator. There is no autograd function behind it: the forward factor f and
    the backward factor g give ``g x + ((f - g) x).detach()``, so ``torch.func`` and ``torch.compile`` work as usual.

    Args:
        drop: Probability that the block is disturbed, 0 <= drop <= 1.

    Example:
        >>> shake = ShakeDrop(drop=0.25).eval()
        >>> shake(torch.ones(1, 1, 1, 1)).item()
        0.75
    """

    def __init__(self, drop: float) -> None:
        super().__init__()
        if not 0 <= drop <= 1:
            raise ValueError(f"drop must lie in [0, 1], got {drop}")
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same shape."""
        if not self.training:
            return (1 - self.drop) * x
        b = torch.rand(1, 1, 1, 1, device=x.device) >= self.drop
        alpha, beta = torch.rand(2, x.shape[0], 1, 1, 1, device=x.device, dtype=x.dtype).unbind()
        f = torch.where(b, 1.0, 2 * alpha - 1)
        g = torch.where(b, 1.0, beta)
        return g * x + ((f - g) * x).detach()

    def extra_repr(self) -> str:
        """What is shown when the module is printed."""
        return f"drop={self.drop:g}"


class PyramidBottleneck(nn.Module):
    """BN - conv1x1 - BN - ReLU - conv3x3 - BN - ReLU - conv1x1 - BN - ShakeDrop, plus a padded shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, drop: float) -> None:
        super().__init__()
        out = width * self.expansion
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn4 = nn.BatchNorm2d(out)
        self.shake = ShakeDrop(drop)
        self.stride = stride
        self.extra_channels = out - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """The block applied to (N, C, H, W)."""
        out = self.conv1(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(out)))
        out = self.conv3(F.relu(self.bn3(out)))
        out = self.shake(self.bn4(out))
        if self.stride != 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        return out + F.pad(x, (0, 0, 0, 0, 0, self.extra_channels))


class PyramidNet(nn.Module):
    """A network whose width grows by the same amount in every block: 16 + alpha k / n after block k of n.

    Args:
        depth: Number of layers, 9 n + 2 (three stages of n bottleneck blocks).
        alpha: How many channels are added over the whole network.
        num_classes: Number of outputs.
        drop: ShakeDrop probability of the last block; block k of n has ``drop`` k / n. 0 switches it off.
        in_channels: Channels of the images.
    """

    def __init__(self, depth: int, alpha: float, num_classes: int, drop: float = 0.5, in_channels: int = 3) -> None:
        super().__init__()
        if depth < 11 or (depth - 2) % 9:
            raise ValueError(f"depth must be 9 n + 2 with n >= 1, got {depth}")
        per_stage = (depth - 2) // 9
        total = 3 * per_stage
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks: list[nn.Module] = []
        channels, exact = 16, 16.0
        for k in range(total):
            exact += alpha / total  # summed, as the authors do: the rounding of the widths depends on it
            width = round(exact)
            stride = 2 if k in (per_stage, 2 * per_stage) else 1
            blocks.append(PyramidBottleneck(channels, width, stride, drop * (k + 1) / total))
            channels = width * PyramidBottleneck.expansion
        self.blocks = nn.Sequential(*blocks)
        self.bn2 = nn.BatchNorm2d(channels)
        self.dense = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) to scores (N, classes)."""
        x = self.blocks(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(x))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return self.dense(x)


@checked
def pyramidnet272(num_classes: int = 10, alpha: float = 200, drop: float = 0.5, in_channels: int = 3) -> nn.Module:
    """PyramidNet-272, alpha 200, bottleneck blocks, with ShakeDrop (which has no parameters).

    Args:
        num_classes: Number of outputs.
        alpha: How many channels are added over the whole network.
        drop: ShakeDrop probability of the last block (0.5 as published), decaying linearly to the first.
        in_channels: Channels of the images.

    Example:
        >>> sum(p.numel() for p in pyramidnet272().parameters())
        26210842
    """
    return kaiming_normal(PyramidNet(272, alpha, num_classes, drop, in_channels))
