"""Time and memory of the optimizers: the update alone, a whole training step, and copies of the parameters.

    python benchmarks/optimizers.py            all of it, about four minutes
    python benchmarks/optimizers.py --quick    fewer repeats

Each ratio is the median over rounds of the time of one against the time of torch's own SGD in the same round, so that a
machine that slows down between rounds does not show. "Update alone" takes gradients as given. Rates are tiny: the
weights do not change, so every repeat does the same work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import pytorch_optimizer
import torch
from machine import describe
from torch import Tensor, nn
from torch.nn import functional as F

import wideflat
from wideflat.models import resnet18, smallconvnet

TINY = 1e-9
SETTINGS = {
    "momentum 0.9": {"momentum": 0.9},
    "Nesterov 0.9, weight decay 1e-4": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
}


def tiny_tensors() -> nn.Module:
    """A network of 100 layers, each a matrix of 16 x 16 and a bias."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(100)))


def with_gradients(model: nn.Module) -> list[nn.Parameter]:
    params = list(model.parameters())
    for p in params:
        p.grad = 1e-3 * torch.randn_like(p)
    return params


def updates(make: Callable[[], nn.Module], settings: dict) -> dict[str, tuple[Callable[[], object], int]]:
    """The update alone of each optimizer; and how many networks it updates."""

    def entropic(epsilon: float) -> Callable[[], object]:
        params = with_gradients(make())
        return wideflat.EntropySGD(params, lr=TINY, inner_lr=TINY, epsilon=epsilon, **settings).step

    def lookahead_peer() -> Callable[[], object]:
        sgd = torch.optim.SGD(with_gradients(make()), lr=TINY, foreach=True, **settings)
        return pytorch_optimizer.Lookahead(sgd, k=5, alpha=0.5).step

    def sam() -> Callable[[], object]:
        opt = wideflat.SAM(with_gradients(make()), rho=TINY, lr=TINY, foreach=True, **settings)
        return lambda: opt.step(lambda: None)

    def replicas() -> Callable[[], object]:
        members = wideflat.Replicas(make, 3)
        opt = torch.optim.SGD(with_gradients(members), lr=TINY, foreach=True, **settings)
        coupling = wideflat.ReplicaCoupling(members, period=10, gamma=TINY)
        return lambda: (coupling.couple(), opt.step())

    def sgd(fused: bool = False) -> Callable[[], object]:
        kind = {"fused": True} if fused else {"foreach": True}
        return torch.optim.SGD(with_gradients(make()), lr=TINY, **kind, **settings).step

    return {
        "SGD (torch, foreach)": (sgd(), 1),
        "SGD (torch, fused)": (sgd(fused=True), 1),
        "EntropySGD, epsilon = 0": (entropic(0.0), 1),
        "EntropySGD, with noise": (entropic(1e-4), 1),
        "Lookahead (wideflat)": (
            wideflat.Lookahead(with_gradients(make()), lr=TINY, inner_lr=TINY, **settings).step,
            1,
        ),
        "Lookahead (pytorch-optimizer)": (lookahead_peer(), 1),
        "SAM (beside its 2 gradients)": (sam(), 1),
        "3 replicas, K = 10": (replicas(), 3),
    }


def training_steps(
    make: Callable[[], nn.Module], x: Tensor, y: Tensor, vmap: bool
) -> dict[str, tuple[Callable[[], object], int]]:
    """Whole training steps; and how many networks they train. The replicas interact at every one: the worst case."""
    settings = SETTINGS["Nesterov 0.9, weight decay 1e-4"]

    def plain(model: nn.Module, opt: torch.optim.Optimizer) -> Callable[[], object]:
        def step() -> None:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()

        return step

    def with_closure(model: nn.Module, opt: torch.optim.Optimizer) -> Callable[[], object]:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return lambda: opt.step(closure)

    def replicated(vectorize: bool) -> Callable[[], object]:
        members = wideflat.Replicas(make, 3, vectorize=vectorize)
        opt = torch.optim.SGD(members.parameters(), lr=TINY, foreach=True, **settings)
        coupling = wideflat.ReplicaCoupling(members, period=1, gamma=TINY)

        def step() -> None:
            opt.zero_grad()
            if vectorize:
                outputs = members(x.expand(3, *x.shape))
                torch.stack([F.cross_entropy(output, y) for output in outputs]).sum().backward()
            else:
                for model in members:
                    F.cross_entropy(model(x), y).backward()
            coupling.couple()
            opt.step()

        return step

    def three_runs() -> Callable[[], object]:
        steps = [sgd() for _ in range(3)]
        return lambda: [step() for step in steps]

    def sgd() -> Callable[[], object]:
        model = make()
        return plain(model, torch.optim.SGD(model.parameters(), lr=TINY, foreach=True, **settings))

    first, second, third, fourth = make(), make(), make(), make()
    peer = torch.optim.SGD(third.parameters(), lr=TINY, foreach=True, **settings)
    steps = {
        "SGD (torch, foreach)": (sgd(), 1),
        "EntropySGD, epsilon = 0": (
            plain(first, wideflat.EntropySGD(first.parameters(), lr=TINY, inner_lr=TINY, epsilon=0.0, **settings)),
            1,
        ),
        "EntropySGD, with noise": (
            plain(second, wideflat.EntropySGD(second.parameters(), lr=TINY, inner_lr=TINY, **settings)),
            1,
        ),
        "Lookahead (pytorch-optimizer)": (plain(third, pytorch_optimizer.Lookahead(peer, k=5, alpha=0.5)), 1),
        "SAM": (
            with_closure(fourth, wideflat.SAM(fourth.parameters(), rho=TINY, lr=TINY, foreach=True, **settings)),
            1,
        ),
        "3 independent SGD runs": (three_runs(), 3),
        "3 replicas, K = 1": (replicated(vectorize=False), 3),
    }
    if vmap:
        steps["3 replicas, K = 1, vmap"] = (replicated(vectorize=True), 3)
    return steps


