"""Networks of others for Figure 7: a task of the PGDL competition, or runs of ``wideflat train``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wideflat.experiments.experiment import Experiment
from wideflat.experiments.networks import Measurement, Network
from wideflat.experiments.pgdl import PgdlModel, find_models, load_images, of_one_architecture, task_folder
from wideflat.experiments.trainings import Trainings
from wideflat.experiments.workers import Answer, Workers
from wideflat.presets import Preset
from wideflat.training.runs import Run

__all__ = ["GivenNetworks", "runs_of_one_architecture"]


class GivenNetworks:
    """The work of Figure 7 where networks are given: measure those of one architecture.

    Args:
        folder: A task of PGDL in its published format (:mod:`wideflat.experiments.pgdl`), or a folder of runs.
        measurement: How they are measured.
        trainings: Where the data of runs are.
        write: Writes the table of the networks that are measured so far.
    """

    def __init__(
        self,
        folder: Path,
        measurement: Measurement,
        trainings: Trainings,
        write: Callable[[Sequence[Network]], None],
    ) -> None:
        self.folder, self.measurement, self.trainings, self.write = folder, measurement, trainings, write

    def cost(self) -> str:
        """How many passes over the images."""
        return f"the networks in {self.folder}, {self.measurement.realisations} passes over the training images each."

    def compute(self, experiment: Experiment, workers: Workers | None = None) -> None:
        """Measure them, one after the other in this process."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} is not a folder of networks")
        task = task_folder(self.folder)
        networks: list[Network] = []
        for network in self._of_pgdl(task) if task is not None else self._of_runs():
            networks.append(network)
            self.write(networks)

    def compute_piece(self, name: str) -> Answer:
        """They are not measured in pieces."""
        raise ValueError(f"{self.folder}: given networks are not measured in pieces, got {name!r}")

    def _of_pgdl(self, task: Path) -> Iterator[Network]:
        """Networks of one architecture of a task, measured on the images that were published with them."""
        models = of_one_architecture(find_models(task))
        train = load_images(task, "train", self.trainings.limit_data)
        if train is None:
            raise FileNotFoundError(
                f"{task} has no training images (dataset_1/train/shard_*.tfrecord): the networks of PGDL are measured "
                "on the images published with them, which are prepared as in their training"
            )
        known = all("test_acc" in model.metrics for model in models)
        test = None if known else load_images(task, "test")
        if test is None and not known:
            raise FileNotFoundError(f"{task} has neither model_configs.json with test accuracies nor test images")
        for model in models:
            yield self._pgdl_network(model, train, test)

    def _pgdl_network(
        self, model: PgdlModel, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor] | None
    ) -> Network:
        network = model.load().to(self.measurement.device)
        profile = self.measurement.of_network(model.name, network, train)
        accuracy = model.metrics.get("test_acc")
        if accuracy is None:
            assert test is not None
            error = _error(network, *test)
        else:
            error = 1 - accuracy
        hparams = {name.lower(): value for name, value in model.hparams.items()}
        return Network(
            model.name,
            profile,
            profile.baseline,
            error,
            dropout=hyper_parameter(hparams, "dropout"),
            batch_size=hyper_parameter(hparams, "batch"),
            weight_decay=hyper_parameter(hparams, "decay", "regular", "l2"),
        )

    def _of_runs(self) -> Iterator[Network]:
        """Finished runs of one architecture on one data set."""
        for preset, run in runs_of_one_architecture(self.folder):
            about = run.part("data")
            data = self.trainings.whole_images(preset.dataset, self.trainings.allow_altered or bool(about["altered"]))
            profile = self.measurement.of_run(run, data.subset(about["train"], about["test"]))
            yield Network.of_run(preset, run, profile)


def runs_of_one_architecture(folder: Path) -> list[tuple[Preset, Run]]:
    """The finished runs in a folder, by name: those of the most frequent pair of data set and architecture."""
    runs = []
    for path in sorted(folder.glob("*/config.json")):
        with contextlib.suppress(FileNotFoundError, ValueError, RuntimeError, KeyError):
            run = Run.open(path.parent)
            if run.result() is not None:
                runs.append((run.experiment, run))
    if not runs:
        raise FileNotFoundError(
            f"{folder} holds neither networks of PGDL (model_*/config.json and weights.hdf5) nor finished runs of "
            "wideflat train"
        )
    most = Counter(_architecture(preset) for preset, _ in runs).most_common(1)[0][0]
    return [(preset, run) for preset, run in runs if _architecture(preset) == most]


def _architecture(preset: Preset) -> tuple[Any, ...]:
    own = tuple(argument for argument in preset.model_arguments if argument[0] != "dropout")
    return preset.dataset, preset.model, own


def hyper_parameter(hparams: Mapping[str, Any], *words: str) -> float | None:
    """The first numeric hyper-parameter whose name contains one of the words.

    Example:
        >>> hyper_parameter({"l2_regularization": 0.1, "dropout": "none"}, "decay", "l2")
        0.1
    """
    for name, value in hparams.items():
        if any(word in name for word in words) and isinstance(value, (int, float)):
            return float(value)
    return None


def _error(network: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    device = next(network.parameters()).device
    with torch.inference_mode():
        wrong = sum(
            int((network(x.to(device)).argmax(1).cpu() != y).sum())
            for x, y in zip(inputs.split(500), targets.split(500), strict=True)
        )
    return wrong / len(targets)
