"""The free entropy against other ways to a volume, at equal gradients. Tables and figure of docs/free_entropy.md.

    python benchmarks/free_entropy.py closed                            closed forms, seconds
    python benchmarks/free_entropy.py runs NAME=RUN ... [--subset 1000 --sigma 0.5]   trained networks, an hour and more
    python benchmarks/free_entropy.py scaling NAME=RUN                  price over n
    python benchmarks/free_entropy.py figure                            docs/free_entropy.png

The rivals, transcribed, each given the gradients that wideflat spent:

    SGLD      Langevin steps with full gradients at the same temperatures, thermodynamic integral over their means (what
              local learning coefficients are estimated with today)
    AIS       annealed importance sampling, one rotated leapfrog step a temperature, 8 chains
    Laplace   -log det(1 + beta H)/2 + gradient term at the weights
    star      random directions, the radius at which beta V reaches lambda, log-mean-exp of the Gaussian mass inside
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.data import dress_coat
from wideflat.entropy.fixed_data import FixedData
from wideflat.entropy.free_entropy import free_entropy
from wideflat.entropy.gaussian_hmc import Energy, normal
from wideflat.entropy.network_energy import Network, NetworkEnergy
from wideflat.entropy.temperatures import Grid
from wideflat.entropy.volume import Integration
from wideflat.entropy.walks import Effort, Walk
from wideflat.training.flatness import augmentation_of_run, images_of_run
from wideflat.training.runs import Run

ROOT = Path(__file__).parent.parent


def sgld(energy: Energy, found: Integration, seed: int) -> float:
    """Log Z from Langevin chains at the nodes; the first third of each is thrown away. Step by the stiffness seen."""
    if len(found.betas) == 1:
        return found.log_z  # independent points were enough: nothing to walk
    generator = torch.Generator().manual_seed(seed)
    betas = np.array(found.betas)
    xi = normal(energy, generator)
    means = [found.llc[0] / betas[0]]
    steps = max(6, found.gradients // max(1, len(betas) - 1))
    for k, beta in enumerate(betas[1:]):
        step = 0.5 * found.diagnostics["step_up"][k] ** 2
        values = []
        for t in range(steps):
            value, gradient = energy.gradient(xi)
            xi = xi - 0.5 * step * (xi + beta * gradient) + math.sqrt(step) * normal(energy, generator)
            if t >= steps // 3:
                values.append(value)
        means.append(float(np.mean(values)))
    # wideflat's own log Z(beta_low), a few per cent of the whole, is given to it
    grid = Grid(found.beta_low, found.beta, len(betas) - 1)
    ours = np.array(found.llc) / betas
    return found.log_z + float(grid.weights @ (ours - np.array(means)))


def ais(energy: Energy, beta: float, gradients: int, chains: int, seed: int) -> float:
    """Log mean of the weights of annealed chains, beta growing geometrically after a first linear part."""
    generator = torch.Generator().manual_seed(seed)
    length = max(2, gradients // chains)
    ladder = beta * np.concatenate([[0.0], np.geomspace(1e-6, 1, length)])
    logs = []
    for _ in range(chains):
        xi, log_w = normal(energy, generator), 0.0
        value, gradient = energy.gradient(xi)
        step = 1.0
        for low, high in itertools.pairwise(ladder.tolist()):
            log_w -= (high - low) * value
            p = normal(energy, generator)
            kick = -0.5 * step * high * gradient
            new_p = p + kick
            new = math.cos(step) * xi + math.sin(step) * new_p
            new_p = math.cos(step) * new_p - math.sin(step) * xi
            new_value, new_gradient = energy.gradient(new)
            new_kick = -0.5 * step * high * new_gradient
            error = high * (new_value - value) + float(kick @ (p + 0.5 * kick) + new_kick @ (new_p + 0.5 * new_kick))
            accept = math.exp(-max(error, 0.0)) if math.isfinite(error) else 0.0
            if torch.rand((), generator=generator).item() < accept:
                xi, value, gradient = new, new_value, new_gradient
            step = min(1.2, step * math.exp(0.1 * (accept - 0.7)))
        logs.append(log_w)
    return float(np.logaddexp.reduce(logs) - math.log(chains))


def laplace(energy: Energy, beta: float) -> float:
    """-log det(1 + beta H)/2 + beta^2 g (1 + beta H)^-1 g/2, H by differences of gradients; small N only."""
    zero = torch.zeros(energy.size, dtype=energy.dtype, device=energy.device)
    g = energy.gradient(zero)[1].double()
    rows = []
    for i in range(energy.size):
        step = zero.clone()
        step[i] = 1e-3
        rows.append((energy.gradient(step)[1] - energy.gradient(-step)[1]).double() / 2e-3)
    H = torch.stack(rows)
    A = torch.eye(energy.size, dtype=torch.float64) + beta * 0.5 * (H + H.T)
    return float(-0.5 * torch.linalg.slogdet(A).logabsdet + 0.5 * beta**2 * g @ torch.linalg.solve(A, g))


def star(energy: Energy, beta: float, level: float, evaluations: int, seed: int) -> float:
    """Log E over directions of the mass of the Gaussian within the radius at which beta V = level, by bisection."""
    generator = torch.Generator().manual_seed(seed)
    logs = []
    for _ in range(max(4, evaluations // 20)):
        direction = normal(energy, generator)
        direction = direction / direction.norm()
        low, high = 0.0, 4 * math.sqrt(energy.size)
        for _ in range(20):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if beta * energy.value(middle * direction) < level else (low, middle)
        # P(chi_N < r): for small r the leading term of the incomplete gamma function is enough
        half, x = energy.size / 2, low**2 / 2
        mass = torch.special.gammainc(torch.tensor(half, dtype=torch.float64), torch.tensor(x, dtype=torch.float64))
        logs.append(math.log(mass) if mass > 1e-290 else half * math.log(max(x, 1e-300)) - x - math.lgamma(half + 1))
    return float(np.logaddexp.reduce(logs) - math.log(len(logs)))


def rivals(energy: Energy, found: Integration, seed: int, small: bool) -> dict[str, float]:
    """Log Z of each at equal gradients."""
    results = {"SGLD": sgld(energy, found, seed), "AIS": ais(energy, found.beta, found.gradients, 8, seed)}
    if small:
        results["Laplace"] = laplace(energy, found.beta)
    results["star"] = star(energy, found.beta, max(found.llc[-1], 0.5), found.gradients, seed)
    return results


def closed(seeds: int) -> None:
    spec = importlib.util.spec_from_file_location("closed_forms", ROOT / "tests" / "entropy" / "closed_forms.py")
    assert spec is not None and spec.loader is not None
    forms: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forms)
    rng = np.random.default_rng(0)
    cases = {
        "quadratic, N = 300, 4 decades": forms.quadratic(rng, 300, 4),
        "monomials, N = 150": forms.monomials(rng, 150),
    }
    for name, energy in cases.items():
        errors: dict[str, list[float]] = {}
        stated, gradients = [], []
        for seed in range(seeds):
            found = Walk(energy, effort=Effort(seed=seed)).run()
            stated.append(found.stderr)
            gradients.append(found.gradients)
            for rival, value in {"wideflat": found.log_z, **rivals(energy, found, seed, seed == 0)}.items():
                errors.setdefault(rival, []).append(value - energy.exact)
        print(f"\n{name}: log Z = {energy.exact:.1f}, {np.mean(gradients):.0f} gradients, {seeds} seeds")
        print("| | mean error | scatter | stated |\n|---|---|---|---|")
        for rival, values in errors.items():
            said = f"{np.mean(stated):.1f}" if rival == "wideflat" else ""
            scatter = f"{np.std(values):.1f}" if len(values) > 1 else ""
            print(f"| {rival} | {np.mean(values):+.1f} | {scatter} | {said} |")


def open_run(path: Path, subset: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The network of a run, and so many of its training images without augmentation."""
    run = Run.open(path)
    images = images_of_run(run)
    pixels = images.train.images.permute(0, 2, 3, 1).contiguous()
    inputs = augmentation_of_run(run).evaluation()(pixels, images.mean, images.std, torch.default_generator)
    index = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))[:subset]
    return run.load_model(), (inputs[index], images.train.targets[index])


