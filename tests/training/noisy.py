"""Images of noise and a network with everything that has a state, for scripts that train in processes of their own.

It is run in earlier versions too: see earlier_runs.
"""

import torch
from torch import nn

from wideflat.data import ImageData, ImageSplit


def network(num_classes: int, channels: int, side: int) -> nn.Module:
    """Convolution, batch norm, dropout: everything that has a state or a random number."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, stride=2),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(channels * side**2, num_classes),
    )


def images(size: int) -> ImageData:
    """80 to train on and 50 to test on, brighter for later classes."""
    generator = torch.Generator().manual_seed(0)

    def part(n: int) -> ImageSplit:
        targets = torch.randint(10, (n,), generator=generator)
        noise = torch.randint(100, (n, 3, size, size), generator=generator)
        return ImageSplit((noise + 15 * targets.view(n, 1, 1, 1)).to(torch.uint8), targets)

    return ImageData.of("generated", tuple("0123456789"), part(80), part(50))
