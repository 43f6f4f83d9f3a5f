import dataclasses
import json
import math

import pytest
import torch

from wideflat.presets import Preset, preset
from wideflat.training.runs import Run


def test_fewer_epochs_rescale_everything():
    cell = preset("cifar10-pyramidnet", "rsgd").with_epochs(10)
    assert cell.period_changes == ((pytest.approx(22 / 3), 3),)
    assert cell.lr * cell.schedule(5) == pytest.approx(0.025)
    cell = preset("cifar100-efficientnet").with_epochs(35)
    assert cell.schedule.decay_every == pytest.approx(0.2)
    short = preset("cifar10-resnet110").with_epochs(82)
    assert short.lr * short.schedule(0.49) == pytest.approx(0.01)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"epochs": 0}, "epochs must be a whole number >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"lr": -1.0}, "lr must be a finite number >= 0, got -1"),
        ({"lr": math.nan}, "lr must be a finite number >= 0, got nan"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"gamma0": -1.0}, "gamma0, unless it is None.* must be a finite number >= 0"),
        ({"gamma_factor": 0.0}, "gamma_factor must be a finite number > 0"),
        ({"focusing": "linear"}, "focusing must be one of exponential, cosine, constant, got 'linear'"),
        ({"dataset": "mnist"}, "dataset must be one of cifar10"),
        ({"period_changes": ((3, 0),)}, "the period from epoch 3 on must be a whole number >= 1"),
    ],
)
def test_wrong_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(preset("cifar10-smallconvnet", "rsgd"), **changes)


def test_parts_of_an_image_are_refused():
    with pytest.raises(TypeError, match=r"batch_size must be a whole number >= 1, got 1\.5"):
        dataclasses.replace(preset("cifar10-smallconvnet", "rsgd"), batch_size=1.5)


def test_wrong_names_suggest_the_nearest():
    with pytest.raises(ValueError, match="a preset has no learning_rate"):
        Preset.from_dict({"learning_rate": 1})
    cell = dataclasses.replace(preset("cifar10-resnet18"), model="resnet-18")
    with pytest.raises(ValueError, match="Did you mean 'resnet18'"):
        cell.build_model()


# ---------------------------------------------------------------------------------------------- stems


@pytest.mark.parametrize(
    "name, with_7x7, with_3x3",
    [
        ("cifar10-resnet18", 11_181_642, 11_173_962),  # 64 x 3 x (7 x 7 - 3 x 3) = 7,680 more
        ("tinyimagenet-resnet50", 23_917_832, 23_910_152),
        ("tinyimagenet-densenet", 7_158_856, 7_151_048),  # and a batch norm of 64 channels
    ],
)
def test_the_stem_is_that_of_the_authors_program_and_the_other_is_reachable(name, with_7x7, with_3x3):
    def parameters(cell):
        with torch.device("meta"):
            return sum(p.numel() for p in cell.build_model().parameters())

    for algorithm in ("sgd", "rsgd", "esgd", "rsgdxy", "sam", "parle"):
        cell = preset(name, algorithm)
        assert dict(cell.model_arguments) == {"stem": "imagenet"} and "model_arguments" in dict(cell.notes)
    assert parameters(cell) == with_7x7
    assert parameters(cell.with_stem("cifar")) == with_3x3
    assert cell.with_stem("cifar").with_stem("imagenet").model_arguments == cell.model_arguments


def test_dropout_reaches_networks_that_have_it():
    cell = preset("cifar10-smallconvnet", "esgd").with_dropout(0.25)
    model = cell.build_model()
    assert model.dropout.p == 0.25 and cell.with_dropout(0).build_model().dropout is None
    assert model.state_dict().keys() == preset("cifar10-smallconvnet").build_model().state_dict().keys()
    x = torch.ones(1, 3, 32, 32)
    assert not torch.equal(model(x), model(x)) and torch.equal(model.eval()(x), model(x))
    with pytest.raises(ValueError, match="resnet18 has no dropout: that is for smallconvnet"):
        preset("cifar10-resnet18").with_dropout(0.5)
    with pytest.raises(ValueError, match="dropout must be"):
        preset("cifar10-smallconvnet").with_dropout(1.5)


