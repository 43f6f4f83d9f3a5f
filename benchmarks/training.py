"""Images per second of the training loop, against the plain loop and against the bare forward and backward pass.

    python benchmarks/training.py [--rounds 25] [--models smallconvnet resnet18] [--clock wall|cpu]
    python benchmarks/training.py --campaign [--rounds 25]

The models see generated images of CIFAR-10's size in batches of 128, with random crops and flips.

- bare: forward and backward on one fixed batch, channels last, nothing else. The limit for any loop.
- plain: the loop people write. A Dataset with per-image transforms (to float, pad, crop, flip, normalise), a DataLoader
  (without workers and with two: the faster one counts), NCHW, torch.optim.SGD, loss.item().
- sgd, esgd, rsgd, sam: ``Training``, the loop of ``wideflat train``, with the settings of the presets.

Every loop is timed for a quarter of a second in every round, one loop after the other. Speeds and ratios are those of
the best rounds: what else runs on the machine can only slow a loop down. The median beside it tells how much that was.
SAM's images count once, though it computes two gradients for each.

``--clock cpu`` counts the processor time of one thread instead, and leaves out the loader with workers: for a machine
on which others compute too.

``--campaign`` asks what one core does in a day of ``wideflat train --algorithm sgd``: in float32 and bf16, compiled and
not, with torch's convolutions of small images and ours, evaluated on 10,000 images after every pass or every tenth. In
processor time of one thread, the peaks too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from machine import describe, peak_flops
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from wideflat.data import ImageData, ImageSplit
from wideflat.presets import preset
from wideflat.training.options import Options
from wideflat.training.training import Training

BATCH = 128
#: passes over 50,000 images, evaluated on 10,000
TRAIN_IMAGES, TEST_IMAGES = 50_000, 10_000
FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16}
#: (numerator, denominator, what it must reach), for SmallConvNet
TARGETS = [
    ("sgd", "plain", 1.6),
    ("esgd", "plain", 1.6),
    ("sgd", "bare", 0.85),
    ("esgd", "bare", 0.85),
    ("rsgd", "sgd", 0.95),
]


def generated(train: int = 12_800, test: int = 1000) -> ImageData:
    """Images of noise, of the size of CIFAR-10's."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> ImageSplit:
        pixels = torch.randint(256, (count, 32, 32, 3), dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)
        return ImageSplit(pixels, torch.randint(10, (count,), generator=generator))

    return ImageData.of("generated", tuple("0123456789"), part(train), part(test))


class PlainDataset(Dataset):
    """Images one at a time, with the usual transforms written in torch."""

    def __init__(self, data: ImageData) -> None:
        self.images, self.targets = data.train.images.contiguous(), data.train.targets
        self.mean, self.std = torch.tensor(data.mean).view(3, 1, 1), torch.tensor(data.std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index].float() / 255
        padded = F.pad(image, (4, 4, 4, 4))
        top, left = torch.randint(9, (2,)).tolist()
        image = padded[:, top : top + 32, left : left + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image - self.mean) / self.std, self.targets[index]


def plain_loop(name: str, data: ImageData, workers: int) -> Callable[[], None]:
    """One iteration of the loop people write."""
    model = preset(f"cifar10-{name}").build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    loader = DataLoader(
        PlainDataset(data), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0, drop_last=True
    )
    total = 0.0

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from loader

    stream = batches()

    def iterate() -> None:
        nonlocal total
        x, y = next(stream)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()

    return iterate


def bare_loop(name: str) -> Callable[[], None]:
    """Forward and backward on a fixed batch."""
    model: nn.Module = preset(f"cifar10-{name}").build_model().to(memory_format=torch.channels_last)
    x = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (BATCH,))

    def iterate() -> None:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()

    return iterate


def our_loop(name: str, algorithm: str, data: ImageData) -> Callable[[], object]:
    """One iteration of ``wideflat train``."""
    return Training(preset(f"cifar10-{name}", algorithm), data).iterate


def flops_per_image(name: str) -> float:
    """Floating-point operations of forward and backward for one image."""
    model: nn.Module = preset(f"cifar10-{name}").build_model()
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.zeros(8, dtype=torch.int64)).backward()
    return counter.get_total_flops() / 8