def measure(steps: dict[str, tuple[Callable[[], object], int]], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds a call, by round; the candidates take turns. ``calls`` is a multiple of the cycle, 5 and 10 calls."""
    for step, _ in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, (step, _) in steps.items():
            start = time.perf_counter()
            for _ in range(calls):
                step()
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def table(title: str, steps: dict[str, tuple[Callable[[], object], int]], rounds: int, calls: int) -> None:
    """Print a Markdown table: times, and ratios to torch's SGD."""
    seconds = measure(steps, rounds, calls)
    if calls < 5:  # a cycle of Entropy-SGD is five steps: five rounds are one measurement
        seconds = {name: [sum(values[i : i + 5]) / 5 for i in range(0, rounds, 5)] for name, values in seconds.items()}
    base = seconds["SGD (torch, foreach)"]
    print(f"\n### {title}\n\n| | ms | against SGD | rounds between |\n|---|---|---|---|")
    for name, (_, count) in steps.items():
        ratios = sorted(s / (count * b) for s, b in zip(seconds[name], base, strict=True))
        each = f" (each of {count})" if count > 1 else ""
        print(
            f"| {name}{each} | {1e3 * statistics.median(seconds[name]) / count:.2f} | {statistics.median(ratios):.3f} "
            f"| {ratios[0]:.2f} and {ratios[-1]:.2f} |"
        )
    if "3 independent SGD runs" in seconds:
        pairs = zip(seconds["3 replicas, K = 1"], seconds["3 independent SGD runs"], strict=True)
        print(f"\n3 coupled replicas against 3 independent SGD runs: {statistics.median(a / b for a, b in pairs):.3f}")


def copies(make: Callable[[], nn.Module]) -> None:
    """Print the parameter-sized copies that each optimizer holds and, at its peak within a step, allocates."""
    size = sum(p.numel() * p.element_size() for p in make().parameters())
    print("\n### Copies of the parameters, beside the parameters and their gradients\n")
    print("| | held | more at the peak of a step |\n|---|---|---|")
    for settings in ({}, *SETTINGS.values()):
        label = next((name for name, value in SETTINGS.items() if value is settings), "no momentum")
        makers = {
            "SGD (torch, foreach)": lambda params, kw=settings: torch.optim.SGD(params, lr=TINY, foreach=True, **kw),
            "EntropySGD": lambda params, kw=settings: wideflat.EntropySGD(params, lr=TINY, inner_lr=TINY, **kw),
            "SAM": lambda params, kw=settings: wideflat.SAM(params, rho=TINY, lr=TINY, foreach=True, **kw),
        }
        for name, maker in makers.items():
            params = with_gradients(make())
            opt = maker(params)
            step = (lambda opt=opt: opt.step(lambda: None)) if name == "SAM" else opt.step
            for _ in range(5):
                step()
            held = sum(
                t.numel() * t.element_size() for state in opt.state.values() for t in state.values() if t is not None
            )
            peak = max(peak_of(step) for _ in range(5))
            print(f"| {name}, {label} | {held / size:.2f} | {peak / size:.2f} |")


def peak_of(step: Callable[[], object]) -> int:
    """Bytes allocated by torch at the peak of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--threads", type=int, help="threads of torch")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(describe())
    networks: dict[str, Callable[[], nn.Module]] = {
        "ResNet-18 (11.2 million weights)": lambda: resnet18(num_classes=10),
        "SmallConvNet (0.66 million)": lambda: smallconvnet(num_classes=10),
        "100 layers of tiny tensors (27 thousand)": tiny_tensors,
    }
    for name, make in networks.items():
        for setting, values in SETTINGS.items():
            table(f"Update alone, {name}, {setting}", updates(make, values), 3 if arguments.quick else 7, 10)
    copies(networks["ResNet-18 (11.2 million weights)"])
    resnet, small, tiny = networks
    quick = arguments.quick
    for name, x, calls in (
        (tiny, torch.randn(128, 16), 5),
        (small, torch.randn(128, 3, 32, 32), 5),
        (resnet, torch.randn(16, 3, 32, 32), 1),
    ):
        y = torch.randint(10, (len(x),))
        steps = training_steps(networks[name], x, y, vmap=name != resnet)
        table(f"Whole training step, {name}, mini-batches of {len(x)}", steps, 3 if calls > 1 else 5, calls)
    # The mini-batches of the paper; the three of interest alone, for this takes seconds a step.
    x = torch.randn(16 if quick else 128, 3, 32, 32)
    steps = training_steps(networks[resnet], x, torch.randint(10, (len(x),)), vmap=False)
    few = {name: steps[name] for name in list(steps)[:3]}
    table(f"Whole training step, {resnet}, mini-batches of {len(x)}", few, 5, 1)


if __name__ == "__main__":
    main()
