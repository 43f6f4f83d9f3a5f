"""``wideflat train`` on ranks is ``wideflat train`` in one process: step by step, on disk, resumed either way."""

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from torch.distributed.device_mesh import init_device_mesh

from wideflat.training import Run, Training, train, train_in
from wideflat.training.ranks import Ranks

JOB = Path(__file__).with_name("training_job.py")
spec = importlib.util.spec_from_file_location("training_job", JOB)
job = importlib.util.module_from_spec(spec)
spec.loader.exec_module(job)


def flat(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])[::97].clone()


class DoubleTraining(Training):
    """A training in float64, so that the order of sums does not matter and everything else does."""

    def _network(self, a):
        return super()._network(a).double()

    def _to_format(self, x, y):
        return x.double(), y


def train_rank(algorithm, resume, changes):
    experiment = job.experiment(algorithm, **changes)
    shape = experiment.num_replicas, dist.get_world_size() // experiment.num_replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "dp"))

    def make():
        return DoubleTraining(experiment, job.images(), job.options(), company=Ranks(mesh))

    training = make()
    steps, rows = [], []
    while training.step < training.total_steps:
        training.iterate()
        steps.append(flat(training.learner.networks[0]))
        if training.at_epoch_end:
            rows.append(training.close_epoch())
        if training.step == resume:  # a new training takes over, in the midst of an epoch
            state = training.state_dict()
            training = make()
            training.load_state_dict(state)
    return steps, rows


#: A residual network with batch norm; 96 images in batches of 31 leave a last one of 3.
BATCH_NORM = {
    "model": "wideflat.experiments.cells:quick_network",
    "model_arguments": (("in_channels", 3),),
    "batch_size": 31,
}


@pytest.mark.filterwarnings("ignore:lr = .* is the outer rate of EntropySGD")
@pytest.mark.parametrize(
    ("algorithm", "world_size", "changes"),
    [
        ("rsgd", 2, {}),
        ("rsgd", 2, {"coupling": "proximal"}),
        ("rsgd", 2, {"start": "fork", "fork_passes": 1, "gamma0": 0.1, "gamma_clock": "epoch"}),
        ("parle", 2, {}),
        ("rsgd", 4, {}),  # 2 replicas of 2 ranks each
        ("rsgd", 4, BATCH_NORM),
        ("esgd", 2, {"num_replicas": 1, "gamma0": 0.5}),  # data parallel
        ("sam", 4, {"num_replicas": 1, **BATCH_NORM}),  # of the last batch one rank has nothing
    ],
)
def test_ranks_train_as_one_process_does(ranks, algorithm, world_size, changes):
    per_replica = world_size // changes.get("num_replicas", 2)
    training = DoubleTraining(job.experiment(algorithm, **changes), job.images(), job.options())
    steps, rows = [], []
    while training.step < training.total_steps:
        training.iterate()
        steps.append([flat(network).numpy() for network in training.learner.networks])
        if training.at_epoch_end:
            rows.append(training.close_epoch())
    for rank, (mine, own_rows) in enumerate(ranks(train_rank, world_size, algorithm, 4, changes)):
        a = rank // per_replica
        assert len(mine) == len(steps)
        assert np.isfinite(mine).all()
        for t, weights in enumerate(mine):
            np.testing.assert_allclose(weights, steps[t][a], 1e-7, 1e-9, err_msg=f"replica {a} step {t}")
        for own, row in zip(own_rows, rows, strict=True):
            assert own.keys() == row.keys()
            for name, value in row.items():
                assert own[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def gamma0_of_rank():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "dp"))
    experiment = job.experiment("esgd", num_replicas=1, gamma0=None)
    training = DoubleTraining(experiment, job.images(), job.options(), company=Ranks(mesh))
    return training.learner.focusing[0].gamma


