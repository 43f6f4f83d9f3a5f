"""Which optimizer ends where? Test error and flatness of SmallConvNet on CIFAR-10, at equal gradients.

    python benchmarks/leaderboard.py --data DATA --out results/leaderboard            trains what is missing, tables
    python benchmarks/leaderboard.py --out results/leaderboard --tables               the tables alone
    python benchmarks/leaderboard.py --quick --out /tmp/leaderboard                   minutes, on the embedded images

One JSON file a training, written when it ends: started again, the command goes on with what is missing, and several
processes share the work. DESIGN below was decided before the first result was looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from campaign import TUNING_SEED, Campaign, Layout, rate, tables, write_page
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wideflat
from wideflat.data import Batches, ImageData, ImageSplit, load
from wideflat.data.augmentation import Augmentation
from wideflat.models import smallconvnet
from wideflat.seeds import derive_seed

DESIGN = """
1. Every way gets the gradients of PASSES passes over the training images in batches of 128, with crops and flips: SAM,
   which takes two for a step, half as many steps; three replicas a third each. Warm-up over 5 %, then cosine to a
   hundredth of the rate (constant for EMA). float32.
2. Rates are tuned alike: a grid of factors 2, trainings of a quarter of the length on nine tenths of the training
   images with a seed that is used for nothing else; the smallest loss on the last tenth decides, the best of three
   neighbours, the grid extended while the best lies at its end. The test images decide nothing. All else is fixed:
   momentum 0.9 (Nesterov) and weight decay 1e-4 for all that is made of SGD, decoupled 0.05 for AdamW and Muon; rho
   0.05; L = 5, gamma 0.5 growing tenfold, epsilon 1e-4, alpha 0.75, outer rate 0.5 for Entropy-SGD; K = 10 and the
   automatic gamma growing 10,000-fold for replicas (proximal); L = 20 and 0.67 / 0.67 for SNOO and Entropic; EMA 0.999.
3. Three other seeds, trained on all images; differences to SGD are paired by seed, their 95 % intervals are Student's
   with 2 degrees of freedom. Test error in percent, of the solution that the way gives (w, barycenter, mean).
4. Measures on 1,000 training images, the same for all, without augmentation: local energy of the error at sigma 0.25
   relative to each weight (points) and of the loss at sigma 0.02 absolute; worst case of the error on the sphere of
   sigma 0.002 (points); loss after rounding to 4 bits a channel, minus before; minus log Z at sigma 0.3 on 200 of them.
   Smaller is flatter in every column.
5. A network that is trained further is sharper, so every measure is also compared at equal training loss: with the line
   through SGD at half, the same and one and a half times the gradients (same seed).
"""

REPLICAS = 3


@dataclass(frozen=True)
class Extent:
    """How much is trained and measured."""

    passes: float = 60
    batch: int = 128
    images: int | None = None
    measured: int = 1000
    volume: int = 200
    samples: int = 18


FULL = Extent()
QUICK = Extent(passes=8, batch=16, images=500, measured=100, volume=40, samples=8)


# ---- images


@dataclass(frozen=True)
class Images:
    """What is trained on, and what the rates are chosen by."""

    whole: ImageData
    tuning: ImageData

    @classmethod
    @cache
    def load(cls, folder: Path | None, images: int | None) -> Images:
        """CIFAR-10, or the embedded images where a number of them is given."""
        whole = load("cifar10", folder) if images is None else load("dress-coat").limited(images)
        cut = round(0.9 * len(whole.train))
        first, last = (
            ImageSplit(whole.train.images[part], whole.train.targets[part]) for part in (slice(cut), slice(cut, None))
        )
        return cls(whole, dataclasses.replace(whole, train=first, test=last))


def plain(data: ImageData, split: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Normalised images without augmentation, in a fixed random order, and their labels."""
    (pair,) = Batches(data, len(data.split(split)), split=split, shuffle=False).epoch(0)
    order = torch.randperm(len(pair[1]), generator=torch.Generator().manual_seed(17))[:count]
    return pair[0][order], pair[1][order]


