import itertools
import json
import math
import signal
import threading

import numpy as np
import pytest
import torch

from wideflat.committee import SETTINGS, Interrupted, Setting, train
from wideflat.committee import training as committee_training
from wideflat.committee.gram import Gram
from wideflat.committee.job import Job
from wideflat.committee.reference import train_one
from wideflat.data import dress_coat
from wideflat.kernels.committee import CommitteeKernel


def patterns(count=40, size=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator).sign()
    return x, torch.randn(count, generator=generator).sign()


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("name", ["sgd-fast", "rsgd-fast", "esgd"])
def test_a_restart_does_not_depend_on_its_neighbours(name, kernel, images, monkeypatch):
    """Bit for bit in float32: alone, in a crowd, on one thread or two, in either form."""
    if not kernel:
        monkeypatch.setattr(CommitteeKernel, "available", staticmethod(lambda gram: False))
    setting = SETTINGS[name].replace(batch_size=20, max_epochs=12, inner_steps=4, stop="errors", tolerance=0.0)
    for form in ("gram", "direct") if kernel else ("gram",):
        run = {"progress": False, "refresh": 5, "form": form}
        crowd = train(setting, images.inputs, images.targets, range(7), threads=1, **run)
        two = train(setting, images.inputs, images.targets, range(7), threads=2, **run)
        alone = train(setting, images.inputs, images.targets, [3], threads=1, **run)
        assert torch.equal(crowd.weights, two.weights)
        assert torch.equal(crowd.weights[3], alone.weights[0])
        assert crowd.epochs[3] == alone.epochs[0] and crowd.value[3] == alone.value[0]


def test_restarts_that_stop_leave_the_batch(images):
    setting = SETTINGS["sgd-fast"].replace(batch_size=20, lr=5e-4, max_epochs=400)
    together = train(setting, images.inputs, images.targets, range(6), progress=False, threads=1)
    assert len(set(together.epochs)) > 2 and all(together.reached)
    assert together.train_errors == [0] * 6
    for k in (0, 5):
        alone = train(setting, images.inputs, images.targets, [k], progress=False)
        assert alone.epochs == [together.epochs[k]] and torch.equal(alone.weights[0], together.weights[k])


def test_each_rule_stops_where_the_naive_loop_would(images):
    small = {"batch_size": 20, "max_epochs": 100}
    quick = {
        "loss": SETTINGS["sgd-slow"].replace(**small, tolerance=0.05, lr=1e-4, omega1=0.01, tanh_beta1=0.01),
        "replicas": SETTINGS["rsgd-fast"].replace(**small, num_replicas=3, gamma0=1000.0, gamma1=0.01, tolerance=1e-6),
        "mean": SETTINGS["esgd"].replace(**small, inner_steps=4, inner_lr=1e-3, lr=0.5, tolerance=1e-3, epsilon=0.0),
    }
    for setting in quick.values():
        result = train(setting, images.inputs, images.targets, [4], progress=False, dtype=torch.float64)
        twin = train_one(setting, images.inputs, images.targets, 4)
        values = [value for _, value in itertools.islice(twin, result.epochs[0])]
        assert result.stop == [setting.stop] and result.epochs[0] > 3
        assert min(values[:-1]) >= setting.tolerance > values[-1]
        assert result.value[0] == pytest.approx(values[-1], rel=1e-6)


def test_a_restart_that_misses_its_rule_says_so(images):
    flipped = images.targets.clone()
    inputs = torch.cat([images.inputs, images.inputs[:1]])  # a pattern with both labels
    targets = torch.cat([flipped, -flipped[:1]])
    setting = SETTINGS["sgd-fast"].replace(batch_size=20, max_epochs=30)
    result = train(setting, inputs, targets, [0, 1], progress=False)
    assert result.stop == ["max_epochs"] * 2 and result.reached == [False] * 2 and result.solved == [False] * 2
    assert result.epochs == [30, 30] and min(result.train_errors) >= 1
    assert result.value == [float(count) for count in result.train_errors]


