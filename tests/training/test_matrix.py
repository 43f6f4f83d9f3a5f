"""Every algorithm x {plain, float16, bfloat16, resumed, two ranks, jobs that come and go} on one tiny network.

One process in float32 is the reference: half precision stays within its rounding of it, ranks and jobs equal it up to
the order of sums, a resumed training equals it bit for bit. What does not exist is refused with the reason.
"""

import copy
import dataclasses
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from wideflat.algorithms import ALGORITHMS
from wideflat.data import ImageData, ImageSplit
from wideflat.presets import preset
from wideflat.training import Options, Run, Training, train_in
from wideflat.training.elastic import Elastic
from wideflat.training.ranks import Ranks
from wideflat.training.state_files import load_state, save_state

ELASTIC = [name for name, algorithm in ALGORITHMS.items() if algorithm.elastic]


def images(count=24):
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(count) % 10
    pixels = torch.randint(60, (count, 3, 16, 16), generator=generator)
    pixels[torch.arange(count), targets % 3, targets] += 150  # something to learn
    part = ImageSplit(pixels.to(torch.uint8), targets)
    return ImageData.of("stripes", tuple("0123456789"), part, part)


def cell(name, **changes):
    """Two epochs of three mini-batches (times L = 2); two replicas, coupled at every second iteration."""
    algorithm = ALGORITHMS[name]
    settings = {"batch_size": 8, "image_size": 16, "padding": 2, "period": 2}
    settings |= {"num_replicas": 2} if algorithm.replicated else {}
    settings |= {"inner_steps": 2} if algorithm.inner else {}
    return dataclasses.replace(preset("cifar10-smallconvnet", name), **settings, **changes).with_epochs(2)


def options(amp="off"):
    return Options(seed=3, channels_last=False, amp=amp)


def flat(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()]).clone()


def trained(name, amp="off", make=Training, scale=None, **more):
    """A whole training, and the center it began with."""
    training = make(cell(name), images(), options(amp), **more)
    if scale is not None and amp == "fp16":
        training.precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    start = flat(training.learner.center())
    while training.step < training.total_steps:
        assert torch.isfinite(training.iterate())
    return training, start


# --------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(("amp", "rounding"), [("fp16", 0.1), ("bf16", 0.2)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_half_precision_moves_as_far_as_single_precision(name, amp, rounding):
    (exact, start), (half, _) = trained(name), trained(name, amp, scale=1024.0)  # a scale at which nothing overflows
    way, error = flat(exact.learner.center()) - start, flat(half.learner.center()) - flat(exact.learner.center())
    assert torch.isfinite(error).all() and error.norm() > 0  # it was another arithmetic
    assert error.norm() < rounding * way.norm()


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if algorithm.gammas])
def test_the_automatic_gamma0_of_half_precision_is_that_of_single_precision(name):
    auto = {gamma.prefix + "gamma0": None for gamma in ALGORITHMS[name].gammas}
    auto |= {gamma.prefix + "focusing": "exponential" for gamma in ALGORITHMS[name].gammas}
    exact, half = (Training(cell(name, **auto), images(), options(amp)) for amp in ("off", "fp16"))
    for ours, expected in zip(half.learner.focusing, exact.learner.focusing, strict=True):
        assert ours.gamma0 == pytest.approx(expected.gamma0, rel=0.01)
        assert expected.gamma0[0] > 0


def what_moves(learner):
    """Weights, and the state of optimizers and coupling: all that an iteration changes, but for batch norm."""
    weights = [flat(network) for network in learner.networks]
    states = [optimizer.state_dict() for optimizer in learner.optimizers]
    return copy.deepcopy((weights, states, learner.coupling and learner.coupling.state_dict()))


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_overflow_leaves_out_the_iteration_and_nothing_else(name):
    """In the second iteration, in the middle of a cycle, the scale is too large; the third one is taken."""
    training = Training(cell(name), images(), options("fp16"))
    training.iterate()
    training.learner.set_rates(training.tau)
    scale = training.precision.state_dict()["scale"]
    training.precision.scaler.update(2.0**100)
    before, gammas = what_moves(training.learner), [focusing.tau for focusing in training.learner.focusing]
    assert torch.isfinite(training.iterate())
    for state in before[1]:
        for group in state["param_groups"]:
            group["gamma"] = None
    after = what_moves(training.learner)
    for state in after[1]:
        for group in state["param_groups"]:
            group["gamma"] = None  # schedules go on
    if before[2]:
        before[2]["gamma"] = after[2]["gamma"] = None
    assert equal(before, after)
    assert [focusing.tau for focusing in training.learner.focusing] == [tau + 1 for tau in gammas]
    assert training.precision.state_dict()["scale"] == 2.0**99
    training.precision.scaler.update(scale)
    training.iterate()
    assert training.step == 3
    assert all(not torch.equal(a, flat(b)) for a, b in zip(before[0], training.learner.networks, strict=True))