@torch.no_grad()
def scores(model: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Mean loss, and error in percent."""
    loss = wrong = 0.0
    for x, y in zip(*(part.split(500) for part in pair), strict=True):
        outputs = model(x)
        loss += float(F.cross_entropy(outputs, y, reduction="sum"))
        wrong += float((outputs.argmax(1) != y).sum())
    return loss / len(pair[1]), 100 * wrong / len(pair[1])


# ---- ways to train


@dataclass(frozen=True)
class Way:
    """A way to train: what makes its optimizer from a network (or replicas) and a rate, and what follows.

    Args:
        make: The optimizer, or several.
        lr: In the middle of the grid of rates.
        drives: The entry of the param groups that the schedule drives.
        gradients: For a step.
        replicas: Networks.
        constant: No cosine.
        ema: Decay of the mean that is evaluated instead of the weights.
        focusing: What gamma grows by.
        of: Whose rate it has, times ``times``; None: its own, tuned.
        length: Of the training, in units of PASSES.
    """

    make: Callable[[nn.Module, float], Any]
    lr: float = 0.02
    drives: str = "lr"
    gradients: int = 1
    replicas: int = 1
    constant: bool = False
    ema: float | None = None
    focusing: float | None = None
    of: str | None = None
    times: float = 1.0
    length: float = 1.0


NESTEROV: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}


def sgd(model: nn.Module, lr: float) -> Optimizer:
    return SGD(model.parameters(), lr=lr, **NESTEROV)


def adamw(model: nn.Module, lr: float) -> Optimizer:
    return AdamW(model.parameters(), lr=lr, weight_decay=0.05)


def muon(model: nn.Module, lr: float) -> list[Optimizer]:
    """Muon for the dense matrices before the last layer, which torch's takes; AdamW for the rest."""
    *hidden, _ = [p for p in model.parameters() if p.dim() == 2]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw", weight_decay=0.05),
        AdamW(rest, lr=lr, weight_decay=0.05),
    ]


def entropic(pull: float) -> Callable[[nn.Module, float], Optimizer]:
    def make(model: nn.Module, lr: float) -> Optimizer:
        return wideflat.Entropic(sgd(model, lr), inner_steps=20, outer_lr=0.67, outer_momentum=0.67, pull=pull)

    return make


def sam(model: nn.Module, lr: float) -> Optimizer:
    return wideflat.SAM(model.parameters(), SGD, rho=0.05, lr=lr, **NESTEROV)


def lookahead(model: nn.Module, lr: float) -> Optimizer:
    return wideflat.Lookahead(model.parameters(), lr=0.5, inner_lr=lr, inner_steps=5, **NESTEROV)


def entropy_sgd(model: nn.Module, lr: float) -> Optimizer:
    return wideflat.EntropySGD(model.parameters(), lr=0.5, inner_lr=lr, inner_steps=5, gamma=0.5, **NESTEROV)


WAYS: dict[str, Way] = {
    "sgd": Way(sgd),
    "sgd, half": Way(sgd, of="sgd", length=0.5),
    "sgd, one and a half": Way(sgd, of="sgd", length=1.5),
    "adamw": Way(adamw, lr=1e-3),
    "muon + adamw": Way(muon, lr=1e-3),
    "sam": Way(sam, gradients=2),
    "sgd constant + ema": Way(sgd, constant=True, ema=0.999),
    "lookahead": Way(lookahead, drives="inner_lr"),
    "snoo": Way(entropic(0.0)),
    "entropic, pull 1": Way(entropic(1.0)),
    "esgd": Way(entropy_sgd, drives="inner_lr", focusing=10.0),
    "rsgd": Way(sgd, replicas=REPLICAS, focusing=1e4),
}

LAYOUT = Layout(
    head="test error (%)",
    score="test error",
    measures=("training loss", "energy, relative", "energy, absolute", "worst case", "4 bits", "-log Z"),
    lengths=("sgd, half", "sgd", "sgd, one and a half"),
    equal="training loss",
    words="SGD",
)


# ---- one training


