"""Replicas are killed and come back, on real images; training goes on. See also docs/clusters.md for the table."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("wideflat.distributed.elastic", reason="needs torchft: pip install 'wideflat[distributed]'")

import wideflat
from wideflat.distributed.elastic import ElasticReplicas, start_lighthouse
from wideflat.files import atomic_write

#: torchft says "warn" to its logger when it tries again, which a slow machine makes it do.
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")

JOB = Path(__file__).with_name("replica_job.py")

#: Seconds of silence after which a replica counts as dead.
HEARTBEAT = 1.5


class Cluster:
    """Jobs of this test; all are killed at its end."""

    def __init__(self, folder, steps, stops=(), num_replicas=3, seed=0, start_from="barycenter"):
        self.folder, self.steps, self.num_replicas = folder, steps, num_replicas
        self.more = [str(seed), start_from]
        self.lighthouse = start_lighthouse("127.0.0.1:0", heartbeat_timeout=HEARTBEAT, join_timeout=10.0)
        port = self.lighthouse.address().rsplit(":", 1)[1]
        self.address = f"http://127.0.0.1:{port}"
        self.jobs = {}
        for index, step in dict(stops).items():
            self.stop_at(index, step)

    def __enter__(self):
        for index in range(self.num_replicas):
            self.start(index)
        return self

    def __exit__(self, *_):
        for job in self.jobs.values():
            job.kill()
            job.wait()
        self.lighthouse.shutdown()

    def start(self, index):
        arguments = [index, self.num_replicas, self.address, self.steps, self.folder, *self.more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with open(self.folder / f"errors-{index}", "a") as errors:
            self.jobs[index] = subprocess.Popen(
                [sys.executable, str(JOB), *map(str, arguments)], env=environment, stdout=errors, stderr=errors
            )

    def step(self, index):
        path = self.folder / f"step-{index}"
        text = path.read_text() if path.exists() else ""
        return int(text or -1)

    def wait_until(self, index, reached, what, timeout=120.0):
        deadline = time.monotonic() + timeout
        while not reached():
            assert self.jobs[index].poll() is None, self.report(index)
            assert time.monotonic() < deadline, f"replica {index} did not {what}: {self.report(index)}"
            time.sleep(0.005)

    def wait_for_step(self, index, step):
        self.wait_until(index, lambda: self.step(index) >= step, f"reach step {step}")

    def wait_for_log(self, index, text):
        self.wait_until(index, lambda: text in self.log(index), f"say {text!r}")

    def stop_at(self, index, step):
        """Let a replica wait before this step, which it has not reached yet, until it is killed or may go on."""
        with atomic_write(self.folder / f"stop-{index}") as file:
            file.write(str(step))

    def go_on(self, index):
        (self.folder / f"stop-{index}").unlink()

    def kill(self, index):
        self.jobs[index].send_signal(signal.SIGKILL)
        self.jobs[index].wait()
        (self.folder / f"step-{index}").unlink(missing_ok=True)

    def log(self, index):
        path = self.folder / f"replica-{index}.log"
        return path.read_text() if path.exists() else ""

    def report(self, index):
        return self.log(index) + (self.folder / f"errors-{index}").read_text()[-3000:]

    def results(self, indices, timeout=180.0):
        deadline = time.monotonic() + timeout
        found = {}
        for index in indices:
            self.jobs[index].wait(timeout=max(deadline - time.monotonic(), 0.1))
            assert self.jobs[index].returncode == 0, self.report(index)
            found[index] = json.loads((self.folder / f"result-{index}.json").read_text())
        return found


def disturbed(folder, steps, seed, start_from="barycenter", noticed=True):
    """Kill one replica at a random step, let it come back, then kill another one; returns what the others report.

    The others meet without the first one before it comes back, or, not ``noticed``, wait with their next meeting until
    it is there again. Who is to be killed stops first, so that nothing hangs on who is faster.
    """
    chance = random.Random(seed)
    first, second, third = chance.sample(range(3), 3)
    when = chance.randrange(steps // 10, steps // 4)
    stop = [first] if noticed else [first, second, third]
    with Cluster(folder, steps, dict.fromkeys(stop, when), seed=seed, start_from=start_from) as cluster:
        for index in stop:
            cluster.wait_for_step(index, when)
        (folder / "slowly").touch()
        cluster.kill(first)
        if noticed:
            cluster.wait_for_log(third, f"replica {first} has gone")
        before = cluster.log(first).count("starts")
        cluster.start(first)
        cluster.wait_until(first, lambda: cluster.log(first).count("starts") > before, "start")
        for index in stop:
            cluster.go_on(index)
        cluster.wait_for_log(first, "(came back)")
        joined = int(re.search(r"joined at step (\d+) \(came back\)", cluster.log(first))[1])
        later = chance.randrange(min(joined + 20, steps - 30), max(joined + 50, steps - 20))
        cluster.stop_at(second, later)
        (folder / "slowly").unlink()
        cluster.wait_for_step(second, later)
        cluster.kill(second)
        results = cluster.results([first, third])
        logs = {index: cluster.log(index) for index in (first, third)}
    return (first, when, joined), (second, later), third, results, logs


def check(steps, back, gone, third, results, logs, noticed=True):
    (first, _, joined), (second, _) = back, gone
    assert joined % 10 == 0 and joined > 0  # it came in at a meeting, where the others were
    for result in results.values():
        assert result["steps"] == steps
        assert sorted(result["alive"]) == sorted([first, third])
    assert results[third]["done"] == steps and not results[third]["came_back"]
    assert results[first]["came_back"] and results[first]["done"] == steps - joined
    assert results[first]["checksum"] == results[third]["checksum"]  # both end with the same barycenter
    assert results[first]["gamma"] == results[third]["gamma"]
    if noticed:
        assert f"replica {first} has gone; 2 of 3" in logs[third]
        assert f"replica {first} has come (back); 3 of 3" in logs[third]
    else:
        assert f"replica {first} was lost and has come back since the last meeting; 3 of 3" in logs[third]
    assert f"replica {second} has gone; 2 of 3" in logs[third]
    assert f"replica {second} has gone; 2 of 3" in logs[first]


@pytest.mark.parametrize("noticed", [True, False], ids=["missed", "back before the next meeting"])
def test_a_replica_is_killed_comes_back_and_another_is_killed(tmp_path, noticed):
    steps = 400
    outcome = disturbed(tmp_path, steps, seed=0, noticed=noticed)
    check(steps, *outcome, noticed=noticed)
    assert all(result["test_error"] < 0.08 for result in outcome[3].values())


#: Three standard deviations of the error that 677 test images can show at an error of 5 %.
NOISE = 0.025


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_schedule(tmp_path, capsys, seed):
    steps = 600
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    with Cluster(tmp_path / "undisturbed", steps, seed=seed) as cluster:
        undisturbed = cluster.results(range(3))
    assert all(result["steps"] == result["done"] == steps for result in undisturbed.values())
    outcome = disturbed(tmp_path / "disturbed", steps, seed, "replica" if seed == 9 else "barycenter")
    check(steps, *outcome)
    (first, when, joined), (second, later), third, results, _ = outcome
    error, expected = results[third]["test_error"], undisturbed[0]["test_error"]
    longest = max(result["longest_wait"] for result in results.values())
    with capsys.disabled():
        print(
            f"\n| {seed} | {first} at {when}, back at {joined} | {second} at {later} | {results[third]['steps']} | "
            f"{longest:.2f} s | {100 * error:.1f} % | {100 * expected:.1f} % |"
        )
    assert abs(error - expected) < NOISE


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="torchft_lighthouse --min_replicas 1"):
        ElasticReplicas(nn.Linear(1, 1), index=0, num_replicas=2)
    with pytest.raises(ValueError, match="index must be at least 0 and below num_replicas = 2, got 2"):
        ElasticReplicas(nn.Linear(1, 1), index=2, num_replicas=2)
    with pytest.raises(ValueError, match="start_from"):
        ElasticReplicas(nn.Linear(1, 1), index=0, num_replicas=2, start_from="nothing")


@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # by torchft, in this process
def started_again(address):
    """A lighthouse at the address of one that has ended, as soon as the system gives the port back."""
    give_up = time.monotonic() + 30
    while True:
        try:
            return start_lighthouse(address, heartbeat_timeout=1.0)
        except RuntimeError as error:
            if "in use" not in str(error) or time.monotonic() > give_up:
                raise
            time.sleep(0.2)


@pytest.mark.parametrize("has_float64", [True, False])
def test_one_replica_alone_trains_as_without_others(monkeypatch, has_float64):
    monkeypatch.setattr("wideflat.kernels.float64.WITHOUT", {"mps"} if has_float64 else {"mps", "cpu"})
    monkeypatch.setattr("wideflat.distributed.elastic.WAITS", 2)
    sent = set()
    lighthouse = start_lighthouse("127.0.0.1:0", heartbeat_timeout=1.0)
    model = nn.Linear(2, 1)
    said = []
    try:
        address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
        with ElasticReplicas(
            model,
            index=1,
            num_replicas=2,
            lighthouse=address,
            start_timeout=0.0,
            patience=40.0,
            host="127.0.0.1",
            say=said.append,
        ) as group:
            coupling = wideflat.ReplicaCoupling(group, period=1, gamma=1.0)
            with pytest.raises(RuntimeError, match=r"call join\(\)"):
                coupling.couple()
            assert group.join() is False  # it does not wait: start_timeout is 0
            assert said == ["replica 1 is with [1]; 1 of 2 are alive"]
            model(torch.ones(3, 2)).sum().backward()
            expected = [p.grad.clone() for p in model.parameters()]
            assert coupling.couple()
            for p, gradient in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, gradient)
            assert coupling.distances().tolist() == [0.0]
            monkeypatch.setattr(group, "_sum", lambda tensors: sent.update(t.dtype for t in tensors))
            third = torch.tensor([1 / 3], dtype=torch.float64)
            assert group.total(third) == third[0] and (torch.float64 in sent) == has_float64
            monkeypatch.undo()
            with pytest.raises(ValueError, match="coincide"):
                coupling.initial_gamma([1.0])
            before = model.weight.clone()
            assert torch.equal(coupling.barycenter().weight, before)
            assert group.exchanges > 2 == len(group.waits)  # a long training does not fill the memory with them

            # The lighthouse dies and is started again at the same address.
            lighthouse.shutdown()
            lighthouse = started_again(address.removeprefix("http://"))
            assert coupling.couple()
            assert group.alive == [1]
    finally:
        lighthouse.shutdown()
