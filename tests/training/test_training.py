import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import warnings

import pytest
import torch
from torch import nn

import wideflat
import wideflat.models
from wideflat.cli import main
from wideflat.data import ImageData, ImageSplit
from wideflat.presets import ALGORITHMS, PRESETS, preset
from wideflat.training.runs import Run
from wideflat.training.training import Diverged, Interrupted, Options, Training, augmentation, evaluate, train


def images(count=64, size=32, classes=10, test=32, seed=0):
    """Images whose brightness tells the class, in noise."""
    generator = torch.Generator().manual_seed(seed)

    def part(n):
        targets = torch.randint(classes, (n,), generator=generator)
        noise = torch.randint(100, (n, size, size, 3), generator=generator)
        pixels = (noise + (150 * targets // classes).view(n, 1, 1, 1)).to(torch.uint8).permute(0, 3, 1, 2)
        return ImageSplit(pixels, targets)

    return ImageData.of("generated", tuple(map(str, range(classes))), part(count), part(test))


def small(algorithm, **changes):
    """SmallConvNet on 16x16 images: 58 thousand weights."""
    cell = dataclasses.replace(preset("cifar10-smallconvnet", algorithm), image_size=16, batch_size=16)
    epochs = changes.pop("epochs", 2)
    return dataclasses.replace(cell, **changes).with_epochs(epochs)


def trained(experiment, data, **more):
    training = Training(experiment, data, **more)
    while training.step < training.total_steps:
        training.iterate()
    return training


def vector(network):
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()])


QUIET = {"tensorboard": False, "progress": False}

# ---------------------------------------------------------------------------------------------- the algorithms


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns(algorithm):
    """Dark from bright images: the center of every algorithm tells them apart after a few epochs."""
    data = images(96, 16, classes=2, test=64)
    epochs = {"esgd": 2, "lookahead": 3, "parle": 2}.get(algorithm, 8)
    changes = {"num_classes": 2, "augmentation": "none"}
    if algorithm in ("rsgd", "rsgdxy", "easgd", "parle"):  # so few steps collapse only with a strong attraction
        changes |= {"period": 1, "replica_gamma0" if algorithm == "parle" else "gamma0": 2.0, "gamma_factor": 10.0}
    training = trained(small(algorithm, epochs=epochs, **changes), data)
    assert training.evaluate().errors[0] < 0.2  # chance is 0.5
    assert training.evaluate("train").losses[0] < 0.8 * math.log(2)


def test_sgd_is_the_plain_loop():
    """Step by step the same weights as torch.optim.SGD in a loop written here."""
    data, experiment = images(40, 16), small("sgd", epochs=4)
    training = Training(experiment, data, Options(channels_last=False))
    twin = Training(experiment, data, Options(channels_last=False)).learner.networks[0]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    for epoch in range(4):
        for position in range(3):
            x, y = training.streams[0].batch(epoch, position)
            optimizer.zero_grad()
            nn.functional.cross_entropy(twin(x.contiguous()), y).backward()
            optimizer.step()
            training.iterate()
            for ours, theirs in zip(training.learner.networks[0].parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
        scheduler.step()


def test_the_data_seen_is_as_accounted_for():
    """Every replica sees every image once a pass, in an order of its own; esgd makes L passes an epoch."""
    data = images(40, 16)
    for algorithm, passes, replicas in (("sgd", 1, 1), ("rsgd", 1, 3), ("esgd", 5, 1), ("parle", 5, 3)):
        training = Training(small(algorithm, epochs=1), data)
        assert training.total_steps == 3 * passes
        orders = []
        for a in range(replicas):
            seen = torch.cat([training._batch(a, step)[1] for step in range(training.total_steps)])
            assert len(seen) == 40 * passes
            for each in seen.split(40):
                assert torch.equal(each.sort().values, data.train.targets.sort().values)
            orders.append(tuple(seen[:40].tolist()))
        assert len(set(orders)) == replicas
        while training.step < training.total_steps:
            training.iterate()
        row = training.close_epoch()
        assert row["passes"] == passes * replicas


def test_a_replica_does_not_depend_on_how_many_there_are():
    """Initial weights, order of the data, augmentation, dropout: functions of (seed, replica, iteration)."""
    data = images(40, 16)
    loose = {"gamma0": 0.0, "model": "vgg3x512", "model_arguments": (("widths", (4, 4, 4)), ("dropout", 0.5))}
    three = trained(small("rsgd", num_replicas=3, **loose), data)
    two = trained(small("rsgd", num_replicas=2, **loose), data)
    one = trained(small("rsgd", num_replicas=1, **loose), data)
    for a in range(3):
        for fewer in (two, one):
            if a < len(fewer.learner.networks):
                for p, q in zip(
                    three.learner.networks[a].parameters(), fewer.learner.networks[a].parameters(), strict=True
                ):
                    assert torch.equal(p, q)
    parle = {**loose, "replica_gamma0": 0.0, "gamma0": 0.5}
    three, one = (trained(small("parle", num_replicas=y, epochs=1, **parle), data) for y in (3, 1))
    for p, q in zip(three.learner.networks[0].parameters(), one.learner.networks[0].parameters(), strict=True):
        assert torch.equal(p, q)  # the Langevin noise too


def test_the_proximal_coupling_holds_replicas_together_where_the_gradients_throw_them_apart():
    strong = {"gamma0": 100.0, "gamma_factor": 1.0, "focusing": "constant", "period": 1, "epochs": 3}
    proximal = trained(small("rsgd", coupling="proximal", **strong), images(40, 16))
    start = Training(small("rsgd", **strong), images(40, 16)).learner.coupling.distances()
    assert (proximal.learner.coupling.distances() < 0.05 * start).all()  # of all replicas, not of the first alone
    with pytest.warns(UserWarning, match="unstable"):
        thrown = trained(small("rsgd", **strong), images(40, 16))
    assert not (thrown.learner.coupling.distances() < start).any()


def test_seeds_differ_and_repeat():
    data = images(40, 16)
    first, again, other = (trained(small("esgd", epochs=1), data, options=Options(seed=s)) for s in (1, 1, 2))
    weights = [vector(t.learner.networks[0]) for t in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2], atol=1e-3)


