"""Trainings on disk: what a run leaves, how it ends, how it goes on."""

import itertools
import os
import signal

import pytest
import torch
from small_trainings import QUIET, images, small

from wideflat.training import Diverged, Interrupted, Options, Run, Training, train
from wideflat.training.scores import evaluate


def test_a_run_leaves_what_it_promises(tmp_path):
    data = images(48, 16)
    told = []
    run = train(
        small("rsgd", epochs=3),
        tmp_path / "run",
        data,
        snapshots=[0, 2],
        progress=False,
        say=told.append,
        on_epoch=lambda training, row: row.update(extra=training.epoch * 2),
    )
    rows = run.metrics()
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["extra"] for row in rows] == [2, 4, 6]
    assert rows[-1]["lr"] == pytest.approx(0.05 * 0.01)  # the schedule of 300 epochs in 3
    for key in ("train_loss", "train_error", "test_error", "test_loss", "gamma", "distance", "ensemble_test_error"):
        assert isinstance(rows[-1][key], float)
    assert len(rows[-1]["replica_test_errors"]) == 3
    assert len(run.metrics("timing")) == 3 and run.metrics("timing")[0]["images_per_second"] > 0
    assert {"torch", "commit", "processor", "threads"} <= set(run.metrics("environment")[0])
    assert list((run.path / "tensorboard").glob("events.*"))
    assert list(run.snapshots()) == [0, 2]
    assert any("epoch 3/3" in line for line in told) and "finished" in told[-1]

    result = run.result()
    assert result["test_error"] == rows[-1]["test_error"]
    model = Run.open(run.path).load_model()
    training = Training(small("rsgd", epochs=3), data)
    again = evaluate([model], training._plain("test"))
    assert again.errors[0] == result["test_error"]
    assert again.losses[0] == pytest.approx(result["test_loss"], rel=1e-6)
    start = run.load_model(epoch=0).state_dict()
    for name, value in training.center().state_dict().items():
        torch.testing.assert_close(start[name], value)
    # started again, it is finished already
    told.clear()
    train(small("rsgd", epochs=3), tmp_path / "run", data, progress=False, say=told.append)
    assert told == [f"{run.path} is finished already"]


def test_evaluate_every(tmp_path):
    run = train(small("sgd", epochs=5), tmp_path / "run", images(32, 16), Options(evaluate_every=2), **QUIET)
    assert ["test_error" in row for row in run.metrics()] == [False, True, False, True, True]


