"""What the coupling of replicas on several ranks costs, beside DistributedDataParallel and no communication at all.

Two ranks on this machine, gloo over loopback, SmallConvNet. Every figure is from this one run, variants taking turns.
Then a model of the cost on many replicas, with its constants.

    python benchmarks/distributed.py [--steps 12] [--rounds 8]
    python benchmarks/distributed.py --quick       two rounds of two steps
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from machine import describe
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import wideflat
from wideflat.distributed.mesh import seed_replica
from wideflat.models import smallconvnet

RANKS, BATCH = 2, 128


def make_step(model: nn.Module, coupling: wideflat.ReplicaCoupling | None = None, prefetch: bool = False) -> Callable:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    def step() -> None:
        if coupling is not None and prefetch:
            coupling.prefetch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if coupling is not None:
            coupling.couple()
        optimizer.step()

    return step


def seconds(action: Callable[[], object], repeats: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    dist.barrier()
    return (time.perf_counter() - start) / repeats


def turns(actions: dict[str, Callable[[], object]], repeats: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each action, all taking turns in every round."""
    for action in actions.values():
        seconds(action, 2)
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            taken[name].append(seconds(action, repeats))
    return taken


def rank_main(rank: int, port: int, steps: int, rounds: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=3))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("replica",))
    seed_replica(mesh, 0)
    say = print if rank == 0 else (lambda *_, **__: None)

    steps = max(steps // 10, 1) * 10  # whole periods of K = 10
    actions: dict[str, Callable[[], object]] = {"no communication": make_step(smallconvnet(num_classes=10))}
    for name, period, prefetch in (("K = 1", 1, False), ("K = 10", 10, False), ("K = 10, prefetch", 10, True)):
        model = smallconvnet(num_classes=10)
        coupling = wideflat.ReplicaCoupling(model, mesh=mesh, period=period, gamma=0.01)
        actions[f"coupling, {name}"] = make_step(model, coupling, prefetch)
    actions["DDP"] = make_step(DistributedDataParallel(smallconvnet(num_classes=10)))
    taken = turns(actions, steps, rounds)

    size = sum(p.nbytes for p in model.parameters())
    sent = {"no communication": 0.0, "coupling, K = 1": size, "DDP": float(size)}
    sent |= {"coupling, K = 10": size / 10, "coupling, K = 10, prefetch": size / 10}
    alone = statistics.median(taken["no communication"])
    say(f"{describe()}; {RANKS} ranks, 1 thread each, gloo on loopback")
    say(f"\nSmallConvNet, {size / 4:,.0f} parameters, mini-batch {BATCH}; {rounds} rounds of {steps} steps in turn")
    say(f"{'':30}{'ms a step':>10}{'cost':>9}{'(spread)':>17}{'MB a step':>11}")
    for name, values in taken.items():
        # the cost against the same round, in which the machine was in the same state
        costs = sorted(v / free - 1 for v, free in zip(values, taken["no communication"], strict=True))
        spread = f"{100 * costs[len(costs) // 4]:.1f} to {100 * costs[-1 - len(costs) // 4]:.1f}"
        say(
            f"{name:30}{1e3 * statistics.median(values):10.1f}{100 * statistics.median(costs):8.1f}%{spread:>17}"
            f"{sent[name] / 1e6:11.3f}"
        )
    say(f"bytes at K = 10 / bytes of DDP: {sent['coupling, K = 10'] / sent['DDP']:.3f}")

    # one all-reduce a bucket against one a tensor, for a network of many small tensors too
    from wideflat.models import resnet18, resnet110

    say(f"\n{'all-reduce of the weights':30}{'tensors':>9}{'MB':>7}{'in buckets':>12}{'by tensor':>11}{'ratio':>7}")
    for name, make in (("SmallConvNet", smallconvnet), ("ResNet-110", resnet110), ("ResNet-18", resnet18)):
        model = make(num_classes=10)
        group = wideflat.ReplicaCoupling(model, mesh=mesh).group
        weights = [[p.detach() for p in model.parameters()]]
        pieces = {
            "in buckets": lambda group=group, weights=weights: [None for _ in group.blocks(weights)],
            "by tensor": lambda weights=weights: _one_by_one(weights[0]),
        }
        result = {key: statistics.median(value) for key, value in turns(pieces, 3, 5).items()}
        megabytes = sum(w.nbytes for w in weights[0]) / 1e6
        say(
            f"{name:30}{len(weights[0]):9}{megabytes:7.1f}{1e3 * result['in buckets']:9.1f} ms"
            f"{1e3 * result['by tensor']:8.1f} ms{result['by tensor'] / result['in buckets']:7.2f}"
        )

    small, large = torch.zeros(1), torch.zeros(4_000_000)
    latency = statistics.median(turns({"": lambda: dist.all_reduce(small)}, 20, 5)[""])
    transfer = statistics.median(turns({"": lambda: dist.all_reduce(large)}, 3, 5)[""])
    bandwidth = large.nbytes / (transfer - latency)
    say(f"\nloopback here: {1e6 * latency:.0f} us for nothing, {bandwidth / 1e6:.0f} MB/s for 16 MB (2 ranks)")
    if rank == 0:
        model_of_the_cost(alone, size)
    dist.barrier()
    dist.destroy_process_group()


def _one_by_one(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = [w.clone() for w in weights]
    for work in [dist.all_reduce(copy, async_op=True) for copy in copies]:
        work.wait()
    torch._foreach_div_(copies, RANKS)
    return copies


def all_reduce_seconds(nbytes: float, replicas: int, latency: float, bandwidth: float) -> float:
    """The better of a ring and a tree: 2 (y-1) latencies and 2 (y-1)/y of the data, or 2 log2 y of the first and twice
    the data.
    """
    ring = 2 * (replicas - 1) * latency + 2 * (replicas - 1) / replicas * nbytes / bandwidth
    steps = 2 * (replicas - 1).bit_length()
    tree = steps * latency + 2 * nbytes / bandwidth
    return min(ring, tree)


#: Latency in seconds and bandwidth in bytes a second of one direction of one replica's link.
LINKS = {"data centre, 100 Gb/s, 20 us": (20e-6, 12.5e9), "internet, 100 Mb/s, 50 ms": (50e-3, 12.5e6)}


def model_of_the_cost(small_step: float, small_size: float) -> None:
    print("\nmodel: T(n, y) = min[2 (y-1) a + 2 (y-1)/y n/b, 2 ceil(log2 y) a + 2 n/b]; coupling T/K, DDP T a step.")
    print("Time for communication as part of all time, nothing overlapped; waiting for slower replicas not counted.")
    measured = f"SmallConvNet, {small_size / 1e6:.1f} MB, {1e3 * small_step:.0f} ms a step (measured)"
    large = "a network of 100 MB, 250 ms a step (ResNet-50 on one GPU)"
    networks = {measured: (small_size, small_step), large: (100e6, 0.25)}
    for link, (latency, bandwidth) in LINKS.items():
        for network, (nbytes, step) in networks.items():
            print(f"\n{link}; {network}")
            print(f"{'replicas':>10}{'DDP':>10}{'K = 1':>10}{'K = 10':>10}{'K = 100':>10}{'K for 5 %':>11}")
            for replicas in (8, 100, 1000, 10_000):
                t = all_reduce_seconds(nbytes, replicas, latency, bandwidth)
                parts = [t / period / (step + t / period) for period in (1, 1, 10, 100)]
                needed = max(1, -(-t // (step * 0.05 / 0.95)))
                print(f"{replicas:10}" + "".join(f"{100 * part:9.1f}%" for part in parts) + f"{needed:11.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of each variant in a round")
    parser.add_argument("--rounds", type=int, default=8, help="rounds")
    parser.add_argument("--quick", action="store_true", help="two rounds of two steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = arguments.rounds = 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(rank_main, (store.port, arguments.steps, arguments.rounds), RANKS)


if __name__ == "__main__":
    main()
