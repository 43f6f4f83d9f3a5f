"""Where replicas start, and what the as-coded fields of a preset do in a training."""

import dataclasses

import pytest
import torch
from torch import nn

from wideflat.baselines.rmsprop import TensorFlowRMSprop
from wideflat.cli import main
from wideflat.commands.train import Command
from wideflat.data import ImageData, ImageSplit
from wideflat.presets import preset
from wideflat.presets.networks import NETWORKS
from wideflat.schedules import Schedule
from wideflat.training import Options, Run, Training, train
from wideflat.training.flatness import augmentation_of_run


def images(count=40, size=16):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, size, size, 3), generator=generator, dtype=torch.uint8).permute(0, 3, 1, 2)
    part = ImageSplit(pixels, torch.arange(count) % 10)
    return ImageData.of("generated", tuple("0123456789"), part, part)


def small(algorithm="rsgd", epochs=2, as_coded=False, **changes):
    cell = preset("cifar10-smallconvnet", algorithm, as_coded)
    return dataclasses.replace(cell, **{"image_size": 16, "batch_size": 16, **changes}).with_epochs(epochs)


def weights(training):
    return [torch.cat([p.detach().flatten() for p in network.parameters()]) for network in training.learner.networks]


def iterate(training, steps):
    for _ in range(steps):
        training.iterate()
    return weights(training)


def test_independent_replicas_differ_from_the_start():
    first, second, third = weights(Training(small(), images()))
    assert not torch.equal(first, second) and not torch.equal(second, third)


@pytest.mark.parametrize("algorithm", ["rsgd", "rsgdxy", "easgd", "parle"])
def test_one_start_parts_by_the_data(algorithm):
    changes = {"replica_gamma0": 0.1} if algorithm == "parle" else {}
    training = Training(small(algorithm, start="one", **changes), images())
    alone = Training(small("sgd"), images())
    first, *others = weights(training)
    assert torch.equal(first, weights(alone)[0]) and all(torch.equal(first, other) for other in others)
    first, *others = iterate(training, 1)
    assert not any(torch.equal(first, other) for other in others)


def test_a_fork_is_one_network_until_it_parts():
    """Bit for bit SGD with the same settings, whatever the attraction would be; afterwards three replicas."""
    changes = {"start": "fork", "fork_passes": 2, "gamma0": 2.0, "gamma_factor": 2.0, "period": 1}
    fork, alone = Training(small(epochs=4, **changes), images()), Training(small("sgd", epochs=4, lr=0.05), images())
    assert fork.batches_per_pass == 3
    for _ in range(6):
        alone.iterate()
        fork.iterate()
        assert all(torch.equal(w, weights(alone)[0]) for w in weights(fork))
    assert fork.learner.coupling.distances().max() < 1e-8
    assert fork.learner.focusing[0].gamma > 2  # which has gone on meanwhile
    first, second, third = iterate(fork, 1)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    free = Training(small(epochs=4, **{**changes, "gamma0": 0.0}), images())
    assert not torch.equal(iterate(free, 8)[0], iterate(fork, 1)[0])  # they attract each other again


@pytest.mark.parametrize("stop", [3, 6, 8])
def test_a_fork_is_resumed(stop):
    experiment = small(epochs=4, start="fork", fork_passes=2)
    whole, part, rest = (Training(experiment, images()) for _ in range(3))
    iterate(part, stop)
    rest.load_state_dict(part.state_dict())
    for a, b in zip(iterate(whole, 12), iterate(rest, 12 - stop), strict=True):
        assert torch.equal(a, b)


def test_gamma_and_the_outer_rate_as_coded():
    experiment = small("esgd", epochs=2, as_coded=True, batch_size=10, schedule=Schedule(60))
    training = Training(experiment, images())  # 4 batches x L = 5 passes an epoch: 20 steps, 4 cycles
    seen = []
    for _ in range(training.total_steps):
        training.iterate()
        group = training.learner.optimizers[0].param_groups[0]
        seen.append(group["lr"])
    cycles = [experiment.gamma0 * experiment.gamma_factor ** (t / 8) for t in range(8)]
    assert seen == pytest.approx([0.5 * gamma for gamma in cycles for _ in range(5)])
    assert group["epsilon"] == pytest.approx(1e-4 * 2**0.5)


def test_gamma_of_rsgd_grows_once_an_epoch_as_coded():
    training = Training(small(as_coded=True), images())
    gammas = []
    for _ in range(6):
        gammas.append(training.learner.coupling.gamma)
        training.iterate()
    assert gammas == pytest.approx([0.002] * 3 + [0.2] * 3)


