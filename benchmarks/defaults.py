"""What was tried to choose the defaults of EntropySGD: training and test errors of ordinary networks.

    python benchmarks/defaults.py [--seeds 3] [--data FOLDER] [--tasks xor transformer smallconvnet] [--csv FILE]

The question: does ``EntropySGD(params)`` train a network as SGD does, in the same number of mini-batches? Stated before
the result: a default is good if on all three tasks its training error is within two points of SGD's.

- xor: 256 points of two signs, 20 inputs of which two matter, a perceptron of 2 x 64 units with batch norm, 400 steps.
- transformer: two layers of width 32 that read the 28 rows of an image of Dress-vs-Coat (embedded) as words, 600
  images of two classes, 20 passes in batches of 30 (400 steps).
- smallconvnet: SmallConvNet on 1,000 images of CIFAR-10 (if they are there), 20 passes in batches of 50 (400 steps).

Every optimizer gets the same mini-batches, no weight decay, no schedule. Entropy-SGD is evaluated at its center, batch
norm is refreshed for all. Rows are means over the seeds, which draw weights, data and batches.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from machine import describe
from torch import Tensor, nn
from torch.nn import functional as F

import wideflat
from wideflat.data import DataError
from wideflat.models import smallconvnet

SGD = {"momentum": 0.9, "nesterov": True}
PLAIN = {"momentum": 0.0, "nesterov": False}
ROWS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD, lr 0.05, Nesterov 0.9": lambda params: torch.optim.SGD(params, lr=0.05, **SGD),
    "SGD, lr 0.02, Nesterov 0.9": lambda params: torch.optim.SGD(params, lr=0.02, **SGD),
    "EntropySGD, momentum 0 (default until 0.1)": lambda params: wideflat.EntropySGD(params, **PLAIN),
    "EntropySGD, momentum 0.9": lambda params: wideflat.EntropySGD(params, momentum=0.9, nesterov=False),
    "EntropySGD, Nesterov 0.9": lambda params: wideflat.EntropySGD(params, **SGD),
    "EntropySGD, Nesterov 0.9, lr 0.25": lambda params: wideflat.EntropySGD(params, lr=0.25, **SGD),
    "EntropySGD, Nesterov 0.9, lr 1": lambda params: wideflat.EntropySGD(params, lr=1.0, **SGD),
    "EntropySGD, Nesterov 0.9, inner_lr 0.05": lambda params: wideflat.EntropySGD(params, inner_lr=0.05, **SGD),
    "EntropySGD, Nesterov 0.9, inner_steps 20": lambda params: wideflat.EntropySGD(params, inner_steps=20, **SGD),
    "EntropySGD, Nesterov 0.9, lr 0.05 (SGD's)": lambda params: wideflat.EntropySGD(params, lr=0.05, **SGD),
}

Task = tuple[nn.Module, Tensor, Tensor, Tensor, Tensor, int]


class RowReader(nn.Module):
    """A small transformer that reads the rows of an image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(28, width)
        self.place = nn.Parameter(0.02 * torch.randn(28, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.read = nn.Linear(width, 2)

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, 28, 28) to scores (N, 2)."""
        return self.read(self.layers(self.embed(images) + self.place).mean(1))


def xor(generator: torch.Generator, _: str | None) -> Task:
    x = torch.randn(1256, 20, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    net = nn.Sequential(
        *(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)),
    )
    return net, x[:256], y[:256], x[256:], y[256:], 32


def transformer(generator: torch.Generator, _: str | None) -> Task:
    data = wideflat.data.load("dress-coat")
    dress, coat = ((data.train.targets == k).nonzero().flatten() for k in (0, 1))
    chosen = [k[torch.randperm(len(k), generator=generator)[:300]] for k in (dress, coat)]
    chosen = torch.cat(chosen)
    scale = lambda images: images.squeeze(1).float() / 127.5 - 1  # noqa: E731
    test = data.test
    return (
        RowReader(),
        scale(data.train.images[chosen]),
        data.train.targets[chosen],
        scale(test.images),
        test.targets,
        30,
    )


def convolutions(generator: torch.Generator, folder: str | None) -> Task:
    data = wideflat.data.load("cifar10", folder)
    chosen = torch.randperm(len(data.train), generator=generator)[:1000]
    scale = lambda images: images.float() / 64 - 2  # noqa: E731
    test = data.test
    x, y = scale(data.train.images[chosen]), data.train.targets[chosen]
    return smallconvnet(), x, y, scale(test.images[:2000]), test.targets[:2000], 50


TASKS = {"xor": xor, "transformer": transformer, "smallconvnet": convolutions}


def train(task: str, row: str, seed: int, folder: str | None, steps: int) -> tuple[float, float]:
    """Training and test error in percent, after some mini-batches."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    net, x, y, test_x, test_y, size = TASKS[task](generator, folder)
    opt = ROWS[row](net.parameters())
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(x), generator=generator)
        batch, order = order[:size], order[size:]
        opt.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        opt.step()
    if hasattr(opt, "flush"):
        opt.flush()
    wideflat.refresh_batch_norm(net, x.split(size))
    net.eval()
    with torch.no_grad():
        wrong = [100 * (net(a).argmax(1) != b).float().mean().item() for a, b in ((x, y), (test_x, test_y))]
    return wrong[0], wrong[1]


def shown(values: list[float]) -> str:
    """Mean ± standard deviation."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--data", default=None, help="where CIFAR-10 is; looked for in the usual places when left out")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--csv", type=Path, default=None, help="every training in a file")
    options = parser.parse_args()
    print(describe())
    warnings.filterwarnings("ignore", message="lr = ")  # one of the rows is the mistake that the warning is about
    records = []
    for task in options.tasks:
        try:
            TASKS[task](torch.Generator().manual_seed(0), options.data)
        except DataError as error:
            print(f"\n{task} is left out: {error}")
            continue
        print(f"\n| {task}, {options.steps} steps | training error % | test error % |\n|---|---|---|")
        for row in ROWS:
            errors = [train(task, row, seed, options.data, options.steps) for seed in range(options.seeds)]
            records += [[task, row, seed, *each] for seed, each in enumerate(errors)]
            print(f"| {row} | {shown([e[0] for e in errors])} | {shown([e[1] for e in errors])} |", flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([["task", "optimizer", "seed", "train_error", "test_error"], *records])


if __name__ == "__main__":
    main()