# ------------------------------------------------------------------------------------------------------------ resumed


@pytest.mark.parametrize("amp", ["off", "fp16"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_resumed_in_the_midst_of_a_cycle_it_is_the_same_bit_for_bit(name, amp, tmp_path):
    whole, _ = trained(name, amp)
    first = Training(cell(name), images(), options(amp))
    for _ in range(5):
        first.iterate()
    save_state(tmp_path / "state", first.state_dict())
    training = Training(cell(name), images(), options(amp), saved=load_state(tmp_path / "state"))
    while training.step < training.total_steps:
        training.iterate()
    assert equal(training.state_dict(), whole.state_dict())
    assert torch.equal(flat(training.center()), flat(whole.center()))


# -------------------------------------------------------------------------------------------------------------- ranks


class DoubleTraining(Training):
    """In float64, so that the order of sums does not matter and everything else does."""

    def _network(self, a):
        return super()._network(a).double()

    def _to_format(self, x, y):
        return x.double(), y


def overflown_on_one_rank(name, company):
    """Whether the weights stay where they are, and what becomes of the scale."""
    training = Training(cell(name), images(), options("fp16"), company=company)
    training.iterate()
    weights, scale = flat(training.learner.networks[0]), training.precision.state_dict()["scale"]
    backward = training.precision.backward

    def overflow(loss):
        backward(loss)
        next(training.learner.networks[0].parameters()).grad.fill_(torch.inf)

    if dist.get_rank() == 1:
        training.precision.backward = overflow
    training.iterate()
    left_out = torch.equal(weights, flat(training.learner.networks[0]))
    return left_out, training.precision.state_dict()["scale"] / scale


def train_all_on_ranks():
    """Every algorithm in turn: its replicas on two ranks, or one network whose mini-batches they divide."""
    results = {}
    for name in ALGORITHMS:
        shape = (2, 1) if ALGORITHMS[name].replicated else (1, 2)
        company = Ranks(init_device_mesh("cpu", shape, mesh_dim_names=("replica", "dp")))
        training, _ = trained(name, make=DoubleTraining, company=company)
        results[name] = flat(training.learner.center()), training.close_epoch()
        results[name] += overflown_on_one_rank(name, company)
    return results


def test_two_ranks_train_as_one_process_does_and_leave_out_the_same_steps(ranks):
    both = ranks(train_all_on_ranks, 2, timeout=300.0)
    for name in ALGORITHMS:
        expected, _ = trained(name, make=DoubleTraining)
        expected_row = expected.close_epoch()
        for center, row, left_out, scale in (found[name] for found in both):
            np.testing.assert_allclose(center, flat(expected.learner.center()), 1e-7, 1e-9, err_msg=name)
            for key, value in expected_row.items():
                assert row[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, key)
            assert left_out and scale == 0.5, name


# ----------------------------------------------------------------------------------------------- jobs that come and go


def train_as_job(lighthouse, out):
    """One replica of every algorithm that can lose some, in the loop, and what its center is."""
    results = {}
    for name in ELASTIC:
        with Elastic(dist.get_rank(), lighthouse, "127.0.0.1") as company:
            settings = dataclasses.replace(options(), evaluate_every=2)
            run = train_in(company, cell(name), f"{out}/{name}", images(), settings, snapshots=[0, 1], progress=False)
        results[name] = flat(run.load_model())
    return results


def test_jobs_train_as_one_process_does_and_leave_a_whole_run(ranks, tmp_path, monkeypatch, capsys):
    elastic = pytest.importorskip("wideflat.distributed.elastic", reason="needs torchft")
    from wideflat.cli import main

    server = elastic.start_lighthouse("127.0.0.1:0")
    try:
        address = f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
        found = ranks(train_as_job, 2, address, str(tmp_path), timeout=300.0)
    finally:
        server.shutdown()
    monkeypatch.setattr("wideflat.training.flatness.load", lambda *_, **__: images())
    for name in ELASTIC:
        expected, _ = trained(name)
        for center in found:
            np.testing.assert_allclose(center[name], flat(expected.learner.center()), 1e-4, 1e-5, err_msg=name)
        for a in (0, 1):
            run = Run.open(tmp_path / name / f"replica-{a}")
            assert ["test_error" in row for row in run.metrics()] == [False, True]
            assert [row["alive"] for row in run.metrics()] == [[0, 1], [0, 1]]
            assert len(run.metrics("timing")) == 2 and list(run.snapshots()) == [0, 1]
            assert list((run.path / "tensorboard").glob("events.*"))
        assert Run.open(tmp_path / name).path == tmp_path / name / "replica-0"
        assert main(["local-energy", str(tmp_path / name), "--sigmas", "0", "0.3", "--max-passes", "1"]) == 0
        assert (tmp_path / name / "local_energy.json").exists() and "0.3" in capsys.readouterr().out


def train_until(lighthouse, out, stops):
    """A job that is asked to stop before some iteration, if any; its process ends with it."""
    original, stop = Training.iterate, stops[dist.get_rank()]

    def iterate(training):
        if training.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(training)

    Training.iterate = iterate
    with Elastic(dist.get_rank(), lighthouse, "127.0.0.1") as company:
        run = train_in(company, cell("rsgd"), out, images(), options(), progress=False, tensorboard=False)
    return flat(run.load_model()), [row["event"] for row in run.metrics("events")]


def test_jobs_that_were_stopped_at_different_moments_go_on_together(ranks, tmp_path):
    """The second has met nobody once after the first had gone: it hands on its counters before it has begun again."""
    elastic = pytest.importorskip("wideflat.distributed.elastic", reason="needs torchft")
    server = elastic.start_lighthouse("127.0.0.1:0", heartbeat_timeout=5.0, join_timeout=60.0)
    try:
        job = (train_until, 2, f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}", str(tmp_path))
        for kind, message in ranks(*job, (2, 4), errors=True):
            assert kind == "Interrupted" and "is saved" in message
        (first, told), (second, _) = ranks(*job, (None, None))
    finally:
        server.shutdown()
    np.testing.assert_array_equal(first, second)  # the barycenter of both
    assert any("joined the others at epoch" in event for event in told)


def diverge_as_job(lighthouse, out):
    with Elastic(0, lighthouse, "127.0.0.1", start_timeout=0.0) as company:
        train_in(company, cell("rsgd", lr=1e12), out, images(), options(), progress=False, tensorboard=False)


def test_a_job_that_diverges_says_so_and_records_it(ranks, tmp_path):
    elastic = pytest.importorskip("wideflat.distributed.elastic", reason="needs torchft")
    server = elastic.start_lighthouse("127.0.0.1:0")
    try:
        address = f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
        ((kind, message),) = ranks(diverge_as_job, 1, address, str(tmp_path), errors=True)
    finally:
        server.shutdown()
    assert kind == "Diverged" and "stopped because" in message
    assert Run.open(tmp_path).metrics("events")[-1]["event"] == message


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ELASTIC])
def test_what_cannot_lose_replicas_is_refused_with_the_reason(name, tmp_path):
    reason = "has more state than its replicas" if ALGORITHMS[name].replicated else "trains one network"
    with pytest.raises(ValueError, match=f"is for rsgd and rsgdxy, not for {name}, which {reason}"):
        train_in(Elastic(0), cell(name), tmp_path / "run", images())
    assert not (tmp_path / "run").exists()


