"""The command line in a world where everything is small: commands of the documents run in it as they are printed.

CIFAR has a few images and a preset of Table 1 one epoch. As a script it is `python -m wideflat` in that world, for
ranks that torchrun starts.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from wideflat.cli import main
from wideflat.data import CATALOGUE, ImageData, ImageSplit
from wideflat.data.catalogue import DressCoat
from wideflat.presets import PRESETS

IMAGES, BATCH = 32, 16

NETWORK = """
from torch import nn

def network(num_classes, in_channels=3, image_size=32):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
"""


@dataclasses.dataclass(frozen=True)
class Small(DressCoat):
    """CIFAR with a few images of noise, that need no file."""

    def load(self) -> ImageData:
        number = 100 if self.name == "cifar100" else 10

        def split(seed: int) -> ImageSplit:
            pixels = np.random.default_rng(seed).integers(0, 256, (IMAGES, 3, 32, 32), np.uint8)
            return ImageSplit(torch.from_numpy(pixels), torch.arange(IMAGES) % number)

        return ImageData.of(self.name, tuple(map(str, range(number))), split(0), split(1), "made by a test")


def shrink() -> list[tuple[dict, str, object]]:
    """What to put where: (dictionary, key, value)."""
    rows = {
        name: {key: dataclasses.replace(cell.with_epochs(1), batch_size=BATCH) for key, cell in row.items()}
        for name, row in PRESETS.items()
    }
    data = {name: Small(name, name) for name in ("cifar10", "cifar100")}
    return [(PRESETS, *pair) for pair in rows.items()] + [(CATALOGUE, *pair) for pair in data.items()]


def furnish(folder: Path) -> None:
    """Data and a network of a user's own, as the documents name them."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            place = folder / "photos" / split / name
            place.mkdir(parents=True)
            for number in range(12):
                Image.fromarray(draw.integers(0, 256, (32, 32, 3), np.uint8)).save(place / f"{number}.png")
    x, y = draw.integers(0, 256, (24, 28, 28), np.uint8), np.arange(24) % 3
    np.savez(folder / "digits.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (folder / "my_project").mkdir()
    (folder / "my_project" / "__init__.py").write_text("")
    (folder / "my_project" / "nets.py").write_text(NETWORK)


if __name__ == "__main__":
    for where, key, value in shrink():
        where[key] = value
    sys.exit(main())
