"""The free entropy against other ways to a volume, and what it costs. Tables and figure of docs/free_entropy.md.

    python benchmarks/free_entropy.py                    everything, hours: what is below with its defaults
    python benchmarks/free_entropy.py closed             a quadratic and monomials against the exact value, seconds
    python benchmarks/free_entropy.py convnet            SmallConvNet, n = 1,000, a flat and a sharp minimum: half an
                                                         hour, four times that with the rivals, the long runs a day
    python benchmarks/free_entropy.py convnet --images 200 --rivals 1 --long 10         the same on 200 images
    python benchmarks/free_entropy.py convnet --minima flat --rivals 0 --long 0 --threads 2      the flat one alone
    python benchmarks/free_entropy.py convnet --quick    whether it works: 100 images, short chains, a minute
    python benchmarks/free_entropy.py scaling            price over n, width and |log Z|, fitted; from short chains
    python benchmarks/free_entropy.py scaling --dense    the same for 784-100-2 on the embedded images, minutes
    python benchmarks/free_entropy.py together           chains in one pass (vmap) against one after the other
    python benchmarks/free_entropy.py figure             docs/free_entropy.png

SmallConvNet is trained here, on images of CIFAR-10 where $WIDEFLAT_DATA (or --data) has them, else on the embedded
dresses and coats, until the mean loss is 0.005: sharp with SGD, lr 0.01, batch 250, momentum 0.9; flat with lr 0.05,
batch 10, no momentum. Weights and results are kept in --folder: what was stopped goes on, what is there is only
printed. The rivals are in ``free_entropy_rivals.py``. Times are processor seconds of this process; the last column of
times is that of the clock, which means something on an idle machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from free_entropy_rivals import SGMCMC, rivals
from machine import describe, into_document
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.data import DataError, dress_coat, load
from wideflat.files import atomic_write
from wideflat.models.small_conv_net import SmallConvNet
from wideflat.volume.fixed_data import FixedData
from wideflat.volume.free_entropy import free_entropy
from wideflat.volume.network_energy import Network, NetworkEnergy, block_size
from wideflat.volume.volumes import FreeEntropy
from wideflat.volume.walks import Effort, Walk

ROOT = Path(__file__).parent.parent
MINIMA = {"flat": (0.05, 10, 0.0), "sharp": (0.01, 250, 0.9)}  # learning rate, batch, momentum
ENOUGH = 0.005  # mean loss at which training ends


# ---- networks


def images(count: int, folder: Path | None, embedded: bool = False) -> tuple[Tensor, Tensor, str]:
    """So many normalised training images, their classes, and what they are."""
    try:
        if embedded:
            raise DataError("those that are asked for come with the package")
        data = load("cifar10", folder, allow_altered=True)
    except DataError:
        data = load("dress-coat")
    index = torch.randperm(len(data.train.targets), generator=torch.Generator().manual_seed(0))[:count]
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std))
    return (data.train.images[index].float() / 255 - mean) / std, data.train.targets[index].long(), data.name


def network(x: Tensor, y: Tensor, width: float = 1.0, dense: bool = False) -> nn.Module:
    """SmallConvNet of the shape of the data; other widths than 1 have more or fewer units in each hidden layer."""
    if dense:
        hidden = round(100 * width)
        layers = nn.Linear(x[0].numel(), hidden), nn.ReLU(), nn.Linear(hidden, int(y.max()) + 1)
        return nn.Sequential(nn.Flatten(), *layers)
    model = SmallConvNet(int(y.max()) + 1, x.shape[-1], x.shape[1])
    if width != 1:
        a, b, c = (round(width * units) for units in (20, 50, 500))
        side = model.dense1.in_features // 50
        model.conv1, model.conv2 = nn.Conv2d(x.shape[1], a, 5), nn.Conv2d(a, b, 5)
        model.dense1, model.dense2 = nn.Linear(b * side, c), nn.Linear(c, int(y.max()) + 1)
    return model


def trained(kind: str, x: Tensor, y: Tensor, path: Path, width: float = 1.0, dense: bool = False) -> nn.Module:
    """A minimum of this kind, from its file or trained now."""
    torch.manual_seed(0)
    model, (lr, batch, momentum) = network(x, y, width, dense), MINIMA[kind]
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for _ in range(1000):
        for index in torch.randperm(len(y)).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = torch.cat(
                [F.cross_entropy(model(x[i]), y[i], reduction="none") for i in torch.arange(len(y)).split(50)]
            )
        if loss.mean() < ENOUGH:
            break
    print(f"{kind}, {len(y)} images: mean loss {loss.mean():.4f}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, "wb") as file:
        torch.save(model.state_dict(), file)
    return model.eval()


# ---- measured once


def measured(path: Path, model: nn.Module, data: tuple[Tensor, Tensor], sigma: float, **options: Any) -> FreeEntropy:
    """The free entropy, from its file or measured now; Ctrl-C and the same command go on."""
    if path.exists():
        return FreeEntropy.load(path)
    with passes() as spent:
        begun = time.process_time()
        found = free_entropy(model, data, sigma, checkpoint=path.with_suffix(".pt"), **options)
        seconds = time.process_time() - begun
    found.conventions |= {"cpu": seconds, "share": spent[0] / seconds, "machine": describe()}
    found.save(path)
    path.with_suffix(".pt").unlink(missing_ok=True)
    return found


@contextmanager
def passes() -> Iterator[list[float]]:
    """The processor seconds spent in forward and backward passes while it is open."""
    spent, block, grad = [0.0], Network._block, torch.autograd.grad

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            begun = time.process_time()
            try:
                return call(*arguments, **options)
            finally:
                spent[0] += time.process_time() - begun

        return wrapped

    Network._block, torch.autograd.grad = timed(block), timed(grad)  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Network._block, torch.autograd.grad = block, grad  # type: ignore[method-assign]


def kept(path: Path, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
    """A few numbers, from their file or computed now."""
    if not path.exists():
        with atomic_write(path) as file:
            json.dump(compute(), file)
    found: dict[str, float] = json.loads(path.read_text())
    return found


# ---- the parts


def closed(options: argparse.Namespace) -> None:
    spec = importlib.util.spec_from_file_location("closed_forms", ROOT / "tests" / "volume" / "closed_forms.py")
    assert spec is not None and spec.loader is not None
    forms: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forms)
    rng = np.random.default_rng(0)
    cases = {
        "quadratic, N = 300, 4 decades": forms.quadratic(rng, 300, 4),
        "monomials, N = 150": forms.monomials(rng, 150),
    }
    text = [f"SGLD: {'devinterp' if SGMCMC is not None else 'transcribed'}. {describe()}"]
    for name, energy in cases.items():
        errors: dict[str, list[float]] = {}
        stated, gradients = [], []
        for seed in range(options.seeds):
            found = Walk(energy, effort=Effort(seed=seed)).run()
            stated.append(found.stderr)
            gradients.append(found.gradients)
            for rival, value in {"wideflat": found.log_z, **rivals(energy, found, seed)}.items():
                errors.setdefault(rival, []).append(value - energy.exact)
        text += [f"\n{name}: log Z = {energy.exact:.1f}, {np.mean(gradients):.0f} gradients, {options.seeds} seeds\n"]
        text += ["| | mean error | scatter | stated |", "|---|---|---|---|"]
        for rival, every in errors.items():
            values = [value for value in every if math.isfinite(value)]
            lost = len(every) - len(values)
            rival += f" (diverged in {lost} of {len(every)}, left out)" if lost else ""
            said = f"{np.mean(stated):.1f}" if rival == "wideflat" else ""
            scatter = f"{np.std(values):.1f}" if len(values) > 1 else ""
            text += [f"| {rival} | {np.mean(values):+.1f} | {scatter} | {said} |"]
    print("\n".join(text))
    into_document(ROOT / "docs" / "free_entropy.md", "rivals", "\n".join(text))


def convnet(options: argparse.Namespace) -> None:
    n, sigma = options.images, options.sigma
    x, y, name = images(n, options.data)
    folder = options.folder / f"{name}-{n}"
    print(f"\nSmallConvNet, {n} images of {name}, sigma = {sigma:g}")
    heads = [
        "minimum",
        "<V>_0",
        "log Z",
        "stderr",
        "converged",
        "gradients",
        "processor minutes",
        "in passes",
        "minutes",
    ]
    print(f"| {' | '.join(heads)} | long run | SGLD | AIS | Laplace | star |\n|{'---|' * (len(heads) + 5)}")
    short = {"chains": 1, "burn": 4, "samples": 4, "points": 16} if options.quick else {}
    for kind in options.minima:
        model = trained(kind, x, y, folder / f"{kind}.pt")
        stem = f"{kind}-{sigma:g}"
        found = measured(folder / f"{stem}.json", model, (x, y), sigma, **short)
        point, about = found.points[0], found.conventions
        cells = [kind, f"{point.prior_mean:.0f}", f"{point.log_z:.2f}", f"{point.stderr:.2f}"]
        cells += ["yes" if point.converged else "no: " + ", ".join(point.flags), str(point.gradients)]
        cells += [f"{about['cpu'] / 60:.1f}", f"{about['share']:.2f}", f"{point.seconds / 60:.1f}"]
        if options.long:
            effort = {"samples": 18 * options.long, "burn": 12 * min(options.long, 4), "seed": 1}
            long = measured(folder / f"{stem}-long{options.long}.json", model, (x, y), sigma, **effort).points[0]
            cells += [f"{long.log_z:.2f} ± {long.stderr:.2f}" + ("" if long.converged else " (refused)")]
        else:
            cells += [""]
        others: dict[str, float] = {}
        if options.rivals:
            net = Network(model, FixedData((x, y), block_size(model)))
            with net.prepared():
                energy = NetworkEnergy(net, sigma)
                compute = lambda e=energy, p=point: rivals(e, p, 0, options.rivals)  # noqa: E731
                others = kept(folder / f"{stem}-rivals{options.rivals:g}.json", compute)
        cells += [f"{others[rival]:.1f}" if others else "" for rival in ("SGLD", "AIS", "Laplace", "star")]
        print(f"| {' | '.join(cells)} |", flush=True)


def scaling(options: argparse.Namespace) -> None:
    """Gradients a trajectory from short chains; the price of a default measurement follows from it."""
    text = ["Short chains (one a side, 6 + 4 trajectories a node), scaled to the default effort; flat minimum:", ""]
    text += ["| n | width | weights | sigma | log Z | gradients | processor minutes |", "|" + "---|" * 7]
    print("\n".join(text))
    base, dense = options.counts[0], options.dense
    cases = [(n, 1.0, options.sigma) for n in options.counts]
    cases += [(base, width, options.sigma) for width in options.widths if width != 1]
    cases += [(base, 1.0, sigma) for sigma in options.sigmas if sigma != options.sigma]
    rows = []
    for n, width, sigma in cases:
        x, y, name = images(n, options.data, dense)
        folder = options.folder / (f"{name}-{len(y)}" + ("-dense" if dense else ""))
        path = folder / ("flat.pt" if width == 1 else f"flat-width{width:g}.pt")
        model = trained("flat", x, y, path, width, dense)
        short = {"chains": 1, "burn": 6, "samples": 4, "points": 32, "progress": False}
        found = measured(folder / f"scaling-{width:g}-{sigma:g}.json", model, (x, y), sigma, **short)
        point = found.points[0]
        nodes = max(1, len(point.betas) - 1)
        ratio = Effort().trajectories(nodes) / Effort(chains=1, burn=6, samples=4).trajectories(nodes)
        weights = found.conventions["perturbed"]
        rows.append((len(y), weights, point.log_z, ratio * point.gradients, ratio * found.conventions["cpu"] / 60))
        cells = [len(y), f"{width:g}", weights, f"{sigma:g}", f"{point.log_z:.1f} ± {point.stderr:.1f}"]
        text += [f"| {' | '.join(map(str, cells))} | {rows[-1][3]:.0f} | {rows[-1][4]:.1f} |"]
        print(text[-1], flush=True)
    text += [""]
    counts, widths = len(options.counts), sum(width != 1 for width in options.widths)
    parts = {"n": (0, rows[:counts]), "N": (1, [rows[0], *rows[counts : counts + widths]])}
    parts["|log Z|"] = (2, [rows[0], *rows[counts + widths :]])
    for name, (column, part) in parts.items():
        if len(part) > 1:
            size = np.log([abs(row[column]) for row in part])
            powers = [np.polyfit(size, np.log([row[k] for row in part]), 1)[0] for k in (3, 4)]
            grow = f"gradients grow as {name}^{powers[0]:.2f}, time as {name}^{powers[1]:.2f}"
            text += [f"- {name}: {grow} ({len(part)} points)"]
            print(text[-1])
    if dense:
        into_document(ROOT / "docs" / "free_entropy.md", "dense", "\n".join(text))


def together(options: argparse.Namespace) -> None:
    """Four gradients by vmap over the weights in one pass, against four passes; best of interleaved repeats."""
    torch.manual_seed(0)
    layers = lambda *s: nn.Sequential(*(m for i, o in itertools.pairwise(s) for m in (nn.Linear(i, o), nn.ReLU())))  # noqa: E731
    x, y, name = images(200, options.data)
    cases = {
        "MLP 16-24-4, n = 200": (layers(16, 24, 4), (torch.randn(200, 16), torch.randint(4, (200,)))),
        "MLP 64-32-32-10, n = 300": (layers(64, 32, 32, 10), (torch.randn(300, 64), torch.randint(10, (300,)))),
        "MLP 784-100-10, n = 1,000": (layers(784, 100, 10), (torch.randn(1000, 784), torch.randint(10, (1000,)))),
        f"SmallConvNet, 200 images of {name}": (network(x, y), (x, y)),
    }
    print("\n| network | one gradient (ms) | four together, times as fast |\n|---|---|---|")
    for label, (model, data) in cases.items():
        one, four = _apart_and_together(model.eval(), data)
        print(f"| {label} | {1e3 * one:.2f} | {4 * one / four:.2f} |", flush=True)


def _apart_and_together(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    flat, sizes = torch.cat([w.flatten() for w in weights.values()]), [w.numel() for w in weights.values()]
    xi, size = torch.randn(4, len(flat)), block_size(model)

    def energy(xi: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = (flat + 0.3 * flat.abs() * xi).split(sizes)
        moved = {n: part.view(w.shape) for (n, w), part in zip(weights.items(), parts, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, moved, (x,)), y, reduction="none").double().sum()

    gradients = torch.func.vmap(torch.func.grad(energy), in_dims=(0, None, None))
    blocks = list(zip(*(part.split(size) for part in data), strict=True))
    net = Network(model, FixedData(data, size))
    best = [math.inf, math.inf]
    with net.prepared():
        single = NetworkEnergy(net, 0.3)
        calls: Sequence[Callable[[], Any]] = (
            lambda: [single.gradient(row) for row in xi],
            lambda: sum(gradients(xi, *block) for block in blocks),
        )
        for _ in range(5):
            for k, call in enumerate(calls):
                begun = time.process_time()
                call()
                best[k] = min(best[k], time.process_time() - begun)
    return best[0] / 4, best[1]


def learn(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Until the mean loss is 0.01."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5000):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break


def figure(path: Path) -> None:
    """Lambda over beta of two minima of one network on the embedded images, of the same training loss."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    patterns = dress_coat.load(200)
    x, y = torch.as_tensor(patterns.inputs).float(), (torch.as_tensor(patterns.targets) > 0).long()
    fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    for label, detour in (("trained from the start", False), ("trained on random labels first", True)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(x.shape[1], 20), nn.ReLU(), nn.Linear(20, 2))
        if detour:
            learn(model, x, torch.randint(2, y.shape))
        learn(model, x, y)
        found = free_entropy(model, (x, y), 1.0, burn=20, progress=False)
        print(label, found, sep="\n", flush=True)
        found.plot(ax, label=label)
    fig.savefig(path, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
        "closed": closed,
        "convnet": convnet,
        "scaling": scaling,
        "together": together,
    }
    parser.add_argument("what", choices=["all", *PARTS, "figure"], nargs="?", default="all")
    parser.add_argument("--seeds", type=int, default=4, help="closed: runs of each")
    parser.add_argument("--images", type=int, default=1000, help="convnet: n")
    parser.add_argument("--sigma", type=float, default=0.5, help="relative")
    parser.add_argument("--minima", nargs="+", choices=list(MINIMA), default=list(MINIMA))
    parser.add_argument("--rivals", type=float, default=1.0, help="convnet: share of our gradients; 0 for none")
    parser.add_argument("--long", type=int, default=10, help="convnet: a run of so many times the samples; 0 for none")
    parser.add_argument("--counts", type=int, nargs="+", default=[200, 500, 1000, 2000, 4000], help="scaling: n")
    parser.add_argument("--widths", type=float, nargs="+", default=[0.25, 0.5, 1, 2], help="scaling: of the layers")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.2, 0.3, 0.4, 0.5], help="scaling: for |log Z|")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10; $WIDEFLAT_DATA and the usual places by default")
    parser.add_argument("--folder", type=Path, default=Path("free-entropy-benchmark"), help="weights and results")
    parser.add_argument("--dense", action="store_true", help="scaling: of a network without convolutions")
    parser.add_argument("--threads", type=int, default=1, help="of one forward or backward pass")
    parser.add_argument("--quick", action="store_true", help="convnet: short chains on 100 images, to see it work")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.quick:
        chosen.images, chosen.minima, chosen.rivals, chosen.long = 100, ["flat"], 0.0, 0
        chosen.folder = chosen.folder / "quick"
    print(describe())
    if chosen.what == "figure":
        figure(ROOT / "docs" / "free_entropy.png")
    for part in PARTS if chosen.what == "all" else [chosen.what]:
        if part in PARTS:
            PARTS[part](chosen)
