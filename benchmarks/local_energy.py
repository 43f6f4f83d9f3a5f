"""Local energy at equal standard error: the naive loop against each kind of noise.

    python benchmarks/local_energy.py [--quick] [--only committee mlp smallconvnet smallconvnet-all resnet18]
                                      [--data CIFAR] [--fashion FOLDER] [--smallconvnet RUN] [--resnet18 RUN]
                                      [--self-check] [--tails]

For each network: the naive loop (copy the weights, perturb them, evaluate the whole data set, restore), then
``wideflat.local_energy`` with each kind of noise, both in this process on the same network and data, over the same
sigmas. Nobody can run the naive loop until it has the error bars of the others, so its time a perturbation and its
variance over perturbations are measured, on as many perturbations as fit in the time given to it (the number is
printed), and

    ratio at equal standard error = (variance of one naive perturbation x its time) / (stderr^2 x time of wideflat)

at the largest sigma. "variance" is the first factor, for one pass of each; "time" the second. For n larger than what
the naive loop is run on, its variance is (v/n)(1 + (n-1) rho) with v and rho measured where it was run, and its time
grows with n; wideflat is run on all n in any case. Such rows are marked. The default kind of noise has a star.

RUN is a run of ``wideflat train``; rho depends on what a network has learned. Without it the network is trained here
for some steps. The images are not augmented, so that both sides see the same.

"of peak" is the work of the forward passes (one of the whole network for each example, pass and sigma, and one for the
baseline, as torch's flop counter counts them) over all time, drawing noise and folding included, as a fraction of the
measured peak of a matrix product. A product of a first layer that serves several sigmas or passes counts for each. The
last line of a convolutional network has its forward passes by themselves, as the inner evaluation makes them: blocks of
the size that was chosen, channels last, batch norm folded.

With ``--self-check`` nothing of this is measured, but how long the comparison of the fast path with the plain one takes
before a measurement, as a fraction of that measurement with its default number of passes. With ``--tails`` what the
tails of the noise add to a measurement where there is no C compiler.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from machine import describe, peak_flops
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from wideflat import local_energy
from wideflat.committee import train
from wideflat.data import dress_coat, load
from wideflat.energy.block_energy import BlockEnergy
from wideflat.energy.request import Request, plan
from wideflat.energy.self_check import Steady, fast_path_differs
from wideflat.evaluation.folding import FoldedNetwork
from wideflat.evaluation.metrics import error_metric
from wideflat.models import resnet18, smallconvnet
from wideflat.noise import shared_noise
from wideflat.training.flatness import images_of_run
from wideflat.training.runs import Run
from wideflat.training.state_files import load_state

PARTS = ["committee", "mlp", "smallconvnet", "smallconvnet-all", "resnet18"]


def busy() -> float:
    """Processor seconds that other processes have used since the machine was started; 0 where it is not known."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4]]
    except OSError:
        return 0.0
    return sum(ticks) / os.sysconf("SC_CLK_TCK") - time.process_time()


def naive(
    model: nn.Module, x: Tensor, y: Tensor, sigmas: list[float], seconds: float, at_least: int, batch_size: int
) -> tuple[Tensor, Tensor, float]:
    """The loop people write. Errors of each perturbation and example at the largest sigma, time of a perturbation.

    Returns:
        Errors (perturbations, examples) at the largest sigma; their means; seconds a perturbation of one sigma.
    """
    model.eval()
    g = torch.Generator().manual_seed(0)
    rows = []
    count, start = 0, time.perf_counter()
    with torch.no_grad():
        while len(rows) < at_least or time.perf_counter() - start < seconds:
            sigma = sigmas[-1]  # the time does not depend on sigma; all of it is spent where the variance is wanted
            saved = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(sigma * torch.randn(p.shape, generator=g) * p)
            wrong = [
                error_metric(model(x[i : i + batch_size]), y[i : i + batch_size]) for i in range(0, len(x), batch_size)
            ]
            for p, w in zip(model.parameters(), saved, strict=True):
                p.copy_(w)
            rows.append(torch.cat(wrong))
            count += 1
    each = (time.perf_counter() - start) / count
    table = torch.stack(rows).double()
    return table, table.mean(1), each


