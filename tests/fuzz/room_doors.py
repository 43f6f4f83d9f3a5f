"""What the rooms make public (data, models, presets, committees, trainings, trainers), with right arguments."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import wideflat
from wideflat import committee, data, files, models, presets
from wideflat.baselines.rmsprop import TensorFlowRMSprop
from wideflat.committee.settings import changes_from
from wideflat.data.patterns import Patterns, binarize, check_patterns
from wideflat.entropy.measure import legendre
from wideflat.environment import choose_device
from wideflat.integrations import huggingface, lightning
from wideflat.integrations.guide import with_center
from wideflat.replica_batches import ReplicaBatches
from wideflat.training import Options, Run, Training, configuration, train

sys.path.insert(0, str(Path(__file__).parent))
from doors import Door, network, steps, weights
from doors import committee as machine

FOLDER = Path(tempfile.mkdtemp())


@functools.cache
def images() -> data.ImageData:
    def part(count: int) -> data.ImageSplit:
        generator = torch.Generator().manual_seed(count)
        pixels = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
        return data.ImageSplit(pixels, torch.arange(count) % 3)

    return data.ImageData.of("own", ("a", "b", "c"), part(12), part(6))


def cell() -> presets.Preset:
    return presets.preset("cifar10-smallconvnet", "esgd").with_data(images()).with_epochs(1)


@functools.cache
def trained() -> Path:
    train(cell(), FOLDER / "run", images(), Options(batch_norm_images=4), progress=False)
    return FOLDER / "run"


@functools.cache
def arrays() -> Path:
    """An .npz file of images, and of patterns beside it."""
    pixels, labels = np.zeros((6, 8, 8, 3), np.uint8), np.arange(6) % 3
    np.savez(FOLDER / "images.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    Patterns.from_arrays(machine()["inputs"], machine()["targets"]).save(FOLDER / "patterns.npz")
    return FOLDER


def of_run(method: str) -> Callable[..., Any]:
    """A method of a run, which is held; of a copy, since some write."""

    def call(**arguments: Any) -> Any:
        copy = FOLDER / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(trained(), copy)
        with Run.open(copy).locked() as run:
            return getattr(run, method)(**arguments)

    return call


def pictures() -> TensorDataset:
    return TensorDataset(torch.rand(6, 3, 8, 8), torch.arange(6) % 3)


def of_data(method: str) -> Callable[..., Any]:
    return lambda **arguments: getattr(images(), method)(**arguments)


def of_cell(method: str) -> Callable[..., Any]:
    return lambda **arguments: getattr(cell(), method)(**arguments)


def solve(setting: Any, arguments: dict[str, Any]) -> None:
    committee.train(setting, machine()["inputs"], machine()["targets"], [0], progress=False)


SETTING: dict[str, Any] = {"algorithm": "sgd", "lr": 0.1, "tanh_beta0": 1.0, "tanh_beta1": 0.1, "omega0": 0.5,
                           "omega1": 0.1, "stop": "errors", "max_epochs": 3, "hidden": 3, "batch_size": 2}  # fmt: skip

ROOM_DOORS: dict[str, Door] = {
    "data.from_npz": Door(data.from_npz, lambda: {"path": arrays() / "images.npz"}),
    "data.from_datasets": Door(
        data.from_datasets,
        lambda: {"train": pictures(), "test": pictures(), "size": 8, "classes": ["a", "b", "c"], "name": "own"},
    ),
    "data.find": Door(data.find, lambda: {"name": "dress-coat", "folder": FOLDER}),
    "data.search_folders": Door(data.search_folders, lambda: {"folder": FOLDER}),
    "Augmentation": Door(
        data.Augmentation,
        lambda: {"padding": 1, "flip": True, "policy": None, "cutout": 2, "size": 8, "mean": (0.5,) * 3,
                 "std": (0.2,) * 3},
        lambda made, arguments: made(torch.zeros(4, 8, 8, 3, dtype=torch.uint8), (0.5,) * 3, (0.2,) * 3,
                                     torch.Generator()),
    ),
    "Augmentation()": Door(
        data.Augmentation(padding=1, flip=True, policy="autoaugment"),
        lambda: {"pixels": torch.zeros(4, 8, 8, 3, dtype=torch.uint8), "mean": (0.5,) * 3, "std": (0.2,) * 3,
                 "generator": torch.Generator()},
    ),
    "Batches": Door(
        data.Batches,
        lambda: {"data": images(), "batch_size": 4, "split": "train", "augment": None, "seed": 0, "replica": 0,
                 "shuffle": None, "drop_last": False, "device": "cpu"},
        lambda batches, arguments: (list(batches.epoch(0)), len(batches)),
    ),
    "Batches.batch": Door(
        lambda epoch, position: data.Batches(images(), 4).batch(epoch, position), lambda: {"epoch": 0, "position": 1}
    ),
    "ImageSplit": Door(
        data.ImageSplit,
        lambda: {"images": torch.zeros(4, 3, 8, 8, dtype=torch.uint8), "targets": torch.arange(4)},
        lambda part, arguments: len(part),
    ),
    "ImageData.of": Door(
        data.ImageData.of,
        lambda: {"name": "x", "classes": ("a", "b", "c"), "train": images().train, "test": images().test,
                 "source": "", "altered": ()},
        lambda made, arguments: list(data.Batches(made, 2).epoch(0)),
    ),
    "ImageData.limited": Door(of_data("limited"), lambda: {"limit": 4, "whole_test": False}),
    "ImageData.subset": Door(of_data("subset"), lambda: {"train": 4, "test": 2}),
    "ImageData.split": Door(of_data("split"), lambda: {"name": "train"}),
    "Patterns.from_arrays": Door(
        Patterns.from_arrays, lambda: {"inputs": machine()["inputs"], "targets": machine()["targets"], "source": "x"},
        lambda made, arguments: made.save(FOLDER / "made.npz"),
    ),
    "Patterns.from_file": Door(Patterns.from_file, lambda: {"path": arrays() / "patterns.npz"}),
    "check_patterns": Door(
        check_patterns, lambda: {"inputs": machine()["inputs"], "targets": machine()["targets"], "name": "x"}
    ),
    "binarize": Door(binarize, lambda: {"images": torch.randint(256, (4, 9), dtype=torch.uint8)}),
    "committee.wrong_patterns": Door(committee.wrong_patterns, lambda: {"weight": torch.randn(2, 3, 9),
                                                                        "inputs": machine()["inputs"],
                                                                        "targets": machine()["targets"]}),
    "committee.balanced_error": Door(committee.balanced_error, lambda: {"weight": torch.randn(3, 9),
                                                                        "inputs": machine()["inputs"],
                                                                        "targets": machine()["targets"]}),
    "committee.loss": Door(
        committee.committee_loss,
        lambda: {"output": torch.randn(6), "target": machine()["targets"], "omega": 0.5, "reduction": "mean"},
    ),
    "committee.Setting": Door(committee.Setting, lambda: dict(SETTING), solve),
    "committee.changes_from": Door(changes_from, lambda: {"texts": ["lr=0.1", "hidden=3"]}),
    "legendre": Door(legendre, lambda: {"log_z": torch.randn(3), "distance": torch.rand(3), "delta": 0.1,
                                        "num_weights": 9}),
    **{f"models.{name}": Door(getattr(models, name), lambda: {"num_classes": 3, "in_channels": 3})
       for name in ("resnet110", "vgg3x512", "efficientnet_b0")},
    "models.kaiming_normal": Door(models.kaiming_normal, lambda: {"model": network()}),
    "presets.preset": Door(
        presets.preset, lambda: {"name": "cifar10-smallconvnet", "algorithm": "esgd", "as_coded": False}
    ),
    "presets.nearest": Door(presets.nearest, lambda: {"name": "cifar", "known": ["cifar10", "x"]}),
    "Preset.with_epochs": Door(of_cell("with_epochs"), lambda: {"epochs": 3}),
    "Preset.with_dropout": Door(of_cell("with_dropout"), lambda: {"dropout": 0.1}),
    "Preset.with_data": Door(of_cell("with_data"), lambda: {"data": images()}),
    "Preset.period_at": Door(of_cell("period_at"), lambda: {"tau": 1.0}),
    "Preset.from_dict": Door(
        lambda **values: presets.Preset.from_dict(values), lambda: cell().to_dict(),
        lambda made, arguments: (made.to_dict(), made.period_at(0), made.parted(0)),
    ),
    "configuration": Door(configuration, lambda: {"preset": cell(), "data": images(), "options": Options()}),
    "Training": Door(
        Training, lambda: {"preset": cell(), "data": images(), "options": Options(), "device": "cpu", "saved": None}
    ),
    "Run.open": Door(Run.open, lambda: {"path": trained()}),
    "Run": Door(Run, lambda: {"path": trained(), "config": Run.open(trained()).config, "build": None}),
    "Run.append": Door(of_run("append"), lambda: {"table": "more", "row": {"a": 1}}),
    "Run.build_model": Door(of_run("build_model"), lambda: {"build": None}),
    "Run.load_model": Door(of_run("load_model"), lambda: {"epoch": None, "device": "cpu", "build": None}),
    "Run.metrics": Door(of_run("metrics"), lambda: {"table": "metrics"}),
    "Run.must_be": Door(of_run("must_be"), lambda: {"config": Run.open(trained()).config}),
    "Run.part": Door(of_run("part"), lambda: {"name": "options"}),
    "Run.restore": Door(of_run("restore"), lambda: {"say": None, "device": "cpu"}),
    "Run.result": Door(of_run("result"), lambda: {"epoch": None}),
    "Run.save_checkpoint": Door(of_run("save_checkpoint"), lambda: {"step": 1, "state": {"a": torch.ones(2)}}),
    "Run.save_model": Door(of_run("save_model"), lambda: {"model": network(), "result": {"a": 1}, "epoch": None}),
    "huggingface.EntropicAround": Door(
        huggingface.EntropicAround,
        lambda: {"params": weights(), "inner": torch.optim.AdamW, "inner_steps": 2},
        steps,
    ),
    "lightning.load_state_dict": Door(
        lambda **state: lightning.FocusingCallback().load_state_dict(state),
        lambda: lightning.FocusingCallback().state_dict(),
    ),
    "with_center": Door(with_center, lambda: {"optimizers": [wideflat.EntropySGD(weights())]}),
    "RMSprop": Door(TensorFlowRMSprop, lambda: {"params": weights(), "lr": 0.1, "alpha": 0.9, "eps": 1e-3,
                                                "weight_decay": 0.0, "momentum": 0.9}, steps),
    "ReplicaBatches": Door(
        ReplicaBatches, lambda: {"loader": DataLoader([0, 1, 2, 3], batch_size=2), "num_replicas": 2, "seed": 0},
        lambda batches, arguments: list(batches),
    ),
    "TargetDistance.load_state_dict": Door(
        lambda **state: wideflat.TargetDistance(wideflat.EntropySGD(weights()), 0.1).load_state_dict(state),
        lambda: wideflat.TargetDistance(wideflat.EntropySGD(weights()), 0.1).state_dict(),
    ),
    "choose_device": Door(choose_device, lambda: {"name": "cpu"}),
    "files.sha256": Door(files.sha256, lambda: {"path": arrays() / "images.npz"}),
    "files.read_npz": Door(files.read_npz, lambda: {"path": arrays() / "images.npz"}),
}  # fmt: skip