@pytest.mark.filterwarnings("ignore:lr = .* is the outer rate of EntropySGD")
def test_the_automatic_gamma0_is_that_of_the_whole_mini_batches(ranks):
    training = DoubleTraining(job.experiment("esgd", num_replicas=1, gamma0=None), job.images(), job.options())
    assert ranks(gamma0_of_rank, 2) == pytest.approx([training.learner.focusing[0].gamma] * 2, rel=1e-9)


def noise_of_ranks():
    """What dropout would draw, and whether the weights of a replica are equal."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "dp"))
    experiment = job.experiment("sgd", num_replicas=1)
    training = Training(experiment, job.images(), job.options(), company=Ranks(mesh))
    training._seed_noise(0)
    noise = torch.rand(3)
    for _ in range(4):
        training.iterate()
    return noise, flat(training.learner.networks[0])


def test_ranks_of_a_replica_have_the_same_weights_and_their_own_noise(ranks):
    (noise, weights), (other_noise, other_weights) = ranks(noise_of_ranks, 2)
    assert (weights == other_weights).all() and (noise != other_noise).all()


def torchrun(*arguments, ranks=2, wait=True):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, *where, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if not wait:
        return process
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        _kill(process)
    return process.returncode, output


def _kill(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_torchrun_writes_the_same_run_and_goes_on_with_one_of_one_process(tmp_path):
    class Enough(Exception):
        pass

    def stop(training, row):
        if row["epoch"] == 2:
            raise Enough

    settings = (job.images(), job.options())
    alone = train(job.experiment("rsgd"), tmp_path / "alone", *settings, tensorboard=False, progress=False)
    with pytest.raises(Enough):
        train(job.experiment("rsgd"), tmp_path / "ranks", *settings, tensorboard=False, progress=False, on_epoch=stop)
    code, output = torchrun(JOB, tmp_path / "ranks")
    assert code == 0, output
    assert "resumed" in output and "on 2 ranks" in output and output.count("finished") == 1
    # A thread of gloo that lets go of a tensor while the interpreter ends aborts the process, one time in eight.
    assert output.count("threads at the end: 1") == 2 or not os.path.exists("/proc/self/task"), output
    together = Run.open(tmp_path / "ranks")
    for own, row in zip(together.metrics(), alone.metrics(), strict=True):
        for name, value in row.items():
            assert own[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "alone"))
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert together.result()["test_error"] == pytest.approx(alone.result()["test_error"])


def test_torchrun_with_another_number_of_ranks_is_refused(tmp_path):
    code, output = torchrun(JOB, tmp_path / "run", ranks=3)
    assert code != 0
    assert "--nproc-per-node 2" in output and "--num-replicas 3" in output


def end_early(out, how):
    """All replicas diverge, one alone does, or one rank alone is asked to stop, in the middle of an epoch."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "dp"))
    original, last = Training.iterate, dist.get_rank() == 1

    def iterate(training):
        if training.step == 4 and last and how == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        if training.step == 4 and last and how == "diverge":
            with torch.no_grad():
                next(training.learner.networks[0].parameters()).fill_(torch.nan)
        return original(training)

    Training.iterate = iterate
    preset = dataclasses.replace(job.experiment("rsgd"), batch_size=8, period=100)  # 12 steps an epoch, no coupling
    try:
        train_in(Ranks(mesh), preset, out, job.images(), job.options(), tensorboard=False, progress=False)
    finally:
        Training.iterate = original


@pytest.mark.parametrize(("how", "kind"), [("stop", "Interrupted"), ("diverge", "Diverged")])
def test_what_ends_one_rank_ends_all_and_is_recorded(ranks, tmp_path, how, kind):
    results = ranks(end_early, 2, str(tmp_path / "run"), how, errors=True)
    assert [found for found, _ in results] == [kind, kind]
    run = Run.open(tmp_path / "run")
    event = run.metrics("events")[-1]["event"]
    with run.locked():
        state = run.restore()
    if how == "stop":
        assert "stopped by SIGTERM at epoch 0.83 of 2" in event  # they agree at every tenth iteration
        assert state["step"] == 10
    else:
        assert "of replica 1 is not finite" in event or "the training loss is nan" in event
        assert state is None
