"""Slices, spectra and layer profiles against the loops one would write, as ratios in one run.

    python benchmarks/measures.py            a few minutes on two idle cores
    python benchmarks/measures.py --quick    the same with fewer points and examples
    python benchmarks/measures.py --cpu      CPU time of one thread, which other work on the machine changes little

    slice      21 x 21 points around SmallConvNet against: write the weights, evaluate all data, for each point; the
               same with channels last in memory; and the products alone that every point needs for itself
    spectrum   against the algorithm of PyHessian: one probe at a time, for each Lanczos step a forward and a double
               backward pass over all data, reorthogonalised vector by vector in Python
    layers     the profile of each layer of a transformer of 6 layers, data from a loader, against one call of
               local_energy for each layer; and the cost over that of one profile per layer with data in memory
    cost       against the number of points, sigmas and layers

Both of a pair are run alternately, and the best time of each counts.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Callable

import numpy as np
import torch
from machine import describe
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import wideflat
from wideflat.models import smallconvnet

clock: Callable[[], float] = time.perf_counter


def alternately(repeats: int, **works: Callable[[], object]) -> dict[str, float]:
    """The best of some times of each work, in seconds."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(repeats):
        for name, work in works.items():
            start = clock()
            work()
            best[name] = min(best[name], clock() - start)
    return best


def images(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 32, 32, generator=g), torch.randint(10, (count,), generator=g)


# ---- the slice