def flops_of(model: nn.Module, x: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(x[:1])
    return counter.get_total_flops()


def compare(
    name: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    sigmas: list[float],
    peak: float,
    runs: dict[str, float],
    naive_seconds: float,
    naive_examples: int,
    at_least: int = 24,
    batch_size: int = 128,
) -> None:
    """One network at one n: a line for each kind of noise."""
    n, m = len(x), min(len(x), naive_examples)
    table, means, each = naive(model, x[:m], y[:m], sigmas, naive_seconds, at_least, batch_size)
    v = float(table.var(0).mean())
    variance = float(means.var())
    if v == 0:
        raise SystemExit(f"{name}: no answer changes under the noise; this network has learned nothing to measure")
    rho = (m * variance / v - 1) / (m - 1)
    if m < n:
        if rho <= 0:
            print(
                f"\n{name}: rho = {rho:.2g} is not distinguishable from 0 here; the ratios take it as 0 and mean little"
            )
        variance, each = v / n * (1 + (n - 1) * max(rho, 0.0)), each * n / m
    work = flops_of(model, x)
    note = f" of {m} examples, scaled to {n}" if m < n else ""
    print(f"\n{name}, n = {n}, {len(sigmas)} sigmas up to {sigmas[-1]}, E(w) + dE = {float(means.mean()):.3f}")
    print(
        f"  naive loop: {len(means)} perturbations{note}, {each:.3g} s each, "
        f"{100 * work * n / each / peak:.0f}% of peak, v = {v:.3g}, rho = {rho:.3g}",
        flush=True,
    )
    print("  noise     passes    stderr  seconds  variance   time    ratio  of peak")
    default = local_energy(model, (x[:256], y[:256]), sigmas[:1], progress=False).conventions["noise"]
    for noise, passes in runs.items():
        options = {"noise": noise, "max_passes": passes, "progress": False}
        local_energy(model, (x[:256], y[:256]), sigmas[:2], **{**options, "max_passes": 2})  # warm up
        start = time.perf_counter()
        profile = local_energy(model, (x, y), sigmas, **options)
        seconds = time.perf_counter() - start
        per_pass = seconds / (float(profile.passes[-1]) * len(sigmas))  # of one sigma, baseline and set-up included
        ours = float(profile.stderr[-1]) ** 2 * float(profile.passes[-1])
        mark = noise + "*" * (noise == default)
        rate = work * float(profile.evaluations.sum() + n) / seconds / peak
        print(
            f"  {mark:<9} {profile.passes[-1]:6.3g} {profile.stderr[-1]:9.2g} {seconds:8.3g} {variance / ours:8.1f}x "
            f"{each / per_pass:5.2f}x {variance / ours * each / per_pass:7.0f}x {100 * rate:7.0f}%",
            flush=True,
        )

        if noise == default:
            block = int(profile.conventions["block_size"])
    if default == "example":  # many passes at once, layer by layer: there is no forward pass by itself
        return
    rates = sorted(forward_rates(model, x, block, work))
    print(
        f"  forward passes alone, blocks of {block}: {100 * rates[len(rates) // 2] / peak:.0f}% of peak "
        f"(median of {len(rates)}; best {100 * rates[-1] / peak:.0f}%)",
        flush=True,
    )


def self_check(name: str, model: nn.Module, x: Tensor, y: Tensor, sigmas: list[float], *_: object) -> None:
    """Processor time of all self-checks and of looking at the network, as fractions of a default measurement."""
    local_energy(model, (x[:256], y[:256]), sigmas[:2], progress=False)  # warm up
    start = time.process_time()
    profile = local_energy(model, (x, y), sigmas, progress=False)
    whole = time.process_time() - start
    request = Request(
        model, (x, y), sigmas, "auto", "error", "eval", "all", None, None, 0, True, None, None, None, 1024
    )  # fmt: skip
    looks, checks = [], []
    for _ in range(5):
        start = time.process_time()
        energy = BlockEnergy(plan(request))
        looks.append(time.process_time() - start)
        with energy.plan.evaluation.prepared():
            energy.prepare()
            start = time.process_time()
            steady = Steady(energy)
            differs = fast_path_differs(energy)
            steady.restore()
            steady.check()
            checks.append(time.process_time() - start)
        assert not differs, f"{name} does not pass its self-check"
    look, check = sorted(looks)[2], sorted(checks)[2]
    print(
        f"  {name}, n = {len(x)}, {len(sigmas)} sigmas, noise {profile.conventions['noise']}: {whole:.3g} s; "
        f"self-check {1000 * check:.2g} ms = {100 * check / whole:.2g}%; looking at the network {1000 * look:.2g} ms = "
        f"{100 * look / whole:.2g}% (medians of 5)",
        flush=True,
    )


class SixteenBits:
    """The generator without a compiler and without tails: 16 random bits a number, and nothing beyond 4.39."""

    CHUNK = 32768
    edges = torch.special.ndtri(torch.arange(1, 65536, dtype=torch.float64) / 65536)
    density = torch.cat([edges.new_zeros(1), torch.exp(-edges.square() / 2), edges.new_zeros(1)])
    table = (65536 * (density[:-1] - density[1:]) / math.sqrt(2 * math.pi)).float()

    def __init__(self, seed: int) -> None:
        self.bits = np.random.PCG64DXSM(seed)
        self.index, self.values = torch.empty(self.CHUNK, dtype=torch.int32), torch.empty(self.CHUNK)

    def fill(self, out: Tensor, weights: Tensor | None = None) -> Tensor:
        """As ``GaussianNoise.fill``."""
        factors = None if weights is None else weights.view(-1).split(self.CHUNK)
        for at, part in enumerate(out.view(-1).split(self.CHUNK)):
            count = len(part)
            self.index.numpy()[:count] = self.bits.random_raw(-(-count // 4)).view(np.uint16)[:count]
            numbers = torch.index_select(self.table, 0, self.index[:count], out=self.values[:count])
            if factors is None:
                part.copy_(numbers)
            else:
                torch.mul(numbers.to(part.dtype), factors[at], out=part)
        return out


def tails(name: str, model: nn.Module, x: Tensor, y: Tensor, sigmas: list[float], *_: object) -> None:
    """What the tails of the noise add to a measurement without a compiler: processor time, medians of 15 pairs of runs.

    Run it with ``CC=nonexistent-cc``. With a compiler it shows by what the kernel is faster than 16 bits in NumPy.
    """
    ours = shared_noise.GaussianNoise
    for noise in ("auto", "batch", "pass"):
        ratios = []
        for _ in range(16):
            times = []
            for generator in (SixteenBits, ours):
                shared_noise.GaussianNoise = generator  # type: ignore[assignment, misc]
                start = time.process_time()
                try:
                    local_energy(model, (x, y), sigmas, noise=noise, max_passes=2, progress=False)
                finally:
                    shared_noise.GaussianNoise = ours  # type: ignore[misc]
                times.append(time.process_time() - start)
            ratios.append((times[1] / times[0], *times))
        ratio, without, with_tails = sorted(ratios[1:])[len(ratios) // 2]
        print(
            f"  {name}, n = {len(x)}, noise {noise}: {1000 * without:.3g} ms without tails, {1000 * with_tails:.3g} ms "
            f"with them: {100 * (ratio - 1):+.1f}%",
            flush=True,
        )


def forward_rates(model: nn.Module, x: Tensor, block: int, work: int, seconds: float = 4.0) -> list[float]:
    """Floating-point operations a second of forward passes over blocks, one number a pass."""
    network = FoldedNetwork.fold(model) or model.eval()
    part = x[:block].to(memory_format=torch.channels_last) if x.dim() == 4 else x[:block]
    rates: list[float] = []
    with torch.no_grad():
        network(part)
        start = time.perf_counter()
        while len(rates) < 9 or time.perf_counter() - start < seconds:
            begin = time.perf_counter()
            network(part)
            rates.append(work * len(part) / (time.perf_counter() - begin))
    return rates


# ---------------------------------------------------------------------------------------------- networks and data


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int, lr: float, batch_size: int = 100) -> nn.Module:
    """Some steps of plain SGD, so that the weights are those of a network that has learned something."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    g = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        index = torch.randint(len(x), (batch_size,), generator=g)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    return model.eval()


def committee_task(n: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A committee of 9 units trained on n patterns of Dress and Coat (App. B.1, SGD fast)."""
    patterns = dress_coat.load(n)
    solutions = train("sgd-fast", patterns.inputs, patterns.targets, seeds=[0], progress=False)
    return solutions.machine(0).float(), patterns.inputs.float(), patterns.targets.float()


def mlp_task(n: int, folder: Path | None) -> tuple[nn.Module, Tensor, Tensor, str]:
    """A network of linear layers on Fashion-MNIST from ``folder``, or on ten smooth random patterns with noise."""
    if folder is not None:
        part = load("fashion-mnist", folder, allow_altered=True).train
        x, y, kind = (part.images[:n].flatten(1).float() / 255 - 0.29) / 0.35, part.targets[:n].long(), "Fashion-MNIST"
    else:
        g = torch.Generator().manual_seed(0)
        patterns = nn.functional.interpolate(torch.randn(10, 1, 7, 7, generator=g), size=28, mode="bilinear").flatten(1)
        y, kind = torch.randint(10, (n,), generator=g), "generated patterns"
        x = patterns[y] + 4 * torch.randn(n, 784, generator=g)
        x = x / x.std()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return trained(model, x, y, 200 if n < 5000 else 400, 0.02), x, y, kind


def of_run(path: Path, n: int, folder: Path | None) -> tuple[nn.Module, Tensor, Tensor, str]:
    """The network of a run, finished or not, and n of its training images."""
    run = Run.open(path)
    images = images_of_run(run, folder)
    part = images.train
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (images.mean, images.std))
    x = part.images[:n].float().div_(255).sub_(mean).div_(std).contiguous()
    if result := run.result():
        model = run.load_model()
        print(f"\n{path.name}: {', '.join(f'{name} {value}' for name, value in result.items() if 'error' in name)}")
    else:
        last = max((path / "checkpoints").glob("*.json")).with_suffix("")
        model = run.build_model()
        model.load_state_dict(load_state(last)["state"]["learner"]["networks"][0])
        print(f"\n{path.name}: not finished, at {last.name}")
    return model.eval(), x, part.targets[:n].long(), images.name


def images(n: int, folder: Path | None) -> tuple[Tensor, Tensor, str]:
    """CIFAR-10 from ``folder``, or images of ten smooth random patterns with noise."""
    if folder is not None:
        part = load("cifar10", folder, allow_altered=True).train
        return (part.images[:n].float() / 255 - 0.47) / 0.25, part.targets[:n].long(), "CIFAR-10"
    g = torch.Generator().manual_seed(0)
    patterns = nn.functional.interpolate(torch.randn(10, 3, 8, 8, generator=g), size=32, mode="bilinear")
    y = torch.randint(10, (n,), generator=g)
    return patterns[y] + 0.7 * torch.randn(n, 3, 32, 32, generator=g), y, "generated images"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller n")
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--data", type=Path, default=None, help="folder with CIFAR-10; else generated images")
    parser.add_argument("--fashion", type=Path, default=None, help="folder with Fashion-MNIST; else generated patterns")
    parser.add_argument("--smallconvnet", type=Path, default=None, help="run whose network is measured")
    parser.add_argument("--resnet18", type=Path, default=None, help="run whose network is measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--self-check", action="store_true", help="only the cost of the self-check")
    parser.add_argument("--tails", action="store_true", help="only the cost of the noise's tails (CC=nonexistent-cc)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    show: Callable[..., None] = self_check if arguments.self_check else tails if arguments.tails else compare
    peak = max(peak_flops() for _ in range(3))
    print(f"{describe()}, measured peak {peak / 1e9:.0f} Gflop/s")
    tasks: dict[str, Callable[[], None]] = {}

    def task(function: Callable[[], None]) -> None:
        tasks[function.__name__] = function

    sigmas = [round(0.05 * k, 2) for k in range(1, 11)]

    @task
    def committee() -> None:
        model, x, y = committee_task(500)
        runs = {"pass": 64.0, "batch": 64.0, "example": 512.0}
        show("committee 9 x 784", model, x, y, sigmas, peak, runs, 4.0, 500, 200)

    @task
    def mlp() -> None:
        for n in (1000, 10_000, 50_000) if not arguments.quick else (1000,):
            model, x, y, kind = mlp_task(n, arguments.fashion)
            runs = {"pass": 64.0, "batch": 8.0, "example": 32.0} if n < 5000 else {"batch": 4.0, "example": 8.0}
            show(f"MLP 784-256-256-10, {kind}", model, x, y, sigmas, peak, runs, 12.0, 10_000, 60)

    def convolutional(
        make: Callable[..., nn.Module], run: Path | None, n: int, steps: int
    ) -> tuple[nn.Module, Tensor, Tensor, str]:
        """The network of a run, or one that is trained here for some steps; its images."""
        if run is not None:
            return of_run(run, n, arguments.data)
        x, y, kind = images(n, arguments.data)
        torch.manual_seed(0)
        return trained(make(num_classes=10), x, y, steps, 0.05), x, y, kind

    @task
    def smallconvnet_task() -> None:
        model, x, y, kind = convolutional(smallconvnet, arguments.smallconvnet, 1000, 200)
        runs = {"pass": 32.0, "batch": 8.0, "example": 8.0}
        show(f"SmallConvNet, {kind}", model, x, y, sigmas, peak, runs, 20.0, 1000, 30)

    @task
    def smallconvnet_all_task() -> None:
        n = 50_000 if not arguments.quick else 5000
        model, x, y, kind = convolutional(smallconvnet, arguments.smallconvnet, n, 500)
        show(f"SmallConvNet, {kind}", model, x, y, [0.25, 0.5], peak, {"batch": 2.0, "example": 2.0}, 60.0, 5000, 30)

    @task
    def resnet18_task() -> None:
        n = 10_000 if not arguments.quick else 500
        model, x, y, kind = convolutional(resnet18, arguments.resnet18, n, 20)
        show(f"ResNet-18, {kind}", model, x, y, [0.2], peak, {"batch": 1.25}, 60.0, 128, 40)

    for name, function in tasks.items():
        if name.removesuffix("_task").replace("_", "-") in arguments.only:
            others, start = busy(), time.perf_counter()
            function()
            share = (busy() - others) / (time.perf_counter() - start)
            print(f"  (other processes used {100 * share:.0f}% of one processor meanwhile)", flush=True)


if __name__ == "__main__":
    main()