def test_the_value_of_a_restart_that_ends_at_the_limit_is_exact(images):
    """Not the bound that is enough to see that it has not met its rule: replicas that are far apart."""
    setting = SETTINGS["rsgd-fast"].replace(batch_size=20, num_replicas=3, max_epochs=7)
    values = {}
    for form in ("gram", "direct"):
        result = train(setting, images.inputs, images.targets, [0, 4], progress=False, form=form, dtype=torch.float64)
        assert result.stop == ["max_epochs"] * 2
        values[form] = result.value
    twin = train_one(setting, images.inputs, images.targets, 4)
    _, expected = next(itertools.islice(twin, 6, None))
    assert values["gram"] == pytest.approx(values["direct"], rel=1e-9)
    assert values["gram"][1] == pytest.approx(expected, rel=1e-9)
    assert expected > 1


def test_float32_is_enough(images):
    setting = SETTINGS["rsgd-fast"].replace(batch_size=20, num_replicas=3, max_epochs=60)
    single = train(setting, images.inputs, images.targets, range(2), progress=False, refresh=30)
    double = train(setting, images.inputs, images.targets, range(2), progress=False, refresh=30, dtype=torch.float64)
    assert (single.weights.double() - double.weights).abs().max() < 1e-5


def test_the_form_is_chosen_by_size_and_noise(images):
    forms = {}
    for name, changes in [("esgd", {}), ("esgd", {"epsilon": 0.1}), ("sgd-fast", {})]:
        setting = SETTINGS[name].replace(batch_size=20, max_epochs=1, **changes)
        result = train(setting, images.inputs, images.targets, [0], progress=False)
        forms[name, setting.epsilon] = result.options["form"]
    assert forms == {("esgd", 1e-6): "gram", ("esgd", 0.1): "direct", ("sgd-fast", 0.0): "gram"}
    wide = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    result = train(setting, wide, images.targets[:50], [0], progress=False)
    assert result.options["form"] == "direct"


def test_polishing_removes_errors_with_little_movement():
    images = dress_coat.load(100)
    rough = SETTINGS["sgd-slow"].replace(max_epochs=250, batch_size=20)
    before = train(rough, images.inputs, images.targets, range(4), progress=False)
    polish = {"polish_epochs": 300, "polish_lr": 2e-5, "polish_beta0": 1.0}
    after = train(rough.replace(**polish), images.inputs, images.targets, range(4), progress=False)
    assert sum(before.train_errors) > 0 and after.errors_before == before.train_errors
    assert sum(after.train_errors) < sum(before.train_errors)
    for k in range(4):
        if before.train_errors[k] == 0:
            assert after.polish_epochs[k] == 0 and torch.equal(after.weights[k], before.weights[k])
        else:
            moved = (after.weights[k] - before.weights[k]).square().sum().item() / 9
            assert after.polish_movement[k] == pytest.approx(moved, rel=1e-3)
            assert 0 < moved < 0.05 and after.polish_epochs[k] > 0
    assert after.epochs == before.epochs


# ----------------------------------------------------------------------------------------------- interrupting, resuming


def interrupt_after(monkeypatch, calls):
    """Interrupt training after so many epochs, as Ctrl-C does, and let no worker go on before it is told to stop."""
    count, jobs = itertools.count(1), []
    train_group, original = Job.train, Gram.epoch

    def remember(self, group):
        jobs.append(self)
        train_group(self, group)

    def epoch(self, *arguments):
        original(self, *arguments)
        if next(count) == calls:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert jobs[-1].cancel.wait(60)

    monkeypatch.setattr(Job, "train", remember)
    monkeypatch.setattr(Gram, "epoch", epoch)


@pytest.mark.parametrize("name", ["sgd-fast", "rsgd-fast", "esgd"])
def test_an_interrupted_run_goes_on_and_ends_the_same(name, images, tmp_path, monkeypatch):
    setting = SETTINGS[name].replace(batch_size=20, max_epochs=40, inner_steps=3, stop="errors", tolerance=0.0)
    if name == "rsgd-fast":
        setting = setting.replace(num_replicas=3, align=True)
    arguments = (setting, images.inputs, images.targets, range(3))
    whole = train(*arguments, progress=False, refresh=7)
    path = tmp_path / "state.npz"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 12)
        with pytest.raises(
            Interrupted, match=r"of 3 restarts finished; run it again to go on from .*state\.npz"
        ) as caught:
            train(*arguments, progress=False, refresh=7, checkpoint=path, threads=1)
    partial = caught.value.solutions
    assert partial.stop.count("interrupted") >= 1
    assert next(e for e, stop in zip(partial.epochs, partial.stop, strict=True) if stop == "interrupted") % 7 == 0
    resumed = train(*arguments, progress=False, refresh=7, checkpoint=path)
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.epochs == whole.epochs and resumed.stop == whole.stop
    # and a finished checkpoint is read, not trained again
    monkeypatch.setattr(Gram, "epoch", None)
    assert torch.equal(train(*arguments, progress=False, refresh=7, checkpoint=path).weights, whole.weights)