def batches(data: ImageData, size: int, seed: int, replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pass after pass, each replica in an order of its own; the same for every way with the same seed."""
    augment = Augmentation(padding=4 if data.channels == 3 else 2, flip=True)
    stream = Batches(data, size, augment=augment, seed=seed, replica=replica, drop_last=True)
    epoch = 0
    while True:
        yield from stream.epoch(epoch)
        epoch += 1


def network(data: ImageData) -> nn.Module:
    shape = {"image_size": data.image_size, "in_channels": data.channels}
    return smallconvnet(num_classes=data.num_classes, **shape).to(memory_format=torch.channels_last)


def train(way: Way, lr: float, seed: int, data: ImageData, passes: float, batch: int) -> nn.Module:
    """A network trained one way, at the weights that the way gives as its solution."""
    torch.manual_seed(derive_seed(seed, "start"))
    model = network(data) if way.replicas == 1 else wideflat.Replicas(partial(network, data), way.replicas)
    made = way.make(model, lr)
    optimizers = made if isinstance(made, list) else [made]
    coupling = None
    if isinstance(model, wideflat.Replicas):
        coupling = wideflat.ReplicaCoupling(model, gamma=0.0, mode="proximal", optimizer=made)
    members = list(model) if isinstance(model, wideflat.Replicas) else [model]
    streams = [batches(data, batch, seed, number) for number in range(len(members))]
    steps = round(passes * way.length * len(data.train) / batch / way.gradients / way.replicas)
    if coupling is not None:
        held = plain(data, "train", 500)
        coupling.gamma = coupling.initial_gamma([scores(member, held)[0] for member in members])
    focused = made if coupling is None else coupling
    focusing = wideflat.Focusing(focused, factor=way.focusing, total=steps) if way.focusing else None
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(way.ema)) if way.ema else None

    def loss() -> Tensor:
        model.zero_grad(set_to_none=True)
        pairs = zip(members, current, strict=True)
        total = torch.stack([F.cross_entropy(member(x), y) for member, (x, y) in pairs]).sum()
        total.backward()
        return total

    for step in range(steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group[way.drives] = lr * rate(step, steps, way.constant, 0.01)
        current = [next(stream) for stream in streams]
        value = loss()
        if way.gradients == 2:
            made.perturb()
            loss()
            made.restore()
        if coupling is not None:
            coupling.couple()
        for optimizer in optimizers:
            optimizer.step()
        if focusing is not None:
            focusing.step()
        if mean is not None:
            mean.update_parameters(model)
        if step % 100 == 0 and not torch.isfinite(value):
            break  # the scores say that it diverged
    for optimizer in optimizers:
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    if isinstance(model, wideflat.Replicas):
        return model.barycenter()
    return model if mean is None else mean.module


def measure(model: nn.Module, data: ImageData, extent: Extent) -> dict[str, float]:
    """The columns of the table, with the errors that they have."""
    pair = plain(data, "train", extent.measured)
    silent: dict[str, Any] = {"progress": False}
    relative = wideflat.local_energy(model, pair, [0.25], max_passes=20, **silent)
    absolute = wideflat.local_energy(model, pair, [0.02], metric="loss", scale="absolute", max_passes=20, **silent)
    worst = wideflat.worst_case(model, pair, [0.002], steps=10, **silent)
    rounded = wideflat.shift_profile(model, pair, quantize=[4], per="channel", metric="loss", noise=False, **silent)
    few = tuple(part[: extent.volume] for part in pair)
    volume = wideflat.free_entropy(model, few, 0.3, samples=extent.samples, **silent)
    return {
        "energy, relative": 100 * float(relative.mean[-1]),
        "energy, relative, stderr": 100 * float(relative.stderr[-1]),
        "energy, absolute": float(absolute.mean[-1]),
        "energy, absolute, stderr": float(absolute.stderr[-1]),
        "worst case": 100 * float(worst.mean[-1]),
        "4 bits": float(rounded.mean[-1]),
        "-log Z": -float(volume.log_z[0]),
        "-log Z, stderr": float(volume.stderr[0]),
        "converged": float(volume.converged[0]),
    }


def one(name: str, lr: float, seed: int, extent: Extent, folder: Path | None) -> dict[str, Any]:
    """What a training gives; with the seed for tuning its loss on images that it was not trained on."""
    way, images = WAYS[name], Images.load(folder, extent.images)
    if seed == TUNING_SEED:
        model = train(way, lr, seed, images.tuning, extent.passes / 4, extent.batch).eval()
        loss, error = scores(model, plain(images.tuning, "test"))
        return {"held-out loss": loss, "held-out error": error}
    model = train(way, lr, seed, images.whole, extent.passes, extent.batch).eval()
    loss, error = scores(model, plain(images.whole, "train", 10_000))
    row = {"training loss": loss, "training error": error}
    row["test loss"], row["test error"] = scores(model, plain(images.whole, "test"))
    if not math.isfinite(loss):  # it diverged: that is its result
        return {**row, **dict.fromkeys(LAYOUT.measures[1:], math.nan)}
    return {**row, **measure(model, images.whole, extent)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/leaderboard"), help="folder of the results")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10; the usual places when left out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a few passes on 500 embedded images: to see that it runs")
    parser.add_argument("--tables", action="store_true", help="do not train")
    options = parser.parse_args()
    torch.set_num_threads(1)
    extent = QUICK if options.quick else FULL
    one_way = partial(one, extent=extent, folder=options.data)
    campaign = Campaign(options.out, WAYS, one_way, "held-out loss", options.seeds)
    if not options.tables:
        campaign.run()
    heading = f"{extent.passes} passes, {options.seeds} seeds." + (" QUICK: embedded images." if options.quick else "")
    text = f"{heading}\n\n{tables(campaign.rows(), LAYOUT)}"
    write_page(options.out, "Which optimizer ends where", DESIGN, text)
    print(text)


if __name__ == "__main__":
    main()
