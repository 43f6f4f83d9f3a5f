"""Threads of gloo are joined, or at rest, when the interpreter ends: one that is not aborts the process."""

import os
import subprocess
import sys

import pytest

import wideflat.distributed.threads as threads

SCRIPT = """
import atexit, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

def end():  # registered first, so called last
    print("threads of gloo:", sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm")))
    print("waited:", time.sleep is not sleep)

atexit.register(end)
sleep = time.sleep
from wideflat.distributed.mesh import MeshReplicas

def work():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("replica",))
    model = torch.nn.Linear(2, 2)
    torch.optim.SGD(model.parameters(), lr=0.1)  # imports functions that would hold the group
    replicas = MeshReplicas(model, mesh["replica"])
    replicas.itself = replicas  # a cycle
    replicas.distances()
    dist.destroy_process_group()
    return mesh

def waiting(seconds):
    time.sleep = None
    sleep(seconds)

import wideflat.distributed.threads as threads
threads.time = type("time", (), {"sleep": staticmethod(waiting)})
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="the system does not tell what threads there are")
@pytest.mark.parametrize(("end", "held"), [("work()", False), ("mesh = work()", True)])
def test_the_interpreter_does_not_end_under_a_thread(end, held):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    printed = dict(line.split(": ") for line in done.stdout.splitlines())
    assert (int(printed["threads of gloo"]) > 0) == held
    assert printed["waited"] == str(held)


@pytest.mark.parametrize(("states", "looks"), [("", 0), ("S", 1), ("RRDS", 4), ("R" * 100, threads.LOOKS)])
def test_threads_are_waited_for_until_they_are_at_rest(tmp_path, monkeypatch, states, looks):
    seen = []

    def task(number, name, state):
        (tmp_path / number).mkdir(exist_ok=True)
        (tmp_path / number / "comm").write_text(f"{name}\n")
        (tmp_path / number / "stat").write_text(f"{number} ({name} (1)) {state} 1 2 3\n")

    def later(seconds):
        seen.append(seconds)
        task("8", "pt_gloo", states[min(len(seen), len(states)) - 1])

    task("7", "python", "R")
    if states:
        task("8", "pt_gloo", "R")
    monkeypatch.setattr(threads, "TASKS", tmp_path)
    monkeypatch.setattr(threads.time, "sleep", later)
    threads._before_the_interpreter_ends()
    assert len(seen) == looks
