"""A training in memory: what every algorithm trains on, how it steps, where its center is."""

import dataclasses
import math
import shutil
import warnings

import pytest
import torch
from small_trainings import images, small, trained, vector
from torch import nn

import wideflat
import wideflat.models
from wideflat.presets import ALGORITHMS, PRESETS, preset
from wideflat.presets.networks import NETWORKS
from wideflat.training import Options, Training
from wideflat.training.scores import evaluate
from wideflat.training.training import augmentation

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


def test_batch_norm_of_the_center_is_refreshed():
    data = images(64, 16)
    bn = {"model": "resnet18", "model_arguments": ()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            NETWORKS,
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
    if not training.learner.needs_batch_norm:  # after so few steps running statistics are far from those of the weights
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