def test_statistics_as_gathered(monkeypatch):
    monkeypatch.setitem(
        NETWORKS,
        "resnet18",
        lambda num_classes: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, num_classes)
        ),
    )
    for algorithm in ("rsgd", "esgd"):
        training = Training(small(algorithm, model="resnet18", batch_norm="gathered"), images())
        iterate(training, training.total_steps)
        means = torch.stack([network[1].running_mean for network in training.learner.networks])
        torch.testing.assert_close(training.center()[1].running_mean, means.mean(0))
        assert means.abs().min() > 0


def test_pixels_are_normalised_with_the_constants_of_the_preset(tmp_path):
    data, mean, std = images(), (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    experiment = small("sgd", epochs=1, augmentation="none", pixel_mean=mean, pixel_std=std)
    training = Training(experiment, data, Options(channels_last=False))
    x, _ = next(iter(training._plain("test")))
    expected = (data.test.images.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(x, expected)
    own = next(iter(Training(dataclasses.replace(experiment, pixel_mean=None, pixel_std=None), data)._plain("test")))[0]
    assert own.mean().abs() < 1e-5
    run = train(experiment, tmp_path / "run", data, tensorboard=False, progress=False)
    kept = augmentation_of_run(Run.open(run.path))  # what the local energy of the run is measured with
    assert kept.mean == mean and kept.evaluation().std == std and "std=(0.5, 1.0, 2.0)" in repr(kept)


def test_the_optimizers_that_presets_name():
    for name, kind in (("rmsprop", torch.optim.RMSprop), ("rmsprop-tf", TensorFlowRMSprop), ("sgd", torch.optim.SGD)):
        experiment = small("sgd", optimizer=name, stabiliser=1e-3, smoothing=0.9)
        (optimizer,) = Training(experiment, images()).learner.optimizers
        assert type(optimizer) is kind
        if name != "sgd":
            assert (optimizer.defaults["eps"], optimizer.defaults["alpha"]) == (1e-3, 0.9)
        entropic = Training(dataclasses.replace(small("esgd"), optimizer=name), images()).learner.optimizers[0]
        assert type(entropic.inner[0]) is kind


# ---------------------------------------------------------------------------------------------- flags


def experiment_of(*words, **options):
    return Command(*words, **options)._cell()


def test_flags_of_wideflat_train():
    cell, changed = experiment_of("cifar10-resnet18", stem="cifar", optimizer="rmsprop")
    assert cell.model_arguments == () and cell.optimizer == "rmsprop" and changed["stem"] == "cifar"
    cell, changed = experiment_of("cifar10-smallconvnet", algorithm="rsgd", as_coded=True, lr=0.02)
    assert (cell.lr, cell.gamma0, cell.as_coded) == (0.02, 0.002, True) and changed == {"lr": 0.02}
    cell, changed = experiment_of("cifar10-smallconvnet", algorithm="rsgd", start="fork", fork_passes=5)
    assert (cell.start, cell.fork_passes) == ("fork", 5)
    cell, _ = experiment_of("cifar10-smallconvnet", pixel_std=(0.2, 0.2, 0.2))
    assert cell.pixel_std == (0.2, 0.2, 0.2) and cell.pixel_mean is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"preset": "cifar10-smallconvnet", "stem": "cifar"}, "smallconvnet has one beginning only"),
        ({"preset": "cifar10-smallconvnet", "algorithm": "sam", "as_coded": True}, "must be one of sgd, rsgd"),
        ({"preset": "cifar10-resnet18", "algorithm": "rsgd", "start": "one"}, "gamma0 cannot be automatic"),
        ({"preset": "cifar10-smallconvnet", "algorithm": "rsgd", "fork_passes": 2}, "is for --start fork"),
        ({"preset": "cifar10-smallconvnet", "start": "one"}, "start='one' is for rsgd"),
    ],
)
def test_flags_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        experiment_of(**options)


def test_flags_are_not_for_committees():
    for options in ({"as_coded": True}, {"stem": "cifar"}, {"start": "one"}):
        with pytest.raises(ValueError, match="is not for the committee machine"):
            Command("committee-sgd-fast", **options).run()


def test_flags_reach_the_training_from_the_command_line(tmp_path, capsys):
    words = [
        "train",
        "cifar10-smallconvnet",
        "--pixel-std",
        "0.2",
        "0.2",
        "0.2",
        "--pixel-mean",
        "0.5",
        "0.5",
        "0.5",
        "--optimizer",
        "sgd",
        "--data",
    ]
    assert main([*words, str(tmp_path)]) == 1
    assert "was not found in" in capsys.readouterr().err  # all flags were understood