def trained_runs(named: list[str], subset: int, sigma: float) -> None:
    print("| network | log Z | stderr | gradients | seconds | share in V | SGLD | AIS | star | ten times longer |")
    print("|" + "---|" * 10)
    for item in named:
        name, _, path = item.partition("=")
        model, data = open_run(Path(path), subset)
        spent, gradient = [0.0], Network.gradient

        def timed(self: Network, *arguments: Any, spent=spent, gradient=gradient) -> Any:  # type: ignore[no-untyped-def]
            begun = time.perf_counter()
            found = gradient(self, *arguments)
            spent[0] += time.perf_counter() - begun
            return found

        Network.gradient = timed  # type: ignore[method-assign]
        begun = time.perf_counter()
        point = free_entropy(model, data, sigma).points[0]
        seconds = time.perf_counter() - begun
        Network.gradient = gradient  # type: ignore[method-assign]
        network = Network(model, FixedData(data, 50))
        with network.prepared():
            others = rivals(NetworkEnergy(network, sigma), point, 0, small=False)
        longer = free_entropy(model, data, sigma, samples=180, burn=60, seed=1).points[0]
        cells = [name, f"{point.log_z:.2f}", f"{point.stderr:.2f}", point.gradients, f"{seconds:.0f}"]
        cells += [f"{spent[0] / seconds:.2f}", *(f"{others[rival]:.1f}" for rival in ("SGLD", "AIS", "star"))]
        print(f"| {' | '.join(map(str, cells))} | {longer.log_z:.2f} ± {longer.stderr:.2f} |", flush=True)


def scaling(item: str, sigma: float) -> None:
    name, _, path = item.partition("=")
    counts, prices = [200, 500, 1000, 2000, 4000], []
    print("| n | log Z | gradients | seconds |\n|---|---|---|---|")
    for n in counts:
        model, data = open_run(Path(path), n)
        point = free_entropy(model, data, sigma, chains=1).points[0]
        prices.append(point.seconds)
        print(f"| {n} | {point.log_z:.2f} ± {point.stderr:.2f} | {point.gradients} | {point.seconds:.0f} |", flush=True)
    print(f"{name}: seconds grow as n^{np.polyfit(np.log(counts), np.log(prices), 1)[0]:.2f}")


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
    parser.add_argument("what", choices=["closed", "runs", "scaling", "figure"], nargs="?", default="closed")
    parser.add_argument("named", nargs="*", help="NAME=RUN")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--subset", type=int, default=1000)
    parser.add_argument("--sigma", type=float, default=0.5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe())
    if options.what == "closed":
        closed(options.seeds)
    elif options.what == "runs":
        trained_runs(options.named, options.subset, options.sigma)
    elif options.what == "scaling":
        scaling(options.named[0], options.sigma)
    else:
        figure(ROOT / "docs" / "free_entropy.png")
