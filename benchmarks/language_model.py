"""What an outer loop costs around the optimizers of a language model: update, whole step, memory; its local energy.

    python benchmarks/language_model.py            about six minutes
    python benchmarks/language_model.py --quick    fewer rounds
    python benchmarks/language_model.py --cpu-time processor time of one thread: on a machine that others use as well

A network like GPT-2 with 10 million parameters (transformers, from a configuration), mini-batches of 8 x 64 tokens.
Each ratio is the median (and quartiles) over rounds of the time of `Entropic` around an optimizer against that
optimizer alone in the same round. Rates are tiny, so that every repeat does the same work. Memory is what the
optimizers keep for each parameter, in copies of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import describe
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import GPT2Config, GPT2LMHeadModel

import wideflat
from wideflat.kernels.noise import GaussianNoise

TINY = 1e-9
#: Seconds for one table.
LIMIT = 60.0
FORMS: dict[str, dict[str, Any]] = {
    "no pull": {"pull": 0.0},
    "pull 1": {"pull": 1.0},
    "pull 1, noise": {"pull": 1.0, "epsilon": TINY},
    "pull 1, alpha 0.75": {"pull": 1.0, "alpha": 0.75},
}


def network() -> nn.Module:
    """GPT-2 with 6 layers of width 320 and 8,000 tokens: 10 million parameters."""
    torch.manual_seed(0)
    tokens = {"vocab_size": 8000, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**tokens, n_positions=128, n_embd=320, n_layer=6, n_head=5, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=TINY, fused=True)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [Muon(hidden, lr=TINY), AdamW(rest, lr=TINY, fused=True)]


#: What is compared: the time that passes, or (``--cpu-time``) that of the processor alone.
clock: Callable[[], float] = time.perf_counter


def seconds(act: Callable[[], object], repeats: int) -> float:
    start = clock()
    for _ in range(repeats):
        act()
    return (clock() - start) / repeats


def compared(acts: dict[str, Callable[[], object]], repeats: int, rounds: int) -> dict[str, list[float]]:
    """Time of each in units of the first, round by round; three rounds at least, and no more after LIMIT seconds."""
    for act in acts.values():
        seconds(act, 1)
    ratios: dict[str, list[float]] = {name: [] for name in acts}
    start = clock()
    for number in range(rounds):
        if number >= 3 and clock() - start > LIMIT:
            break
        times = {name: seconds(act, repeats) for name, act in acts.items()}
        base = next(iter(times.values()))
        for name, value in times.items():
            ratios[name].append(value / base)
    return ratios


def show(title: str, ratios: dict[str, list[float]]) -> None:
    print(f"\n{title} ({len(next(iter(ratios.values())))} rounds)")
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"  {name:<46} {middle:6.3f}  ({low:.3f} to {high:.3f})", flush=True)


def copies(optimizers: list[Optimizer], parameters: int) -> float:
    """Elements that optimizers keep in their states, in units of the parameters; what two of them show counts once."""
    kept = {}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            kept.update(
                {v.data_ptr(): v.numel() for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1}
            )
    return sum(kept.values()) / parameters


def around(make: Callable[[nn.Module], list[Optimizer]], model: nn.Module, form: dict[str, Any]) -> wideflat.Entropic:
    return wideflat.Entropic(*make(model), inner_steps=20, outer_lr=TINY, outer_momentum=0.67, **form)


def updates(make: Callable[[nn.Module], list[Optimizer]], rounds: int, title: str) -> None:
    """The update alone, gradients given; 20 steps, one cycle, a repeat."""

    def ready() -> nn.Module:
        model = network()
        for p in model.parameters():
            p.grad = 1e-3 * torch.randn_like(p)
        return model

    acts: dict[str, Callable[[], object]] = {}
    memory: dict[str, float] = {}
    alone = make(model := ready())
    [optimizer.step() for optimizer in alone]
    total = sum(p.numel() for p in model.parameters())
    acts["alone"] = lambda: [optimizer.step() for optimizer in alone]
    for name, form in FORMS.items():
        opt = around(make, ready(), form)
        acts[f"Entropic, {name}"] = opt.step
        seconds(opt.step, 21)  # beyond an outer step, which makes its velocity
        memory[f"Entropic, {name}"] = copies([opt, *opt.inner, opt.outer], total)
    numbers, noise = torch.empty(total), GaussianNoise(0)
    acts["for comparison: torch.randn of as many numbers"] = numbers.normal_
    acts["for comparison: the noise alone"] = lambda: noise.fill(numbers)
    show(f"{title}: the update alone", compared(acts, 20, rounds))
    memory = {"alone": copies(alone, total), **memory}
    print("  copies of the parameters kept: " + ", ".join(f"{name} {value:.2f}" for name, value in memory.items()))


def steps(make: Callable[[nn.Module], list[Optimizer]], rounds: int, title: str) -> None:
    """Forward, backward and update, of equal networks on one mini-batch; the forms take turns."""
    ids = torch.randint(8000, (8, 64))

    def step(model: nn.Module, optimizers: list[Optimizer]) -> Callable[[], object]:
        def act() -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()

        return act

    acts = {"alone": step(model := network(), make(model))}
    for name, form in FORMS.items():
        acts[f"Entropic, {name}"] = step(model := network(), [around(make, model, form)])
    show(f"{title}: a whole step", compared(acts, 4, rounds))


@torch.no_grad()
def energy(perturbations: int, sigma: float = 0.05) -> None:
    """The local energy of the loss against the naive loop with as many perturbations, and at equal standard error.

    Both have one z for all examples, so that without pairs a perturbation has the same variance in both: the second
    ratio is the first one times a ratio of two estimates of it, uncertain by a factor of 1 + 2 / sqrt(perturbations).
    """
    model = network().eval()
    ids = torch.randint(8000, (16, 64))
    batch = {"input_ids": ids, "labels": ids}
    loss = lambda: float(model(**batch).loss)  # noqa: E731 # a name for one expression
    weights = [p.clone() for p in model.parameters()]
    loss()
    wideflat.local_energy  # noqa: B018 # its module is imported when it is asked for
    start, base, values = clock(), loss(), []
    for _ in range(perturbations):
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w * (1 + sigma * torch.randn_like(w)))
        values.append(loss() - base)
    naive = clock() - start
    for p, w in zip(model.parameters(), weights, strict=True):
        p.copy_(w)
    own = statistics.stdev(values) / len(values) ** 0.5
    print(f"\nlocal energy of the loss at sigma {sigma}, {perturbations} perturbations:")
    print(f"  the naive loop {statistics.mean(values):.6f} ± {own:.6f}")
    for antithetic in (False, True):
        options: dict[str, Any] = {"metric": "loss", "max_passes": perturbations, "antithetic": antithetic}
        start = clock()
        profile = wideflat.local_energy(model, [batch], [sigma], progress=False, **options)
        ratio, error = naive / (clock() - start), float(profile.stderr[-1])
        kind = "each z with -z: " if antithetic else "local_energy:   "
        print(
            f"  {kind} {float(profile.mean[-1]):.6f} ± {error:.6f}; the naive loop takes {ratio:.2f} times as long,"
            f" {ratio * (own / error) ** 2:.2f} to the same standard error",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--only", choices=("updates", "energy"), help="the update of AdamW; the local energy")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, for a machine that others use as well")
    options = parser.parse_args()
    if options.cpu_time:
        global clock  # one clock for all tables of a run
        clock, options.threads = time.process_time, 1
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"{describe()}; {sum(p.numel() for p in network().parameters()):,} parameters")
    rounds = 5 if options.quick else 15
    if options.only != "energy":
        updates(adamw, rounds, "AdamW (fused)")
    if options.only == "updates":
        return
    if options.only is None:
        steps(adamw, rounds, "AdamW (fused)")
    for perturbations in (20, 100):
        energy(perturbations)
    if options.only is None:
        steps(muon_and_adamw, rounds, "Muon + AdamW")
        updates(muon_and_adamw, 3, "Muon + AdamW")


if __name__ == "__main__":
    main()
