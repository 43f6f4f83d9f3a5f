"""Trainings in several processes: the same results as in one, none lost whatever happens to a process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from wideflat import cli
from wideflat.experiments import trainings
from wideflat.experiments.fig4 import ITEM as FIG4
from wideflat.experiments.fig6 import ITEM as FIG6
from wideflat.experiments.fig7 import ITEM as FIG7
from wideflat.experiments.table1 import ITEM as TABLE1
from wideflat.experiments.workers import Workers, slurm_parameters
from wideflat.training.runs import Run

SMALL = {"epochs": 2, "limit_data": 40, "seeds": 1, "algorithms": ("sgd", "esgd")}
#: Seconds of training, so that something can happen meanwhile.
LONGER = {"epochs": 40, "limit_data": 200, "seeds": 1, "algorithms": ("sgd", "rsgd")}
SGD, ESGD, RSGD = (f"quick-cifar10-smallconvnet-{name}-seed-0" for name in ("sgd", "esgd", "rsgd"))


def make(item, folder, options, **workers):
    """An experiment, workers if they are asked for, and their messages."""
    said: list[str] = []
    asked = Workers(**{"count": 2, "say": said.append, **workers}) if workers else None
    return item.open(folder, True, **options), asked, said


def runs_of(item):
    return item.work.trainings.folder


def journal(item, event="started"):
    lines = [json.loads(line) for line in (item.folder / "sweep" / "sweep.jsonl").read_text().splitlines()]
    return [line["task"] for line in lines if line["event"] == event]


def when(condition, then):
    """Do something from another thread as soon as a condition holds."""

    def watch():
        deadline = time.monotonic() + 60
        while not condition():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def has_metrics(item, *names):
    """Of two epochs: the state after the first one is on disk then."""
    paths = [runs_of(item) / name / "metrics.jsonl" for name in names]
    return lambda: all(path.exists() and path.read_text().count("\n") > 1 for path in paths)


def weights(item, name):
    return (runs_of(item) / name / "model.safetensors").read_bytes()


def test_several_processes_give_what_one_gives(tmp_path):
    """Trainings and measurements; bit for bit, since every process of the test suite has one thread."""
    options = {**SMALL, "rows": ("cifar10-smallconvnet",), "sigmas": (0.0, 0.5)}
    alone, workers, _ = make(FIG4, tmp_path / "alone", options)
    alone.compute(workers)
    several, workers, said = make(FIG4, tmp_path / "several", options, retries=0)
    several.compute(workers)
    assert journal(several) == [SGD, ESGD] and said == []  # in the order of the item
    assert weights(several, SGD) == weights(alone, SGD) and weights(several, ESGD) == weights(alone, ESGD)
    for name in ("networks", "profiles"):
        assert several.table(name).rows == alone.table(name).rows
    assert len(several.table("profiles")) == 4
    assert sorted(path.suffix for path in (tmp_path / "several" / "sweep").iterdir()) == [".jsonl", ".log", ".log"]
    # All is there: no process is started. Another training alone: in this process.
    again, workers, _ = make(FIG4, tmp_path / "several", {**options, "algorithms": ("sgd", "esgd", "rsgd")}, retries=0)
    again.compute(workers)
    assert len(journal(again)) == 2 and len(again.table("networks")) == 3


def test_a_killed_process_is_reported_and_started_again_and_a_hopeless_one_is_listed_at_the_end(tmp_path):
    item, workers, said = make(
        TABLE1, tmp_path, {**LONGER, "algorithms": ("esgd", "sgd", "rsgd"), "epochs": 12}, retries=1
    )
    (runs_of(item) / ESGD).mkdir(parents=True)
    (runs_of(item) / ESGD / "letter.txt").write_text("not a run")

    def kill():
        os.kill(json.loads((runs_of(item) / SGD / "lock").read_text())["pid"], signal.SIGKILL)

    thread = when(has_metrics(item, SGD), kill)
    with pytest.raises(RuntimeError, match="1 of the pieces of table1 failed") as error:
        item.compute(workers)
    thread.join()
    assert f"{ESGD}: exit code 2: wideflat: {runs_of(item) / ESGD} exists and is not a run" in str(error.value)
    assert "(1 attempts; see" in str(error.value)  # a wrong folder stays wrong
    assert f"{SGD} failed (signal SIGKILL) and is started again" in said
    assert any(text.startswith(f"{ESGD} failed (exit code 2") and "is given up" in text for text in said)
    assert item.table("cells").unique("algorithm") == ["sgd", "rsgd"]  # the rest is finished
    events = [line["event"] for line in Run.open(runs_of(item) / SGD).metrics("events")]
    assert events[0].startswith("resumed") and events[-1].startswith("finished")
    undisturbed, workers, _ = make(TABLE1, tmp_path / "undisturbed", {**LONGER, "algorithms": ("sgd",), "epochs": 12})
    undisturbed.compute(workers)
    assert weights(item, SGD) == weights(undisturbed, SGD)


@pytest.mark.slow
def test_ctrl_c_stops_all_and_the_same_command_goes_on(tmp_path):
    item, workers, said = make(TABLE1, tmp_path, LONGER, retries=0)
    thread = when(has_metrics(item, SGD, RSGD), lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        item.compute(workers)
    thread.join()
    assert said == [f"interrupted: {SGD}, {RSGD} may save and stop; once more to end at once"]
    assert journal(item, "interrupted") == [SGD, RSGD]
    for name in (SGD, RSGD):
        run = Run.open(runs_of(item) / name)
        assert run.result() is None and "stopped by SIGTERM" in run.metrics("events")[-1]["event"]
        with run.locked():  # nobody is left
            pass
    assert len(item.table("cells")) == 0
    item, workers, _ = make(TABLE1, tmp_path, LONGER, retries=0)
    item.compute(workers)
    assert len(item.table("cells")) == 2
    assert all("resumed" in Run.open(runs_of(item) / name).metrics("events")[1]["event"] for name in (SGD, RSGD))


@pytest.mark.slow
def test_processes_whose_sweep_was_killed_save_and_stop(tmp_path):
    options = ["--epochs", "40", "--limit-data", "200", "--seeds", "1", "--algorithms", "sgd", "rsgd", "--workers", "2"]
    command = [sys.executable, "-m", "wideflat", "reproduce", "table1", "--quick", "--out", str(tmp_path), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    runs = tmp_path / "runs-quick"
    try:
        deadline = time.monotonic() + 120
        while not all((runs / name / "metrics.jsonl").exists() for name in (SGD, RSGD)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    for name in (SGD, RSGD):
        deadline = time.monotonic() + 30
        while not any("stopped by SIGTERM" in line["event"] for line in Run.open(runs / name).metrics("events")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    undisturbed, workers, _ = make(TABLE1, tmp_path / "undisturbed", LONGER)
    undisturbed.compute(workers)
    for name in (SGD, RSGD):
        assert (runs / name / "model.safetensors").read_bytes() == weights(undisturbed, name)


def test_what_another_command_works_on_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "WAIT", 0.05)
    item, workers, _ = make(TABLE1, tmp_path, {**SMALL, "algorithms": ("sgd", "rsgd", "esgd")}, retries=0)
    held = Run(runs_of(item) / SGD, {})
    held.path.mkdir(parents=True)
    lock = held.locked()
    lock.__enter__()
    when((runs_of(item) / RSGD / "model.json").exists, lambda: lock.__exit__(None, None, None))
    item.compute(workers)
    assert journal(item) == [RSGD, ESGD]  # the third is trained here when it is free
    assert len(item.table("cells")) == 3


@pytest.mark.slow
def test_trainings_that_diverge_in_a_process_are_remarked_and_not_tried_again(tmp_path):
    options = {"lr": 1e9, "epochs": 2, "limit_data": 40, "dropouts": (0.0,), "batch_sizes": (8, 16)}
    item, workers, said = make(FIG7, tmp_path, {**options, "weight_decays": (0.0,)}, retries=3)
    item.compute(workers)
    assert len(journal(item)) == 2 and said == []
    assert sum("diverged" in remark for remark in item.comparison().remarks) == 2


def test_settings_of_the_committee_machine_are_pieces_where_workers_are_asked_for(tmp_path):
    options = {
        "dropouts": (0.0, 0.3),
        "subsets": 1,
        "restarts": 2,
        "size": 30,
        "deltas": (0.05, 0.5),
        "sigmas": (0.0, 0.5),
    }
    alone, _, _ = make(FIG6, tmp_path / "alone", options)
    alone.compute(Workers())
    assert not (alone.folder / "sweep").exists()  # its trainings are spread over the cores by themselves
    several, workers, said = make(FIG6, tmp_path / "several", options, retries=0)
    several.compute(workers)
    assert journal(several) == ["balanced-0-dropout-0", "balanced-0-dropout-0.3"] and said == []
    for name in ("restarts", "entropy", "energy"):
        assert several.table(name).rows == alone.table(name).rows


def test_jobs_of_submitit(tmp_path):
    """On submitit's local executor, which runs jobs as Slurm would, where it is installed."""
    pytest.importorskip("submitit", reason="needs submitit: pip install 'wideflat[sweep]'")
    os.environ.setdefault("USER", "tester")
    options = ["--epochs", "1", "--limit-data", "40", "--seeds", "1", "--algorithms", "sgd"]
    slurm = ["--engine", "slurm", "--slurm-options", "cluster=local", "timeout_min=5"]
    assert cli.main(["-q", "reproduce", "table1", "--quick", "--out", str(tmp_path), *options, *slurm]) == 0
    assert (tmp_path / "runs-quick" / SGD / "model.json").exists()
    assert "job" in (tmp_path / "table1-quick" / "sweep" / "sweep.jsonl").read_text()