def set_up_late(lighthouse, out):
    """Two are still being set up, and choose gamma0 together, when the third one comes; all train until it is in."""
    rank, begin = dist.get_rank(), Training.begin
    begun, coming, joined, told = Path(out) / "begun", Path(out) / "coming", Path(out) / "joined", []

    def say(line):
        told.append(line)
        if rank == 2 and "joined the others" in line:
            joined.touch()

    def slowly(training):
        begun.touch()
        while not coming.exists():
            time.sleep(0.02)
        time.sleep(2.0)
        return begin(training)

    Training.begin = slowly
    dist.barrier()  # the time to wait for each other begins when all are there
    while rank == 2 and not begun.exists():
        time.sleep(0.02)
    if rank == 2:
        coming.touch()
    with Elastic(rank, lighthouse, "127.0.0.1", start_timeout=8.0) as company:
        how = {"progress": False, "tensorboard": False, "say": say, "until": lambda row: joined.exists()}
        long = dataclasses.replace(cell("rsgd", gamma0=None), num_replicas=3).with_epochs(100_000)
        run = train_in(company, long, out, images(), dataclasses.replace(options(), evaluate_every=40), **how)
    return bool(run.result()), told


def test_a_replica_that_comes_while_the_others_are_set_up_waits(ranks, tmp_path):
    elastic = pytest.importorskip("wideflat.distributed.elastic", reason="needs torchft")
    server = elastic.start_lighthouse("127.0.0.1:0", heartbeat_timeout=5.0, join_timeout=20.0)
    try:
        address = f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
        found = ranks(set_up_late, 3, address, str(tmp_path), timeout=280.0)
    finally:
        server.shutdown()
    assert [finished for finished, _ in found] == [True] * 3
    assert any("joined the others" in line for line in found[2][1]), found[2][1]  # mostly after having waited