def test_a_run_may_go_on_with_other_evaluations(tmp_path):
    data, experiment = images(32, 16), small("rsgd", epochs=4)
    whole = train(experiment, tmp_path / "whole", data, **QUIET)
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 3)
        with pytest.raises(Interrupted):
            train(experiment, tmp_path / "run", data, **QUIET)
    run = train(experiment, tmp_path / "run", data, Options(evaluate_every=3), **QUIET)
    assert ["test_error" in row for row in run.metrics()] == [True, False, True, True]
    assert (run.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()


def test_until_ends_the_training_and_a_killed_run_ends_there_too(tmp_path, monkeypatch):
    """Ended by ``until``, killed before the final model is written, started again: no further epoch is trained."""
    data, experiment = images(32, 16), small("esgd", epochs=5)

    def second(row):
        return row["epoch"] >= 2

    whole = train(experiment, tmp_path / "whole", data, until=second, **QUIET)
    assert [row["epoch"] for row in whole.metrics()] == [1, 2]
    assert whole.result()["epoch"] == 2

    with monkeypatch.context() as patch:

        def killed(record, training):
            raise RuntimeError("killed")

        patch.setattr("wideflat.training.loop._Record.finish", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(experiment, tmp_path / "killed", data, until=second, **QUIET)
    killed = train(experiment, tmp_path / "killed", data, until=second, **QUIET)
    assert [row["epoch"] for row in killed.metrics()] == [1, 2]
    assert killed.result() == whole.result()


def test_limit_data(tmp_path):
    run = train(small("sgd", epochs=1), tmp_path / "run", images(64, 16), Options(limit_data=20), **QUIET)
    assert run.metrics()[0]["step"] == 2


def test_a_changed_configuration_is_refused(tmp_path):
    data = images(32, 16)
    train(small("sgd", epochs=1), tmp_path / "run", data, **QUIET)
    with pytest.raises(ValueError, match=r"holds another experiment: lr is 0\.01 there and 0\.02 here"):
        train(small("sgd", epochs=1, lr=0.02), tmp_path / "run", data, **QUIET)
    with pytest.raises(ValueError, match=r"options\.seed is 0 there and 1 here"):
        train(small("sgd", epochs=1), tmp_path / "run", data, Options(seed=1), **QUIET)
    with pytest.raises(ValueError, match=r"data\.train is 32 there and 33 here"):
        train(small("sgd", epochs=1), tmp_path / "run", images(33, 16), **QUIET)


def test_wrong_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="generated has 7 classes, cifar10-smallconvnet 10"):
        Training(small("sgd"), images(16, 16, classes=7))
    with pytest.raises(ValueError, match='amp must be "off", "bf16" or "fp16"'):
        Options(amp="fp8")
    with pytest.raises(ValueError, match="limit_data must be a whole number >= 1"):
        Options(limit_data=0)


def test_divergence_stops_and_keeps_the_last_good_state(tmp_path):
    data = images(64, 16)
    told = []

    def explode(training, row):
        if training.epoch == 2:
            with torch.no_grad():
                next(training.learner.networks[0].parameters()).fill_(1e30)

    experiment = small("sgd", epochs=4)
    with pytest.raises(Diverged, match=r"stopped because .*(nan|inf|not finite|grown).*keeps the last good state"):
        # the weights are ruined after epoch 2 was checked but before it is saved: the state is not, it is finite
        train(experiment, tmp_path / "run", data, on_epoch=explode, say=told.append, **QUIET)
    run = Run.open(tmp_path / "run")
    assert "stopped because" in run.metrics("events")[-1]["event"]
    assert [row["epoch"] for row in run.metrics()] == [1, 2]
    assert run.result() is None
    with run.locked():
        assert run.restore()["step"] == 8


def test_nan_is_never_saved(tmp_path):
    data = images(64, 16)
    experiment = small("sgd", epochs=3, lr=1e12)
    with pytest.raises(Diverged):
        train(experiment, tmp_path / "run", data, checkpoint_minutes=0, **QUIET)
    run = Run.open(tmp_path / "run")
    with run.locked():
        state = run.restore()
    if state is not None:
        assert all(torch.isfinite(value).all() for value in state["learner"]["networks"][0].values())


def interrupt(patch, iteration, number=signal.SIGINT):
    """Send a signal before this iteration."""
    original, count = Training.iterate, itertools.count(1)

    def counting(self):
        if next(count) == iteration:
            os.kill(os.getpid(), number)
        return original(self)

    patch.setattr(Training, "iterate", counting)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_goes_on_as_if_nothing_had_happened(tmp_path, number):
    data, experiment = images(64, 16), small("esgd", epochs=2)
    whole = train(experiment, tmp_path / "whole", data, **QUIET)

    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 7, number)  # in the middle of an epoch and of a cycle
        with pytest.raises(Interrupted, match=rf"stopped by {number.name} at epoch 0\.\d\d of 2; .* is saved"):
            train(experiment, tmp_path / "run", data, **QUIET)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    told = []
    run = train(experiment, tmp_path / "run", data, say=told.append, **QUIET)
    assert any("resumed" in line and "at epoch 0.35 of 2" in line for line in told)
    assert run.metrics() == whole.metrics()
    for name in ("metrics.jsonl", "model.safetensors", "model.json"):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()