def naive_slice(
    model: nn.Module, data: tuple[Tensor, Tensor], axis: np.ndarray, batch_size: int = 128, channels_last: bool = False
) -> np.ndarray:
    """E(w + x d_1 + y d_2) on a grid, as one would write it; or, who knows it, with channels last in memory."""
    inputs, targets = data
    if channels_last:
        model = copy.deepcopy(model).to(memory_format=torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    ways = [{n: torch.randn_like(w) * w.abs().mean() for n, w in weights.items()} for _ in range(2)]
    found = np.zeros((len(axis), len(axis)))
    with torch.no_grad():
        for i, x in enumerate(axis):
            for j, y in enumerate(axis):
                for n, p in model.named_parameters():
                    p.copy_(weights[n] + x * ways[0][n] + y * ways[1][n])
                total = 0.0
                for some, those in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
                    total += float(nn.functional.cross_entropy(model(some), those, reduction="sum"))
                found[i, j] = total / len(inputs)
        for n, p in model.named_parameters():
            p.copy_(weights[n])
    return found


def least_work(model: nn.Module, data: tuple[Tensor, Tensor], axis: np.ndarray, batch_size: int = 128) -> None:
    """What no way around is known for: the products behind the first nonlinearity, once a point, and nothing else."""
    layers = [model.conv2, model.dense1, model.dense2]
    shapes = [(20, 14, 14), (1250,), (500,)]
    batches = [len(part) for part in data[0].split(batch_size)]
    inputs = {n: [torch.randn(n, *shape) for shape in shapes] for n in set(batches)}
    for each in inputs.values():
        each[0] = each[0].contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(len(axis) ** 2):
            for n in batches:
                for layer, some in zip(layers, inputs[n], strict=True):
                    layer(some)


def slice_table(quick: bool) -> None:
    """Each way with the number of threads and the batch size that suit it best, found on a grid of 3 x 3."""
    torch.manual_seed(0)
    model, data = smallconvnet(), images(128 if quick else 512)
    axis, few = np.linspace(-1, 1, 7 if quick else 21), np.linspace(-1, 1, 3)
    ways: dict[str, Callable[..., object]] = {
        "naive": lambda axis, size: naive_slice(model, data, axis, size),
        "naive, channels last": lambda axis, size: naive_slice(model, data, axis, size, True),
        "products alone": lambda axis, size: least_work(model, data, axis, size),
        "wideflat": lambda axis, _: wideflat.slices(model, data, "filter", positions=axis, progress=False),
    }
    most, chosen = torch.get_num_threads(), {}
    for name, way in ways.items():
        tried = {}
        for threads in sorted({1, most}):
            torch.set_num_threads(threads)
            for size in (32, 128, 512) if name != "wideflat" else (0,):
                way(few, size)
                tried[threads, size] = alternately(2, it=functools.partial(way, few, size))["it"]
        chosen[name] = min(tried, key=lambda pair: tried[pair])

    def run(name: str) -> None:
        torch.set_num_threads(chosen[name][0])
        ways[name](axis, chosen[name][1])

    best = alternately(1 if quick else 2, **{name: functools.partial(run, name) for name in ways})
    torch.set_num_threads(most)
    print(f"slice     {len(axis)} x {len(axis)} points, SmallConvNet, n = {len(data[0])}")
    for name, seconds in best.items():
        threads, size = chosen[name]
        how = f"threads: {threads}" + (f", batches of {size}" if size else "")
        each = 1e3 * seconds / len(axis) ** 2
        print(f"          {name:22} {each:6.1f} ms a point, {seconds / best['wideflat']:.2f} of wideflat's ({how})")


# ---- the spectrum


def naive_spectrum(
    model: nn.Module, data: tuple[Tensor, Tensor], probes: int, steps: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Nodes and weights of stochastic Lanczos quadrature, one probe at a time (the algorithm of PyHessian)."""
    parameters = list(model.parameters())

    def product(v: list[Tensor]) -> list[Tensor]:
        total = [torch.zeros_like(p) for p in parameters]
        for inputs, targets in zip(*(part.split(128) for part in data), strict=True):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            second = torch.autograd.grad(gradients, parameters, grad_outputs=v)
            total = [t + len(inputs) / len(data[0]) * s for t, s in zip(total, second, strict=True)]
        return total

    def inner(a: list[Tensor], b: list[Tensor]) -> float:
        return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))

    found = []
    for _ in range(probes):
        v = [torch.randint_like(p, 2) * 2 - 1 for p in parameters]
        v = [x.detach() / inner(v, v) ** 0.5 for x in v]
        basis, alpha, beta = [v], [], []
        for step in range(steps):
            w = product(basis[-1])
            alpha.append(inner(w, basis[-1]))
            for u in basis:
                overlap = inner(w, u)
                w = [x - overlap * y for x, y in zip(w, u, strict=True)]
            if step + 1 < steps:
                beta.append(inner(w, w) ** 0.5)
                basis.append([x / beta[-1] for x in w])
        theta, vectors = np.linalg.eigh(np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1))
        found.append((theta, vectors[0] ** 2))
    return found


def spectrum_table(quick: bool) -> None:
    torch.manual_seed(0)
    model, data = smallconvnet(), images(64 if quick else 256)
    probes, steps = (2, 6) if quick else (4, 20)
    kept: dict[str, float] = {}

    def theirs() -> None:
        rules = naive_spectrum(model, data, probes, steps)
        kept["theirs"] = float(np.mean([theta.max() for theta, _ in rules]))

    def ours() -> None:
        found = wideflat.spectrum(model, data, probes=probes, steps=steps, scale="absolute", progress=False)
        kept["ours"] = float(found.eigenvalues[0])

    best = alternately(2, naive=theirs, wideflat=ours)
    print(
        f"spectrum  {probes} probes of {steps} steps, SmallConvNet, n = {len(data[0])}: "
        f"{best['naive'] / best['wideflat']:.2f}x PyHessian's algorithm (largest eigenvalue {kept['ours']:.4g}, there "
        f"{kept['theirs']:.4g})"
    )


# ---- layers


class Sentences(Dataset):
    """Random sentences that are made when they are asked for."""

    def __init__(self, count: int, length: int = 16) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(i)
        words = torch.randint(100, (self.length,), generator=g)
        return words, words.sum() % 5


class Transformer(nn.Module):
    """Six layers over the words of a sentence, whose mean is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.last = nn.Linear(64, 5)

    def forward(self, words: Tensor) -> Tensor:
        """Sentences (N, T) to scores (N, 5)."""
        return self.last(self.layers(self.embedding(words)).mean(1))


def layers_table(quick: bool) -> None:
    torch.manual_seed(0)
    model, sentences = Transformer().eval(), Sentences(64 if quick else 512)
    loader = DataLoader(sentences, batch_size=32)
    memory = [(words, targets) for words, targets in loader]
    names = [f"layers.layers.{k}" for k in range(6)]
    sigmas = [0.1, 0.2] if quick else [0.1, 0.2, 0.3, 0.4]
    options = {"metric": "loss", "progress": False}
    patterns = [name.replace(".", "[.]") + "[.].*" for name in names]
    best = alternately(
        2,
        loop=lambda: [wideflat.local_energy(model, loader, sigmas, parameters=p, **options) for p in patterns],
        layers=lambda: wideflat.layer_profiles(model, loader, sigmas, names, **options),
        single=lambda: wideflat.local_energy(model, memory, sigmas, parameters=patterns[2], **options),
    )
    print(
        f"layers    6 of a transformer, n = {len(sentences)}, {len(sigmas)} sigmas: "
        f"{best['loop'] / best['layers']:.2f}x a loop over layers; {best['layers'] / (6 * best['single']):.2f} of the "
        "cost of one profile per layer with data in memory (goal: at most 1.5)"
    )


# ---- cost against sizes


def cost_table(quick: bool) -> None:
    torch.manual_seed(0)
    model, data = smallconvnet(), images(64 if quick else 256)
    counts = (2, 4, 8) if quick else (2, 4, 8, 16)
    points = {
        f"p{n}": (
            lambda n=n: wideflat.slices(model, data, positions=np.linspace(0, 1, n), dimensions=1, progress=False)
        )
        for n in counts
    }
    sigmas = {
        f"s{n}": (lambda n=n: wideflat.local_energy(model, data, np.linspace(0.1, 0.5, n), progress=False))
        for n in counts
    }
    names = ["conv1", "conv2", "dense1", "dense2"]
    layers = {
        f"l{n}": (lambda n=n: wideflat.layer_profiles(model, data, [0.2], names[:n], progress=False)) for n in (1, 2, 4)
    }
    best = alternately(2, **points, **sigmas, **layers)
    for words, works in (("points", points), ("sigmas", sigmas), ("layers", layers)):
        first = next(iter(works))
        shown = ", ".join(f"{name[1:]}: {best[name] / best[first]:.2f}" for name in works)
        print(f"cost      over that of {first[1:]} {words}: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer points and examples")
    parser.add_argument("--only", nargs="*", choices=["slice", "spectrum", "layers", "cost"], default=None)
    parser.add_argument("--cpu", action="store_true", help="CPU time of one thread")
    chosen = parser.parse_args()
    if chosen.cpu:
        global clock
        clock = time.process_time
        torch.set_num_threads(1)
    print(describe())
    tables = {"slice": slice_table, "spectrum": spectrum_table, "layers": layers_table, "cost": cost_table}
    for name in chosen.only or tables:
        tables[name](chosen.quick)


if __name__ == "__main__":
    main()