def test_focusing_and_the_center():
    data = images(40, 16)
    esgd = trained(small("esgd", epochs=2), data)
    assert esgd.learner.figures()["gamma"] == pytest.approx(5.0)  # gamma0 0.5, factor 10
    rsgd = trained(small("rsgd", epochs=2), data)
    assert rsgd.learner.figures()["gamma"] == pytest.approx(10.0)  # 1e-3, factor 1e4
    mean = torch.stack([vector(n) for n in rsgd.learner.networks]).mean(0)
    torch.testing.assert_close(vector(rsgd.center()), mean)
    # mid-cycle, the center of Entropy-SGD is w and not w'
    esgd = Training(small("esgd", epochs=2), data)
    start = vector(esgd.learner.networks[0]).clone()
    for _ in range(3):
        esgd.iterate()
    assert torch.equal(vector(esgd.center()), start)
    assert not torch.equal(vector(esgd.learner.networks[0]), start)
    easgd = trained(small("easgd", epochs=4, period=2), data)
    center = torch.cat([p.reshape(-1) for p in easgd.learner.coupling.center])
    assert torch.equal(vector(easgd.center()), center)


def test_the_period_changes_at_its_epoch():
    data = images(40, 16)
    training = Training(small("rsgd", epochs=3, period=10, period_changes=((200 / 3, 3),)), data)  # of 100
    periods = []
    while training.step < training.total_steps:
        training.iterate()
        periods.append(training.learner.coupling.period)
    assert periods == [10] * 6 + [3] * 3


def test_automatic_gamma0():
    data = images(40, 16)
    training = Training(small("rsgd", gamma0=None), data)
    losses = evaluate(training.learner.networks, training._plain("train")).losses
    distances = training.learner.replicas.distances()
    assert training.learner.coupling.gamma == pytest.approx(sum(losses) / distances.sum().item(), rel=1e-6)
    before = Training(small("esgd"), data).learner.networks[0].state_dict()
    training = Training(small("esgd", gamma0=None), data)
    assert training.learner.focusing[0].gamma0[0] > 0
    for name, value in training.learner.networks[0].state_dict().items():
        assert torch.equal(value, before[name])  # measuring it has moved nothing