def test_wrong_options_are_refused(tmp_path, capsys):
    for options, words in (
        (["--workers", "0"], "workers must be >= 1, got 0"),
        (["--retries", "-1"], "retries must be >= 0, got -1"),
        (["--slurm-options", "partition=gpu"], "are for --engine slurm"),
        (["--engine", "slurm", "--slurm-options", "gpu"], "KEY=VALUE, such as partition=gpu"),
    ):
        assert cli.main(["reproduce", "table1", "--quick", "--out", str(tmp_path), *options]) == cli.USAGE
        assert words in capsys.readouterr().err


def test_options_of_slurm():
    given = ["partition=gpu", "timeout-min=30", "slurm_account=me", "mem_gb=8"]
    assert slurm_parameters(given) == {
        "slurm_partition": "gpu",
        "timeout_min": 30,
        "slurm_account": "me",
        "mem_gb": 8,
    }


def test_data_that_is_not_there_is_said_once(tmp_path):
    said: list[str] = []
    item = TABLE1.open(tmp_path, **SMALL, rows=("cifar10-smallconvnet",), data=tmp_path / "nowhere")
    with pytest.raises(RuntimeError, match="CIFAR-10 was not found in"):
        item.compute(Workers(count=2, say=said.append, retries=0))
    assert said == [] and not (Path(tmp_path) / "sweep").exists()
