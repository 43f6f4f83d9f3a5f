"""Committee machines trained fifty at a time against one at a time, on the real data.

    python benchmarks/committee.py                     every setting, first epochs, extrapolated (about three minutes)
    python benchmarks/committee.py --whole sgd-fast    a setting to its end, nothing extrapolated

"One at a time" is ``wideflat.committee.reference.train_one``: nn.Module, autograd, and the library's own optimizers, in
float32 on the same threads. The first epochs are the dearest for the batched training (later most coefficients are
zero and their rows are left out), so minutes extrapolated from them are upper bounds and ratios are lower bounds.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from machine import describe, peak_flops

from wideflat.committee import SETTINGS, train
from wideflat.committee.gram import Gram
from wideflat.committee.job import make_form
from wideflat.committee.randomness import initial_weights, order
from wideflat.committee.reference import train_one
from wideflat.data import dress_coat

#: Epochs that restarts took in a whole run (means; results/figure1-by-subset.md), to extrapolate with.
EPOCHS = {"sgd-fast": 810, "sgd-slow": 10_000, "rsgd-fast": 5550, "rsgd-slow": 89_000, "esgd": 9700}

#: Epochs to time: batched, and one at a time.
TIMED = {"sgd-fast": (1000, 60), "sgd-slow": (1000, 60), "rsgd-fast": (150, 6), "rsgd-slow": (150, 6), "esgd": (100, 3)}


def batched(name: str, restarts: int, epochs: int | None, threads: int) -> tuple[float, list[int]]:
    """Seconds for restarts of a setting, and the epochs that each took."""
    data = dress_coat.load()
    setting = SETTINGS[name]
    if epochs is not None:  # no rule, so that all restarts take as many epochs
        stop = "distance" if setting.replicated or setting.has_inner_loop else "loss"
        setting = setting.replace(max_epochs=epochs, stop=stop, tolerance=0.0)
    start = time.perf_counter()
    result = train(setting, data.inputs, data.targets, range(restarts), threads=threads, progress=epochs is None)
    return time.perf_counter() - start, result.epochs


def one_at_a_time(name: str, epochs: int) -> float:
    """Seconds an epoch of one restart takes by autograd."""
    data = dress_coat.load()
    steps = train_one(SETTINGS[name], data.inputs, data.targets, 0, torch.float32)
    next(steps)
    start = time.perf_counter()
    for _ in itertools.islice(steps, epochs):
        pass
    return (time.perf_counter() - start) / epochs


def inner_step(name: str) -> tuple[float, float]:
    """Seconds that the step takes for one network of a full group on one thread, and the sum over rows of G in it.

    The best of several epochs: the first ones, in which all patterns have a gradient.
    """
    data, setting = dress_coat.load(), SETTINGS[name]
    seeds = range(128 // setting.num_replicas)
    form = make_form("gram", setting, data, torch.float32)
    assert isinstance(form, Gram)
    orders = torch.from_numpy(np.stack([order(setting, seed, 0, 500) for seed in seeds]))
    networks = setting.num_replicas * len(seeds)
    steps = 5 * setting.passes * networks
    with torch.inference_mode():
        form.load(torch.stack([initial_weights(setting, seed, 784) for seed in seeds]))
        whole = min(seconds(form.epoch, epoch, orders, None) for epoch in range(4 if name == "esgd" else 15))
        batch = form.present(orders[:, : setting.num_replicas].reshape(networks, -1), None, 0, setting.lr)[0]
        a, c = torch.zeros(networks, setting.hidden, form.P), torch.full((networks, setting.hidden, 112), 1e-3)
        rows = min(seconds(form.add_rows, a, batch, c) for _ in range(15))
    return whole / steps, rows / networks


def seconds(function: Callable[..., object], *arguments: object) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", nargs="*", default=[], choices=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--restarts", type=int, default=50)
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    peak = peak_flops()
    print(f"{describe()}; peak {peak / 1e9:.0f} Gflop/s in float32; {arguments.restarts} restarts")
    if arguments.whole:
        for name in arguments.whole:
            seconds, epochs = batched(name, arguments.restarts, None, threads)
            mean = sum(epochs) / len(epochs)
            rate = arguments.restarts / seconds * 60
            print(f"{name:10} whole: {seconds / 60:.1f} min, {rate:.1f} restarts a minute, {mean:.0f} epochs a restart")
        return
    print(
        f"{'setting':10} {'us/step':>8} {'Gflop/s':>8} {'of peak':>8} {'batched':>14} {'one at a time':>14}"
        f" {'ratio':>6} {'50 restarts':>12}"
    )
    for name in arguments.only:
        many, few = TIMED[name]
        setting = SETTINGS[name]
        batched(name, arguments.restarts, 1, threads)  # warm up
        seconds, _ = batched(name, arguments.restarts, many, threads)
        epoch = seconds / many / arguments.restarts
        single = one_at_a_time(name, few)
        steps = 5 * setting.num_replicas * setting.passes
        flops = 2 * setting.hidden * 100 * 500 / (epoch / steps)
        rate, single_rate = (60 / (t * EPOCHS[name]) for t in (epoch, single))
        minutes = 50 * epoch * EPOCHS[name] / 60
        print(
            f"{name:10} {epoch / steps * 1e6:8.1f} {flops / 1e9:8.1f} {flops / peak:8.0%} {rate:8.2f} a min"
            f" {single_rate:8.3f} a min {single / epoch:6.1f} {minutes:8.1f} min",
            flush=True,
        )
    torch.set_num_threads(1)
    peak = peak_flops()
    print(f"the inner step alone, 128 networks, 1 thread (peak {peak / 1e9:.0f} Gflop/s), and its sum over rows of G:")
    for name in arguments.only:
        whole, rows = inner_step(name)
        flops = 2 * SETTINGS[name].hidden * 100 * 500
        print(
            f"{name:10} {whole * 1e6:8.1f} us {flops / whole / peak:5.0%} of peak;"
            f" sum over rows {rows * 1e6:5.1f} us {flops / rows / peak:5.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
