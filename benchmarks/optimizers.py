"""Time and memory of the optimizers: the update alone, a whole training step, and copies of the parameters.

    python benchmarks/optimizers.py            all of it, about four minutes
    python benchmarks/optimizers.py --quick    fewer repeats
    python benchmarks/optimizers.py --busy     one thread, its processor time: for a machine that others use as well
    python benchmarks/optimizers.py --only compiled    the update as one graph, in Inductor's code, which takes minutes

Each ratio is the median (and quartiles) over rounds of the time of one against the time of torch's own SGD in the same
round, so that a machine that slows down between rounds does not show. "Update alone" takes gradients as given. Rates
are tiny: the weights do not change, so every repeat does the same work.
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


def compiled(make: Callable[[], nn.Module], settings: dict) -> dict[str, tuple[Callable[[], object], int]]:
    """The update by the kernel in C, and as one graph in Inductor's code, which is made here."""

    def entropic(epsilon: float, by_inductor: bool) -> Callable[[], object]:
        params = with_gradients(make())
        opt = wideflat.EntropySGD(params, lr=TINY, inner_lr=TINY, epsilon=epsilon, **settings)
        step = torch.compile(opt.step, fullgraph=True) if by_inductor else opt.step
        step()
        return step

    def sgd(by_inductor: bool) -> Callable[[], object]:
        opt = torch.optim.SGD(with_gradients(make()), lr=TINY, foreach=True, **settings)
        step = torch.compile(opt.step) if by_inductor else opt.step
        step()
        return step

    return {
        "SGD (torch, foreach)": (sgd(False), 1),
        "SGD (torch, compiled)": (sgd(True), 1),
        "EntropySGD, epsilon = 0, kernel in C": (entropic(0.0, False), 1),
        "EntropySGD, epsilon = 0, compiled": (entropic(0.0, True), 1),
        "EntropySGD, with noise, kernel in C": (entropic(1e-4, False), 1),
        "EntropySGD, with noise, compiled": (entropic(1e-4, True), 1),
    }


def large_layers() -> nn.Module:
    """Four layers of 1600 x 1600: 10 million weights in eight tensors, which are compiled in a minute."""
    return nn.Sequential(*(nn.Linear(1600, 1600) for _ in range(4)))


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


def measure(
    steps: dict[str, tuple[Callable[[], object], int]],
    calls: int,
    rounds: int,
    budget: float,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Seconds a call, by round; the candidates take turns. It ends after ``rounds``, or sooner when the budget of
    seconds is used up. A round is a multiple of the cycles of 5 and of 10 calls; where calls are too slow for that the
    turns are single calls, and five of them are one round.
    """
    turns, calls = (1, calls) if calls % 5 == 0 else (5, 1)
    for step, _ in steps.values():
        for _ in range(min(calls, 5)):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + budget
    while len(seconds["SGD (torch, foreach)"]) < rounds:
        if len(seconds["SGD (torch, foreach)"]) >= 3 and time.perf_counter() > end:
            break
        total = dict.fromkeys(steps, 0.0)
        for _ in range(turns):
            for name, (step, _) in steps.items():
                start = clock()
                for _ in range(calls):
                    step()
                total[name] += clock() - start
        for name, spent in total.items():
            seconds[name].append(spent / (turns * calls))
    return seconds


def table(
    title: str,
    steps: dict[str, tuple[Callable[[], object], int]],
    calls: int,
    rounds: int,
    budget: float,
    clock: Callable[[], float],
) -> None:
    """Print a Markdown table: times, and ratios to torch's SGD in the same round."""
    seconds = measure(steps, calls, rounds, budget, clock)
    base = seconds["SGD (torch, foreach)"]
    print(f"\n### {title}, {len(base)} rounds\n\n| | ms | against SGD | quartiles |\n|---|---|---|---|")
    for name, (_, count) in steps.items():
        each = f" (each of {count})" if count > 1 else ""
        ratios = spread([s / (count * b) for s, b in zip(seconds[name], base, strict=True)])
        print(f"| {name}{each} | {1e3 * statistics.median(seconds[name]) / count:.2f} | {ratios} |")
    if "3 independent SGD runs" in seconds:
        pairs = zip(seconds["3 replicas, K = 1"], seconds["3 independent SGD runs"], strict=True)
        print(f"| 3 replicas, K = 1, against 3 independent SGD runs | | {spread([a / b for a, b in pairs])} |")
    print(flush=True)


def spread(ratios: list[float]) -> str:
    """The median and the quartiles, as cells of a table."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} | {low:.2f} to {high:.2f}"


def copies(make: Callable[[], nn.Module]) -> None:
    """Print the parameter-sized copies that each optimizer holds and, at its peak within a step, allocates."""
    size = sum(p.numel() * p.element_size() for p in make().parameters())
    print("\n### Copies of the parameters, beside the parameters and their gradients\n")
    print("| | held | more at the peak of a step |\n|---|---|---|")
    for label, settings in ({"no momentum": {"momentum": 0.0}} | SETTINGS).items():
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
    parser.add_argument("--only", choices=("updates", "copies", "steps", "compiled"), help="one part of it")
    parser.add_argument("--busy", action="store_true", help="one thread, and its processor time instead of the clock")
    arguments = parser.parse_args()
    if arguments.threads or arguments.busy:
        torch.set_num_threads(1 if arguments.busy else arguments.threads)
    clock = time.process_time if arguments.busy else time.perf_counter
    torch.manual_seed(0)
    print(describe() + (", processor time" if arguments.busy else ""))
    networks: dict[str, Callable[[], nn.Module]] = {
        "ResNet-18 (11.2 million weights)": lambda: resnet18(num_classes=10),
        "SmallConvNet (0.66 million)": lambda: smallconvnet(num_classes=10),
        "100 layers of tiny tensors (27 thousand)": tiny_tensors,
    }
    resnet, small, tiny = networks
    rounds, budget = (3, 5.0) if arguments.quick else (15, 15.0)
    if arguments.only in (None, "updates"):
        for name, make in networks.items():
            for setting, values in SETTINGS.items():
                table(f"Update alone, {name}, {setting}", updates(make, values), 10, rounds, budget, clock)
    if arguments.only == "compiled":
        for name, make in {
            "4 large layers (10.2 million weights)": large_layers,
            "SmallConvNet (0.66 million)": networks[small],
        }.items():
            setting = "Nesterov 0.9, weight decay 1e-4"
            table(f"Update, {name}, {setting}", compiled(make, SETTINGS[setting]), 10, rounds, budget, clock)
    if arguments.only in (None, "copies"):
        copies(networks[resnet])
    if arguments.only not in (None, "steps"):
        return
    for name, size, calls, seconds in (
        (resnet, 16, 1, 8 * budget),
        (small, 128, 5, budget),
        (tiny, 128, 5, budget / 2),
    ):
        x = torch.randn(size, 16) if name == tiny else torch.randn(size, 3, 32, 32)
        steps = training_steps(networks[name], x, torch.randint(10, (size,)), vmap=name != resnet)
        table(f"Whole training step, {name}, mini-batches of {size}", steps, calls, rounds, seconds, clock)
    large = training_steps(networks[resnet], torch.randn(128, 3, 32, 32), torch.randint(10, (128,)), vmap=False)
    few = {name: large[name] for name in ("SGD (torch, foreach)", "EntropySGD, with noise")}  # seconds a step
    table(f"Whole training step, {resnet}, mini-batches of 128", few, 1, 3, 8 * budget, clock)


if __name__ == "__main__":
    main()
