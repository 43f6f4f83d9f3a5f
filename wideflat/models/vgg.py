"""The VGG-like network of the correlation figure (Appendix B.3): PGDL competition, Task 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wideflat.models.arguments import checked
from wideflat.models.initialisation import kaiming_normal

__all__ = ["VGG", "vgg3x512"]


class VGG(nn.Module):
    """Blocks of (conv3x3 - ReLU - conv3x3 - ReLU - MaxPool(2)), then dense layers of ReLU units with dropout.

    Args:
        widths: Channels of each block.
        dense: Units of each hidden dense layer.
        num_classes: Number of outputs.
        image_size: Height and width of the images; the first dense layer depends on it.
        dropout: Probability after each hidden dense layer.
        in_channels: Channels of the images.
    """

    def __init__(
        self,
        widths: Sequence[int],
        dense: Sequence[int],
        num_classes: int,
        image_size: int = 32,
        dropout: float = 0.0,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        side = image_size >> len(widths)
        if side < 1:
            raise ValueError(
                f"image_size must be at least {2 ** len(widths)} for {len(widths)} blocks, got {image_size}"
            )
        layers: list[nn.Module] = []
        channels = in_channels
        for width in widths:
            for _ in range(2):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        units = channels * side * side
        head: list[nn.Module] = []
        for width in dense:
            head += [nn.Linear(units, width), nn.ReLU(), nn.Dropout(dropout)]
            units = width
        self.head = nn.Sequential(*head, nn.Linear(units, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, S, S) to scores (N, classes)."""
        return self.head(torch.flatten(self.features(x), 1))


@checked
def vgg3x512(
    num_classes: int = 10,
    image_size: int = 32,
    dropout: float = 0.0,
    widths: Sequence[int] = (512, 512, 512),
    in_channels: int = 3,
) -> nn.Module:
    """The VGG-like network with 3 convolutional blocks of width 512 and one dense layer of 128.

    What is public (the competition's description of Task 1, and our paper's sentence on it): blocks of
    conv-ReLU-conv-ReLU-maxpool, one or two dense layers of 128 units, dropout after each dense layer, 256 or 512
    filters *in the last convolutional layer*; batch norm is named for other tasks only, so there is none. What is not:
    kernel size and padding (3x3 with padding here, as in VGG), and whether the first two blocks have 512 filters too
    (here they have, as the paper says "blocks of width 512"; ``widths=(128, 256, 512)`` is the other reading).

    Args:
        num_classes: Number of outputs.
        image_size: Height and width of the images.
        dropout: Probability after the dense layer; the competition has 0 and 0.5.
        widths: Channels of each block.
        in_channels: Channels of the images.

    Example:
        >>> model = vgg3x512()
        >>> model.features[0].weight.shape, model.head[0].weight.shape
        (torch.Size([512, 3, 3, 3]), torch.Size([128, 8192]))
    """
    return kaiming_normal(VGG(widths, (128,), num_classes, image_size, dropout, in_channels))