def test_checkpoints_of_other_runs_and_damaged_ones_are_refused(images, tmp_path):
    setting = SETTINGS["sgd-fast"].replace(batch_size=20, max_epochs=2)
    path = tmp_path / "state.npz"
    train(setting, images.inputs, images.targets, range(2), progress=False, checkpoint=path)
    with pytest.raises(ValueError, match="another run: it differs in setting"):
        train(setting.replace(lr=1.0), images.inputs, images.targets, range(2), progress=False, checkpoint=path)
    with pytest.raises(ValueError, match="differs in seeds"):
        train(setting, images.inputs, images.targets, range(3), progress=False, checkpoint=path)
    with pytest.raises(ValueError, match="differs in data"):
        train(setting, images.inputs, -images.targets, range(2), progress=False, checkpoint=path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        train(setting, images.inputs, images.targets, range(2), progress=False, checkpoint=path)


def test_an_error_in_a_worker_is_not_swallowed(images, monkeypatch):
    def fail(self, *arguments):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(Gram, "epoch", fail)
    with pytest.raises(RuntimeError, match="no such luck"):
        train("sgd-fast", images.inputs, images.targets, range(3), progress=False, threads=2)


def test_the_number_of_threads_is_left_as_it_was(images):
    before = torch.get_num_threads()
    setting = SETTINGS["sgd-fast"].replace(batch_size=20, max_epochs=2)
    train(setting, images.inputs, images.targets, range(2), progress=False, threads=2)
    assert torch.get_num_threads() == before


def test_own_data_with_real_inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 60, generator=generator)
    teacher = torch.randn(60, generator=generator)
    y = torch.where(x @ teacher > 0, 1.0, -1.0)
    setting = Setting("sgd", 1e-3, 1.0, 1e-3, 2.0, 0.0, "errors", max_epochs=2000, hidden=3, batch_size=7)
    for form in ("gram", "direct"):
        result = train(setting, x, y, range(3), progress=False, form=form)
        assert result.train_errors == [0, 0, 0]


def test_the_checkpoint_holds_plain_arrays_and_text(images, tmp_path):
    setting = SETTINGS["sgd-fast"].replace(batch_size=20, max_epochs=2)
    path = tmp_path / "state.npz"
    train(setting, images.inputs, images.targets, range(2), progress=False, checkpoint=path)
    with np.load(path, allow_pickle=False) as content:
        assert json.loads(str(content["metadata"]))["format"] == "wideflat committee checkpoint 1"
    assert committee_training._CHECKPOINT_INTERVAL <= 60


def test_without_a_test_set_the_test_error_is_not_a_number():
    x, y = patterns(count=10)
    setting = Setting("sgd", 1e-3, 2.0, 0.0, 5.0, 0.0, "errors", max_epochs=2, hidden=3, batch_size=4)
    result = train(setting, x, y, [7], progress=False)
    assert math.isnan(result.test_error[0]) and math.isnan(result.balanced_test_error[0])
    assert math.isnan(result.summary()["test_error_spread"])


def test_unknown_settings_and_wrong_arguments_are_refused():
    x, y = patterns(count=10)
    for arguments, message in [
        ({"setting": "sgd-medium"}, "there is no setting 'sgd-medium'; there are sgd-fast"),
        ({"seeds": [1, 1]}, "different whole numbers"),
        ({"seeds": []}, "at least one"),
        ({"dtype": torch.float16}, "float32 or torch.float64"),
        ({"form": "sparse"}, 'form must be "auto", "gram" or "direct"'),
        ({"refresh": 0}, "refresh must be a whole number >= 1"),
        ({"threads": 0}, "threads must be a whole number >= 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(**{"setting": "sgd-fast", "inputs": x, "targets": y, "progress": False, **arguments})
    with pytest.raises(ValueError, match=r"use 2 \* targets - 1"):
        train("sgd-fast", x, (y > 0).float(), progress=False)
