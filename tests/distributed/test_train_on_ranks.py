"""``wideflat train`` on ranks is ``wideflat train`` in one process: step by step, on disk, resumed either way."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from torch.distributed.device_mesh import init_device_mesh

from wideflat.runs import Run
from wideflat.train import Training, train
from wideflat.train_on_ranks import RankTraining, supervise

JOB = Path(__file__).with_name("training_job.py")
spec = importlib.util.spec_from_file_location("training_job", JOB)
job = importlib.util.module_from_spec(spec)
spec.loader.exec_module(job)


def flat(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])[::97].clone()


def train_rank(algorithm, resume):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replica",))

    def make():
        return RankTraining(job.experiment(algorithm), job.images(), job.options(), torch.device("cpu"), mesh)

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


@pytest.mark.parametrize("algorithm", ["rsgd", "parle"])
def test_ranks_train_as_one_process_does(ranks, algorithm):
    training = Training(job.experiment(algorithm), job.images(), job.options())
    steps, rows = [], []
    while training.step < training.total_steps:
        training.iterate()
        steps.append([flat(network).numpy() for network in training.learner.networks])
        if training.at_epoch_end:
            rows.append(training.close_epoch())
    for a, (mine, own_rows) in enumerate(ranks(train_rank, 2, algorithm, 4)):
        assert len(mine) == len(steps)
        for t, weights in enumerate(mine):
            np.testing.assert_allclose(weights, steps[t][a], rtol=1e-5, atol=1e-6, err_msg=f"replica {a} step {t}")
        for own, row in zip(own_rows, rows, strict=True):
            assert own.keys() == row.keys()
            for name, value in row.items():
                assert own[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def refuse_other_algorithms():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replica",))
    try:
        RankTraining(job.experiment("esgd", num_replicas=1), job.images(), job.options(), torch.device("cpu"), mesh)
    except ValueError as error:
        return str(error)


def test_algorithms_without_replicas_are_refused(ranks):
    assert all("esgd trains one network" in message for message in ranks(refuse_other_algorithms, 2))


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
        output, _ = process.communicate(timeout=120)
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


@pytest.mark.slow
def test_jobs_that_die_are_started_again(tmp_path):
    pytest.importorskip("wideflat.fault_tolerance", reason="needs torchft: pip install 'wideflat[distributed]'")
    said = []
    killed = []
    environment_before = dict(os.environ)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def say(message):
        said.append(message)

    def command(index, lighthouse):
        if index == 1 and not killed:  # kills itself after a while: a wrapper that sends SIGKILL
            killed.append(True)
            code = (
                "import os, signal, threading, runpy, sys, pathlib\n"
                f"path = pathlib.Path({str(tmp_path)!r}) / 'replica-1' / 'metrics.jsonl'\n"
                "def watch():\n"
                "    import time\n"
                "    while not path.exists() or len(path.read_text().splitlines()) < 3: time.sleep(0.02)\n"
                "    os.kill(os.getpid(), signal.SIGKILL)\n"
                "threading.Thread(target=watch, daemon=True).start()\n"
                f"sys.argv = [{str(JOB)!r}, {str(tmp_path)!r}, '1', {lighthouse!r}]\n"
                f"runpy.run_path({str(JOB)!r}, run_name='__main__')\n"
            )
            return [sys.executable, "-c", code]
        return [sys.executable, str(JOB), str(tmp_path), str(index), lighthouse]

    try:
        start = time.monotonic()
        assert supervise(command, 2, say=say) == 0
        assert time.monotonic() - start < 150
    finally:
        os.environ.clear()
        os.environ.update(environment_before)
    assert said == ["replica 1 has died (signal 9) and is started again"]
    results = [Run.open(tmp_path / f"replica-{a}").result() for a in (0, 1)]
    assert results[0]["epoch"] == results[1]["epoch"] == 40
    assert results[0]["test_error"] == results[1]["test_error"] < 0.5
    events = [line["event"] for line in Run.open(tmp_path / "replica-0").metrics("events")]
    assert any("replica 1 has gone" in event for event in events)
    alive = [row["alive"] for row in Run.open(tmp_path / "replica-0").metrics()]
    assert [0] in alive and alive[0] == [0, 1]
    json.dumps(results)
