"""Exchanges against the number of replicas: bytes, messages and time measured, fitted, and drawn out to 1,000.

Up to 64 processes with a tiny network each, on the cores of this machine, in a network namespace of their own where
root allows it, so that its loopback carries nothing else and its counters say what was sent. Each process is a copy of
this one (fork), so 64 of them fit into 3 GB.

    python benchmarks/scale.py [--most 64] [--exchanges 10]

Per replica and exchange, y replicas, a network of n bytes, gloo's ring:

    bytes     2 n (y - 1) / y + h 2 (y - 1)      h: what a message carries beside its content
    messages  m (y - 1)                          m: segments and acknowledgements a step of the ring
    time      a + b y + c y^2                    b: the steps of the ring; c: that y processes share the cores here

The constants are fitted by least squares of relative errors. The error of a fit is told in two ways: by what the fit of
all but the largest number says of it, and by the standard error of what it says of 1,000.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # loopback has no names, which is no matter

import torch
import torch.distributed as dist
from machine import describe
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import wideflat
import wideflat.distributed.mesh  # before the processes are copied, so that none has to import it

CLONE_NEWNET = 0x40000000
COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def own_network() -> bool:
    """Go into a network namespace of this process's own; whether that was allowed."""
    if sys.platform != "linux" or ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        return False
    return subprocess.run(["ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0


def sent() -> tuple[int, int]:
    """Bytes and packets that loopback has sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    fields = line.split(":")[1].split()
    return int(fields[8]), int(fields[9])


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def replica(rank: int, count: int, port: int, exchanges: int, tell: int) -> None:
    """One replica: some exchanges; the first one tells time, bytes and packets of each."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    start = time.perf_counter()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(minutes=10))
    torch.manual_seed(rank)
    coupling = wideflat.ReplicaCoupling(
        network(), mesh=init_device_mesh("cpu", (count,), mesh_dim_names=("replica",)), period=1, gamma=0.1
    )
    for p in coupling.group.members[0]:
        p.grad = torch.zeros_like(p)
    coupling.couple()  # looks at the replicas once
    dist.barrier()
    set_up = time.perf_counter() - start
    times = []
    before = sent()
    for _ in range(exchanges):
        start = time.perf_counter()
        coupling.couple()
        times.append(time.perf_counter() - start)
    dist.barrier()
    after = sent()
    if rank == 0:
        per = [(b - a) / exchanges / count for a, b in zip(before, after, strict=True)]
        os.write(tell, f"{set_up} {statistics.median(times)} {per[0]} {per[1]}".encode())
        time.sleep(0.2)
    os._exit(0)


def measure(count: int, exchanges: int) -> tuple[float, float, float, float]:
    """Seconds of setting up, and of an exchange; bytes and packets of a replica in one."""
    port, (hear, tell) = free_port(), os.pipe()
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            try:
                replica(rank, count, port, exchanges, tell)
            except BaseException as error:
                os.write(2, f"replica {rank}: {error}\n".encode())
            os._exit(1)
        children.append(child)
    os.close(tell)
    told = os.read(hear, 1000)
    os.close(hear)
    for child in children:
        os.waitpid(child, 0)
    set_up, seconds, content, packets = map(float, told.split())
    return set_up, seconds, content, packets


def fitted(y: np.ndarray, values: np.ndarray, terms: Callable[[np.ndarray], list[np.ndarray]]) -> tuple:
    """Constants of a model that is linear in them, by relative errors; and a function that gives value and error."""
    design = np.stack(terms(y), axis=1) / values[:, None]
    constants, *_ = np.linalg.lstsq(design, np.ones(len(y)), rcond=None)
    residual = design @ constants - 1
    variance = residual @ residual / max(len(y) - len(constants), 1)
    covariance = variance * np.linalg.pinv(design.T @ design)

    def predict(count: float) -> tuple[float, float]:
        row = np.array([float(np.asarray(term).ravel()[0]) for term in terms(np.array([count], float))])
        return float(row @ constants), float(np.sqrt(row @ covariance @ row))

    return constants, predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=64)
    parser.add_argument("--exchanges", type=int, default=10)
    arguments = parser.parse_args()
    print(describe())
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # imports what is imported late
    own = own_network()
    print("in a network namespace of its own" if own else "not in a namespace: bytes and packets are those of all")
    n = 4 * sum(p.numel() for p in network().parameters())
    counts = [count for count in COUNTS if count <= arguments.most]
    print(f"{n} bytes of weights, {arguments.exchanges} exchanges each\n")
    print("replicas  set-up s  exchange ms  bytes/replica  packets/replica")
    rows = []
    for count in counts:
        rows.append(measure(count, arguments.exchanges))
        set_up, seconds, content, packets = rows[-1]
        print(f"{count:8d}  {set_up:8.2f}  {1e3 * seconds:11.2f}  {content:13.0f}  {packets:15.1f}", flush=True)
    y, table = np.array(counts, float), np.array(rows)
    models: dict[str, tuple[int, float, Callable[[np.ndarray], list[np.ndarray]]]] = {
        "set-up, s": (0, 1, lambda y: [np.ones_like(y), y, y**2]),
        "exchange, ms": (1, 1e3, lambda y: [np.ones_like(y), y, y**2]),
        "bytes": (2, 1, lambda y: [2 * (y - 1) / y, 2 * (y - 1)]),
        "packets": (3, 1, lambda y: [y - 1, np.ones_like(y)]),
    }
    print(
        f"\nper replica       constants                            of {counts[-1]}: said, found      at 1,000 (error)"
    )
    for name, (column, unit, terms) in models.items():
        values = unit * table[:, column]
        constants, predict = fitted(y, values, terms)
        said, _ = fitted(y[:-1], values[:-1], terms)[1](y[-1])
        far, error = predict(1000.0)
        words = ", ".join(f"{c:.3g}" for c in constants)
        print(f"{name:14s}  {words:38s}  {said:10.4g}, {values[-1]:9.4g}   {far:10.4g} ({error:.2g})")


if __name__ == "__main__":
    main()