def test_batch_norm_of_the_center_is_refreshed():
    data = images(64, 16)
    bn = {"model": "resnet18", "model_arguments": ()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            wideflat.models,
            "resnet18",
            lambda num_classes: nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, num_classes)
            ),
        )
        training = trained(small("rsgd", epochs=2, **bn), data)
        center = training.center()
        untouched = training.learner.center()
        x = torch.cat([training._stream("batch norm", 0, batch_size=64).batch(0, 0)[0]])
        mean = center[0](x).mean((0, 2, 3))
        torch.testing.assert_close(center[1].running_mean, mean, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(untouched[1].running_mean, mean, rtol=1e-2)
        baseline = trained(small("sgd", epochs=2, **bn), data)
        assert torch.equal(baseline.center()[1].running_mean, baseline.learner.networks[0][1].running_mean)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("algorithm", ["sgd", "esgd", "rsgd"])
def test_mixed_precision(algorithm, amp):
    data = images(40, 16)
    training = trained(small(algorithm, epochs=1), data, options=Options(amp=amp))
    exact = trained(small(algorithm, epochs=1), data)
    row, reference = training.close_epoch(), exact.close_epoch()
    assert row["train_loss"] == pytest.approx(reference["train_loss"], rel=0.02)
    assert row["train_loss"] != reference["train_loss"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_networks_train_and_keep_their_names():
    data = images(48, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler itself
        compiled = trained(small("rsgd", epochs=1), data, options=Options(compile=True))
    exact = trained(small("rsgd", epochs=1), data)
    assert compiled.close_epoch()["train_loss"] == pytest.approx(exact.close_epoch()["train_loss"], rel=1e-4)
    assert list(compiled.center().state_dict()) == list(exact.center().state_dict())


# ---------------------------------------------------------------------------------------------- presets


def reduced(cell):
    """The cell at a size that two cores can do: the architecture and everything else are its own."""
    size = {"efficientnet_b0": 32}.get(cell.model, min(cell.image_size, 32))
    changes = {"image_size": size, "padding": 4, "batch_size": 2, "cutout": min(cell.cutout, size // 2)}
    if cell.model == "pyramidnet272":
        changes |= {"image_size": 8, "padding": 1, "cutout": 4}
    return dataclasses.replace(cell, **changes)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_trains_and_evaluates_with_a_column(name):
    """The real architecture with Entropy-SGD on a few small images; the slow test below does all algorithms."""
    if name == "cifar100-pyramidnet":
        pytest.skip("as cifar10-pyramidnet, with more classes; in the slow test")
    take_steps(name, "esgd", steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_trains_and_evaluates_with_every_algorithm(name, algorithm):
    """The real architectures, every algorithm, at reduced image and batch size."""
    take_steps(name, algorithm, steps=2)


def take_steps(name, algorithm, steps):
    cell = reduced(preset(name, algorithm))
    native = 8 if cell.model == "pyramidnet272" else 32
    data = images(4, native, classes=cell.num_classes, test=2)
    training = Training(dataclasses.replace(cell, padding=min(cell.padding, 4)), data)
    before = vector(training.learner.networks[0]).clone()
    for _ in range(steps):
        assert torch.isfinite(training.iterate())
    after = vector(training.learner.networks[0])
    assert torch.isfinite(after).all() and not torch.equal(before, after)
    center = training.center()
    if not training.learner.refreshes:  # after so few steps the running statistics are far from those of the weights
        wideflat.refresh_batch_norm(center, [training._batch(0, 0)])
    result = evaluate([center], training._plain("test"))
    assert 0 <= result.errors[0] <= 1 and math.isfinite(result.losses[0])


def test_augmentation_of_the_presets():
    pyramid = augmentation(preset("cifar10-pyramidnet"), 32)
    assert (pyramid.padding, pyramid.flip, pyramid.policy, pyramid.cutout, pyramid.size) == (
        4,
        True,
        "autoaugment",
        16,
        None,
    )
    efficient = augmentation(preset("cifar100-efficientnet"), 32)
    assert (efficient.padding, efficient.policy, efficient.size) == (32, "autoaugment", 224)
    assert augmentation(preset("tinyimagenet-resnet50"), 64).policy == "fast-autoaugment"
    assert not augmentation(dataclasses.replace(preset("cifar10-resnet18"), augmentation="none"), 32).flip


# ---------------------------------------------------------------------------------------------- on disk


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
        patch.setattr(
            "wideflat.training.training._finish", lambda run, training: (_ for _ in ()).throw(RuntimeError("killed"))
        )
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
    with pytest.raises(ValueError, match="amp must be off, bf16 or fp16"):
        Options(amp="fp8")
    with pytest.raises(ValueError, match="limit_data must be >= 1"):
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


# ---------------------------------------------------------------------------------------------- the command


@pytest.fixture
def cifar(monkeypatch):
    """The command finds generated images where CIFAR-10 would be."""
    data = dataclasses.replace(images(40, 32), name="cifar10", source="nowhere")
    monkeypatch.setattr("wideflat.data.load", lambda name, folder=None, allow_altered=False: data)


def test_the_command_trains_resumes_and_reports(cifar, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "cifar10-smallconvnet", "--epochs", "1", "--batch-size", "20", "--no-tensorboard"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "runs/cifar10-smallconvnet-sgd-epochs1-batch-size20-seed0: test error" in text
    assert "paper: 16.5 ± 0.2 % (with the preset's own settings)" in text
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert "is finished already" in captured.err
    assert json.loads(captured.out)["epoch"] == 1
    assert main([*arguments, "--no-resume"]) == 1
    assert "holds a run already" in capsys.readouterr().err
    assert main([*arguments, "--out", "x", "--algorithm", "rsgd", "-q"]) == 0
    text = capsys.readouterr().out
    assert "replicas" in text and "epoch 1/1" not in text
    assert main([*arguments, "--out", "x"]) == 1
    assert "algorithm is rsgd there and sgd here" in capsys.readouterr().err
    assert main([*arguments, "--out", "x", "--algorithm", "rsgd", "--coupling", "proximal"]) == 1
    assert "coupling is gradient there and proximal here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["cifar10-smalconvnet"], "Did you mean 'cifar10-smallconvnet'?"),
        (["committee-sgd"], "there is no preset 'committee-sgd'"),
        (["committee-sgd-fast", "--lr", "1"], "--lr is not for the committee machine"),
        (["committee-sgd-fast", "--restarts", "0"], "--restarts must be >= 1, got 0"),
        (["committee-sgd-fast", "--set", "dropuot=0.3"], "NAME=VALUE with one of the names lr, tanh_beta0"),
        (["committee-sgd-fast", "--set", "align=maybe"], "align is true or false, got 'maybe'"),
        (["committee-sgd-fast", "--set", "polish_epochs=1.5"], "polish_epochs is a whole number, got '1.5'"),
        (["committee-sgd-fast", "--set", "dropout=2"], "dropout must be a probability below 1"),
        (["cifar10-smallconvnet", "--set", "dropout=0.3"], "--set is for the committee machine"),
        (["cifar10-smallconvnet", "--epochs", "0"], "--epochs must be >= 1, got 0"),
        (["cifar10-smallconvnet", "--lr", "-1"], "lr must be >= 0, got -1.0"),
        (["cifar10-smallconvnet", "--num-replicas", "3"], "--num-replicas is for rsgd"),
        (["cifar10-smallconvnet", "--coupling", "proximal"], "--coupling is for rsgd and rsgdxy, not for sgd"),
        (["cifar10-smallconvnet", "--inner-steps", "3"], "--inner-steps is for esgd"),
        (["cifar10-smallconvnet", "--data", "nowhere"], "was not found in nowhere"),
    ],
)
def test_wrong_uses_of_the_command(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == (1 if "--data" in arguments else 2)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_is_interrupted_with_code_130(cifar, tmp_path, capsys, monkeypatch):
    original = Training.iterate

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Training, "iterate", interrupted)
    arguments = ["train", "cifar10-smallconvnet", "--epochs", "1", "--batch-size", "20", "--out", str(tmp_path / "run")]
    assert main([*arguments, "--no-tensorboard"]) == 130
    assert "start the same command again to go on" in capsys.readouterr().err


def test_the_command_trains_committee_machines(tmp_path, capsys):
    from wideflat.committee import Solutions

    arguments = ["train", "committee-sgd-fast", "--restarts", "2", "--patterns", "20", "--out", str(tmp_path / "run")]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["restarts"] == 2
    solutions = Solutions.load(tmp_path / "run" / "solutions.npz")
    assert solutions.seeds == [0, 1] and len(solutions.inputs) == 20
    assert not (tmp_path / "run" / "checkpoint.npz").exists()
    assert main(arguments) == 0
    assert "finished already" in capsys.readouterr().out
    assert main([*arguments, "--seed", "1"]) == 1
    assert "options.seed is 0 there and 1 here" in capsys.readouterr().err
    assert main([*arguments, "--set", "dropout=0.3"]) == 1
    assert "dropout is 0.0 there and 0.3 here" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "other"), "--set", "dropout=0.3", "max_epochs=2"]) == 0
    assert Solutions.load(tmp_path / "other" / "solutions.npz").setting.dropout == 0.3
