"""Settings of the whole test suite, and ranks: real processes with gloo between them on loopback, bounded in time."""

import multiprocessing
import os
import runpy
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

# A shell starts what runs in its background with Ctrl-C ignored; tests of interruptions, and their children, need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The suite runs one process a core; threads inside each would only fight. Read before torch starts its pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import torch
import torch.distributed as dist

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

#: What every rank needs, imported once in a process that all ranks are forked from.
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.hf_storage",
    "torch.nn.parallel",
    "wideflat",
    "wideflat.distributed.mesh",
]


class RankError(AssertionError):
    """A rank of a test raised or did not end; the message holds what every rank reported."""


@pytest.fixture
def ranks():
    """A function ``ranks(function, world_size, *arguments)``: calls the function on every rank and lists the results.

    The function lives at the top of a test module. With ``errors=True`` a rank's exception is its result, as the
    pair (name of the type, message). No rank lives longer than ``timeout`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)

    def run(function, world_size, *arguments, timeout=240.0, errors=False):
        # The store lives in this process, as it does in the agent of torchrun.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = []
        try:
            for rank, (_, sender) in enumerate(pipes):
                names = {
                    "file": function.__code__.co_filename,
                    "function": function.__name__,
                    "arguments": arguments,
                    "rank": rank,
                    "world_size": world_size,
                    "port": store.port,
                    "sender": sender,
                }
                script = str(Path(__file__).with_name("rank.py"))
                processes.append(
                    context.Process(target=runpy.run_path, args=(script, {"RUN": names}, "__rank__"), daemon=True)
                )
                processes[-1].start()
                sender.close()
            return _results([receiver for receiver, _ in pipes], time.monotonic() + timeout, errors)
        finally:
            for process in processes:
                process.kill()
                process.join()

    return run


def _results(receivers, deadline, errors):
    reports = {}
    while len(reports) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in reports]
        ready = wait(waiting, max(deadline - time.monotonic(), 0))
        if not ready:
            missing = [rank for rank in range(len(receivers)) if rank not in reports]
            raise RankError(f"ranks {missing} did not end in time; the others reported {reports}")
        for receiver in ready:
            try:
                reports[receivers.index(receiver)] = receiver.recv()
            except EOFError:
                reports[receivers.index(receiver)] = ("died", "", "")
    results = []
    for rank in range(len(receivers)):
        kind, value, _ = reports[rank]
        if kind == "returned":
            results.append(value)
        elif errors:
            results.append((kind, value))
        else:
            raise RankError("\n".join(f"rank {r}: {reports[r][0]} {reports[r][2]}" for r in range(len(receivers))))
    return results