def seconds_of(iterate: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(count):
        iterate()
    return (clock() - start) / count


def measure(name: str, data: ImageData, rounds: int, seconds: float, peak: float, clock: Callable[[], float]) -> bool:
    """Print the table of one model; False if a target is missed."""
    loops: dict[str, tuple[Callable[[], object], int]] = {
        "bare": (bare_loop(name), BATCH),
        "plain, no workers": (plain_loop(name, data, 0), BATCH),
        "plain, 2 workers": (plain_loop(name, data, 2), BATCH),
        "sgd": (our_loop(name, "sgd", data), BATCH),
        "esgd": (our_loop(name, "esgd", data), BATCH),
        "rsgd": (our_loop(name, "rsgd", data), 3 * BATCH),
        "sam": (our_loop(name, "sam", data), BATCH),
    }
    plains = ["plain, no workers", "plain, 2 workers"]
    if clock is time.process_time:  # which does not see what workers do
        del loops[plains.pop()]
    for loop, _ in loops.values():
        loop()
    counts = {key: max(1, round(seconds / seconds_of(loop, 1, clock))) for key, (loop, _) in loops.items()}
    speeds: dict[str, list[float]] = {key: [] for key in loops}
    for _, (key, (loop, images)) in itertools.product(range(rounds), loops.items()):
        speeds[key].append(images / seconds_of(loop, counts[key], clock))
    best = {key: max(values) for key, values in speeds.items()}
    plain = max(plains, key=best.__getitem__)
    best["plain"] = best[plain]
    flops = flops_per_image(name)
    print(f"\n{name}: {flops / 1e6:.1f} Mflop an image, forward and backward; {rounds} rounds; plain is `{plain}`")
    print(f"{'loop':<20}{'images/s':>10}{'median':>9}{'of bare':>9}{'x plain':>9}{'of peak':>9}")
    for key in loops:
        passes = 2 if key == "sam" else 1
        print(
            f"{key:<20}{best[key]:>10.0f}{statistics.median(speeds[key]):>9.0f}{best[key] / best['bare']:>9.2f}"
            f"{best[key] / best['plain']:>9.2f}{passes * best[key] * flops / peak:>9.0%}"
        )
    reached = True
    for a, b, target in TARGETS if name == "smallconvnet" else []:
        value = best[a] / best[b]
        reached &= value >= target
        print(f"{a} / {b}: {value:.2f}, to reach {target}: {'reached' if value >= target else 'NOT reached'}")
    return reached


def campaign(name: str, data: ImageData, rounds: int, seconds: float) -> None:
    """Print what one core does in a day, by format and compiler."""
    of = {
        "float32, torch's": Options(),
        "float32": Options(),
        "float32, compiled": Options(compile=True),
        "bf16, torch's": Options(amp="bf16"),
        "bf16": Options(amp="bf16"),
        "bf16, compiled": Options(amp="bf16", compile=True),
    }
    trainings = {key: Training(preset(f"cifar10-{name}", "sgd"), data, options) for key, options in of.items()}
    for key in of:
        if key.endswith("torch's"):
            trainings[key].small_images = contextlib.nullcontext()
    clock = time.process_time
    counts = {}
    for key, training in trainings.items():
        training.iterate(), training.evaluate()  # the first compile
        counts[key] = max(1, round(seconds / seconds_of(training.iterate, 1, clock)))
    steps, evaluations = ({key: [] for key in trainings} for _ in range(2))
    for _, (key, training) in itertools.product(range(rounds), trainings.items()):
        steps[key].append(seconds_of(training.iterate, counts[key], clock) / BATCH)
        evaluations[key].append(seconds_of(training.evaluate, 1, clock) / len(data.test.targets))
    flops = flops_per_image(name)
    peaks = {format: peak_flops(dtype, 1024, 15, clock) for format, dtype in FORMATS.items()}
    peaks_text = ", ".join(f"{format} {peak / 1e9:.0f}" for format, peak in peaks.items())
    print(f"\n{name}, one thread, {rounds} rounds; peak in Gflop/s of a matrix product: {peaks_text}")
    print(f"{'':<20}{'images/s':>10}{'median':>9}{'of peak':>9}{'passes a day':>14}{'every 10th':>12}{'ratio':>7}")
    before = None
    for key in trainings:
        image, evaluation = min(steps[key]), min(evaluations[key])
        days = [86_400 / (TRAIN_IMAGES * image + TEST_IMAGES * evaluation / every) for every in (1, 10)]
        before = before or days[0]
        print(
            f"{key:<20}{1 / image:>10.0f}{1 / statistics.median(steps[key]):>9.0f}"
            f"{flops / image / peaks[key.split(',')[0]]:>9.0%}{days[0]:>14.0f}{days[1]:>12.0f}{days[1] / before:>7.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--models", nargs="+", default=["smallconvnet", "resnet18"])
    parser.add_argument("--seconds", type=float, default=0.25, help="of one loop in one round, about")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--campaign", action="store_true", help="what one core does in a day")
    options = parser.parse_args()
    clock = time.perf_counter
    if options.clock == "cpu" or options.campaign:
        clock = time.process_time
        torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*lr K gamma.*")
    print(describe())
    if options.campaign:
        for name in options.models:
            few = 5 if name == "smallconvnet" else 1
            campaign(name, generated(1280 * few, 200 * few), options.rounds, options.seconds)
        return 0
    peak = math.nan if options.clock == "cpu" else peak_flops(repeats=30)  # the peak is of the clock on the wall
    print(f"measured peak {peak / 1e9:.0f} Gflop/s (float32 matrix product)")
    results = []
    for name in options.models:
        fast = name == "smallconvnet"  # others take seconds an iteration, and minutes for the first gamma on all images
        data, rounds = (generated(), options.rounds) if fast else (generated(1280, 128), min(options.rounds, 3))
        results.append(measure(name, data, rounds, options.seconds, peak, clock))
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
