"""How long a batch takes to make: this package against the loop people write, and against a training step.

    python benchmarks/batches.py

Data of the size of CIFAR-10 (random bytes), batches of 128, crops with padding 4, flips, normalisation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch
from machine import describe
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from wideflat.data import Augmentation, Batches, ImageData, ImageSplit
from wideflat.models import smallconvnet

BATCH = 128


class PerImage(Dataset):
    """What people write: one image at a time, cropped, flipped and normalised."""

    def __init__(self, data: ImageData) -> None:
        self.images, self.targets = data.train.images.contiguous(), data.train.targets
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in (data.mean, data.std))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = F.pad(self.images[i].float() / 255, (4, 4, 4, 4))
        top, left = torch.randint(9, (2,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image - self.mean) / self.std, self.targets[i]


def seconds(step: Callable[[], object], repeats: int, rounds: int = 5) -> float:
    """The least mean over ``repeats`` calls, of several rounds."""
    step()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def forever(batches: Batches | DataLoader) -> Iterator:
    for epoch in itertools.count():
        yield from batches.epoch(epoch) if isinstance(batches, Batches) else batches


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (50_000, 32, 32, 3), dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)
    part = ImageSplit(pixels, torch.randint(10, (50_000,), generator=generator))
    data = ImageData.of("random", tuple("0123456789"), part, part)

    model = smallconvnet().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = Batches(data, BATCH).batch(0, 0)

    def train() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step = seconds(train, 10)
    loader = forever(DataLoader(PerImage(data), BATCH, shuffle=True))
    plain = seconds(lambda: next(loader), 3)
    print(describe())
    print(f"SmallConvNet step (forward, backward, SGD) {1e3 * step:8.2f} ms")
    print(f"DataLoader, per-image transforms           {1e3 * plain:8.2f} ms a batch, {plain / step:7.2%} of a step")
    for name, augment, repeats in [
        ("normalise only", Augmentation(), 50),
        ("crops and flips", Augmentation(padding=4, flip=True), 50),
        ("+ AutoAugment", Augmentation(padding=4, flip=True, policy="autoaugment"), 10),
        ("+ AutoAugment, Cutout", Augmentation(padding=4, flip=True, policy="autoaugment", cutout=16), 10),
        ("+ Fast AutoAugment", Augmentation(padding=4, flip=True, policy="fast-autoaugment"), 10),
    ]:
        stream = forever(Batches(data, BATCH, augment=augment))
        took = seconds(lambda stream=stream: next(stream), repeats)
        ratio = f", {plain / took:.0f}x the DataLoader" if augment.policy is None else ""
        print(f"wideflat, {name:<32} {1e3 * took:8.2f} ms a batch, {took / step:7.2%} of a step{ratio}")


if __name__ == "__main__":
    main()