def test_stems_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="stem must be one of cifar, imagenet, got 'mnist'"):
        preset("cifar10-resnet18").with_stem("mnist")
    with pytest.raises(ValueError, match="smallconvnet has one beginning only"):
        preset("cifar10-smallconvnet").with_stem("cifar")


# -------------------------------------------------------------------------------------- runs of earlier versions

#: Fields that the first version did not write.
LATER = {
    "pixel_mean",
    "pixel_std",
    "start",
    "fork_passes",
    "batch_norm",
    "gamma_clock",
    "gamma_in_lr",
    "as_coded",
    "coded",
}


def as_first_written(cell, **changes):
    """The configuration of a cell as the first version wrote it."""
    return {"experiment": {name: value for name, value in cell.to_dict().items() if name not in LATER} | changes}


@pytest.mark.parametrize("algorithm", ["sgd", "rsgd", "esgd"])
def test_a_run_without_a_stem_is_the_network_that_it_was_trained_with(tmp_path, algorithm):
    cell = preset("cifar10-resnet18", algorithm)
    run = Run.create(tmp_path / "run", as_first_written(cell, model_arguments=[]))
    with torch.device("meta"):
        assert Run.open(run.path).build_model().conv1.kernel_size == (3, 3)
    run.must_be({"experiment": cell.with_stem("cifar").to_dict()})  # goes on with --stem cifar
    with pytest.raises(ValueError, match=r"model_arguments is .* there and .*imagenet.* here"):
        run.must_be({"experiment": cell.to_dict()})


def test_a_run_with_torchs_rmsprop_goes_on_with_it(tmp_path):
    cell = preset("cifar100-efficientnet")
    run = Run.create(tmp_path / "run", as_first_written(cell, optimizer="rmsprop"))
    assert Preset.from_dict(run.config["experiment"]).optimizer == "rmsprop"
    run.must_be({"experiment": dataclasses.replace(cell, optimizer="rmsprop").to_dict()})
    with pytest.raises(ValueError, match="optimizer is rmsprop there and rmsprop-tf here"):
        run.must_be({"experiment": cell.to_dict()})


def test_configurations_of_the_first_version_are_read():
    cell = preset("cifar10-smallconvnet", "rsgd")
    first = json.loads(json.dumps(as_first_written(cell)["experiment"]))
    assert Preset.from_dict(first) == cell


# ---------------------------------------------------------------------------------------------- starts and pixels


@pytest.mark.parametrize(
    "algorithm, changes, message",
    [
        ("rsgd", {"start": "two"}, "start must be one of independent, one, fork, got 'two'"),
        ("rsgd", {"start": "one", "gamma0": None}, "gamma0 cannot be automatic with start='one'.* give a number"),
        ("parle", {"start": "one", "replica_gamma0": None}, "replica_gamma0 cannot be automatic"),
        ("sgd", {"start": "one"}, "start='one' is for rsgd, rsgdxy, easgd, parle, not for sgd"),
        ("easgd", {"start": "fork"}, "start='fork' is for rsgd, rsgdxy, not for easgd"),
        ("rsgd", {"start": "fork", "fork_passes": 0}, "fork_passes must be a whole number >= 1"),
        ("rsgd", {"batch_norm": "first"}, "batch_norm must be one of refresh, gathered"),
        ("esgd", {"gamma_clock": "pass"}, "gamma_clock must be one of step, cycle, epoch"),
        ("sgd", {"pixel_std": (0.2,)}, r"pixel_std must have a number > 0 for each of the 3 channels of cifar10"),
        ("sgd", {"pixel_std": (0.2, 0.0, 0.2)}, r"pixel_std must have a number > 0"),
        ("rsgd", {"gamma_in_lr": True}, "gamma_in_lr is for the outer step of Entropy-SGD, not for rsgd"),
        ("sgd", {"optimizer": "adam"}, "optimizer must be one of sgd, rmsprop-tf, rmsprop"),
    ],
)
def test_wrong_new_values_are_refused(algorithm, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(preset("cifar10-smallconvnet", algorithm), **changes)


def test_a_fork_parts_after_its_passes():
    cell = dataclasses.replace(preset("cifar10-smallconvnet", "rsgd"), start="fork", fork_passes=3)
    assert [cell.parted(tau) for tau in (0, 2.99, 3, 50)] == [False, False, True, True]
    assert preset("cifar10-smallconvnet", "rsgd").parted(0)
