"""SmallConvNet, the LeNet-like network of Appendix C."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.models.arguments import checked

__all__ = ["SmallConvNet", "smallconvnet"]


class SmallConvNet(nn.Module):
    """Conv(5x5, 20) - MaxPool(2) - Conv(5x5, 50) - MaxPool(2) - Dense(500) - Dense(classes), with ReLU between.

    The convolutions have no padding (32 -> 28 -> 14 -> 10 -> 5), so the first dense layer has 1,250 inputs at 32x32.
    ReLU comes after the pooling here: the two commute, the result is the same and the work a quarter. Dropout, if
    any, is of the 500 units.
    """

    def __init__(self, num_classes: int = 10, image_size: int = 32, in_channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        side = ((image_size - 4) // 2 - 4) // 2
        if side < 1:
            raise ValueError(f"image_size must be at least 16 for SmallConvNet, got {image_size}")
        self.conv1 = nn.Conv2d(in_channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.dense1 = nn.Linear(50 * side * side, 500)
        self.dense2 = nn.Linear(500, num_classes)
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, S, S) to scores (N, classes)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.dense1(torch.flatten(x, 1)))
        if self.dropout is not None:
            x = self.dropout(x)
        return self.dense2(x)


@checked
def smallconvnet(
    num_classes: int = 10, image_size: int = 32, in_channels: int = 3, dropout: float = 0.0
) -> SmallConvNet:
    """SmallConvNet with PyTorch's default initialisation, as Appendix C says.

    Args:
        num_classes: Number of outputs.
        image_size: Height and width of the images; at least 16.
        in_channels: 3 for colour images, 1 for grey.
        dropout: Probability of the units of the dense layer; 0 in the paper's text.

    Example:
        >>> sum(p.numel() for p in smallconvnet().parameters())
        657080
    """
    return SmallConvNet(num_classes, image_size, in_channels, dropout)
