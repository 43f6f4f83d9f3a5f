"""The published networks of the PGDL competition (Predicting Generalization in Deep Learning, NeurIPS 2020).

::

    public_data/
      input_data/TASK/
        model_N/config.json         {"model_config": [{"layer_name": "Conv2D", ...}, ...], "input_shape": [32, 32, 3]}
        model_N/weights.hdf5        weights as Keras saves them
        dataset_1/train/shard_*.tfrecord, dataset_1/test/...
      reference_data/TASK/
        model_configs.json          {"N": {"hparams": {name: {"current_value": ...}}, "metrics": {"test_acc": ...}}}

Networks are sequences of Keras layers, images lie in memory as (height, width, channels). Here they become torch
modules on (channels, height, width); a flattened image keeps the order of Keras, so dense weights need no reordering.
They are evaluated on the images that were published with them, which are preprocessed as in their training.

The data (public_data.zip, 8.8 GB) and their licence: google-research/google-research, folder ``pgdl``.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.checks import shown, whole
from wideflat.experiments.pgdl.keras import IDLE, MOST_PIXELS, keras_sequential, load_keras_weights
from wideflat.experiments.pgdl.tfrecord import read_examples
from wideflat.files import naming, read_json

#: More layers are never meant.
MOST_LAYERS = 1000

__all__ = ["PgdlModel", "find_models", "load_images", "of_one_architecture", "task_folder"]


@dataclass(frozen=True)
class PgdlModel:
    """One network of a task.

    Attributes:
        path: Its folder.
        layers: Its Keras layers, as ``config.json`` has them.
        input_shape: (height, width, channels), or (features,).
        hparams: The hyper-parameters it was trained with, by name, where ``model_configs.json`` is there.
        metrics: ``train_acc``, ``test_acc`` and so on, from the same file.
    """

    path: Path
    layers: list[dict[str, Any]]
    input_shape: tuple[int, ...]
    hparams: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    def architecture(self) -> str:
        """Its layers in words, without those that differ between networks of one architecture (dropout).

        Example:
            >>> layers = [{"layer_name": "Conv2D", "filters": 512}, {"layer_name": "Dropout"},
            ...           {"layer_name": "Flatten"}, {"layer_name": "Dense", "units": 10}]
            >>> PgdlModel(Path("model_1"), layers, (32, 32, 3)).architecture
            'Conv2D 512, Flatten, Dense 10'
        """
        words = []
        for layer in self.layers:
            if layer["layer_name"] not in IDLE:
                size = layer.get("filters", layer.get("units"))
                words.append(layer["layer_name"] + ("" if size is None else f" {int(size)}"))
        return ", ".join(words)

    @property
    def is_the_paper_s(self) -> bool:
        """Whether it has "3 convolutional blocks of width 512 and 1 fully connected layer of width 128" (App. B.3)."""
        filters = [layer.get("filters") for layer in self.layers if layer["layer_name"] == "Conv2D"]
        units = [layer.get("units") for layer in self.layers if layer["layer_name"] == "Dense"]
        return len(filters) == 6 and filters[-1] == 512 and units[:-1] == [128]

    def load(self) -> nn.Sequential:
        """The network with its trained weights, in eval mode."""
        with naming(self.path / "config.json"):
            model, weighted = keras_sequential(self.layers, self.input_shape)
        load_keras_weights(self.path / "weights.hdf5", weighted)
        return model.eval()


def task_folder(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the one task in ``folder`` (itself, or one or two levels below); None if there is none.

    Raises:
        ValueError: If there are several tasks.
    """
    folder = Path(folder)
    for pattern in ("model_*/config.json", "*/model_*/config.json", "input_data/*/model_*/config.json"):
        tasks = sorted({path.parent.parent for path in folder.glob(pattern) if _is_pgdl(path)})
        if len(tasks) > 1:
            names = ", ".join(str(task) for task in tasks)
            raise ValueError(f"{folder} holds several tasks of PGDL: give the folder of one of them ({names})")
        if tasks:
            return tasks[0]
    return None


def find_models(task: str | os.PathLike[str]) -> list[PgdlModel]:
    """The networks in the folder of a task, with what is known of their training.

    Args:
        task: The folder with ``model_1``, ``model_2``, ... in it. ``model_configs.json`` is looked for in it and in
            ``../../reference_data/TASK``.
    """
    task = Path(task)
    known: dict[str, Any] = {}
    for path in (
        task / "model_configs.json",
        task.resolve().parent.parent / "reference_data" / task.name / "model_configs.json",
    ):
        if path.exists():
            known = _read(path)
            break
    models = []
    for path in sorted(task.glob("model_*/config.json"), key=lambda path: _number(path.parent.name)):
        config = _read(path)
        if not isinstance(config.get("model_config"), list) or not isinstance(config.get("input_shape"), list):
            raise ValueError(f"{path} does not describe a network of PGDL: it has no model_config and input_shape")
        about = known.get(path.parent.name.removeprefix("model_"), known.get(path.parent.name, {}))
        with naming(path):
            models.append(_model(path, config, about))
    if not models:
        raise FileNotFoundError(f"{task} holds no networks of PGDL (model_*/config.json)")
    return models


def _model(path: Path, config: dict[str, Any], about: Any) -> PgdlModel:
    """A network from its description, and from what is known of its training."""
    layers, shape = config["model_config"], config["input_shape"]
    if not 1 <= len(layers) <= MOST_LAYERS or not all(isinstance(layer, dict) for layer in layers):
        raise ValueError(f"model_config must be a list of 1 to {MOST_LAYERS} layers, each a dictionary")
    if not all(isinstance(layer.get("layer_name"), str) for layer in layers):
        raise ValueError("every layer must have a layer_name")
    for size in ("filters", "units"):
        for layer in layers:
            if size in layer and not isinstance(layer[size], (int, float)):
                raise ValueError(f"{size} of a layer must be a whole number, got {shown(layer[size])}")
    whole_layers = [_whole_numbers(layer) for layer in layers]
    for part in ("hparams", "metrics"):
        if not isinstance(about, dict) or not isinstance(about.get(part, {}), dict):
            raise ValueError(f"model_configs.json must have a dictionary of {part} for it, got {shown(about)}")
    hparams = {name: value.get("current_value") for name, value in about.get("hparams", {}).items()}
    return PgdlModel(path.parent, whole_layers, tuple(map(_side, shape)), hparams, dict(about.get("metrics", {})))


def _side(size: Any) -> int:
    """A side of the images, or their channels."""
    return whole("a number of input_shape", int(size) if isinstance(size, float) else size, 1, MOST_PIXELS)


def of_one_architecture(models: Sequence[PgdlModel]) -> list[PgdlModel]:
    """Those of the paper's architecture, or, where there are none, those of the most frequent one.

    Flatness is comparable between networks of one architecture only (App. B.3).
    """
    chosen = [model for model in models if model.is_the_paper_s]
    if not chosen:
        counts = Counter(model.architecture for model in models)
        most = counts.most_common(1)[0][0]
        chosen = [model for model in models if model.architecture == most]
    first = chosen[0].architecture
    return [model for model in chosen if model.architecture == first]


def load_images(task: str | os.PathLike[str], split: str, limit: int | None = None) -> tuple[Tensor, Tensor] | None:
    """Inputs (n, C, H, W), channels last in memory, and targets of a part of the published data; None without files.

    Args:
        task: The folder of a task.
        split: ``"train"`` or ``"test"``.
        limit: Take only the first so many.
    """
    shards = sorted(Path(task).glob(f"dataset_*/{split}/shard_*.tfrecord"), key=lambda path: _number(path.stem))
    records = itertools.islice(itertools.chain.from_iterable(map(_images_of, shards)), limit)
    inputs: list[np.ndarray] = []
    targets: list[int] = []
    for image, target in records:
        if inputs and image.shape != inputs[0].shape:
            raise ValueError(
                f"{shards[0]} and others have images of different shapes, {inputs[0].shape}, {image.shape}"
            )
        inputs.append(image)
        targets.append(target)
    if not inputs:
        return None
    x = torch.from_numpy(np.stack(inputs))
    return (x.permute(0, 3, 1, 2) if x.dim() == 4 else x), torch.tensor(targets)


def _images_of(shard: Path) -> Iterator[tuple[np.ndarray, int]]:
    """The images of a file, each with its class."""
    for record in read_examples(shard):
        if not {"inputs", "output"} <= record.keys():
            raise ValueError(f"{shard} has records of {sorted(record)}; expected inputs and output")
        output = record["output"]
        if not output.size or output.dtype.kind not in "iufb" or record["inputs"].dtype.kind not in "iuf":
            raise ValueError(f"{shard} has a record whose inputs or output are no numbers, or none")
        target = int(output.argmax()) if output.size > 1 else int(output.reshape(()))
        yield record["inputs"].astype(np.float32, copy=False), target


def _is_pgdl(path: Path) -> bool:
    try:
        return "model_config" in read_json(path, "description of a network", dict)
    except (OSError, ValueError):
        return False


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path, "JSON document", lambda found: found)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _number(name: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, name))
    return int(digits or 0), name


def _whole_numbers(layer: dict[str, Any]) -> dict[str, Any]:
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in layer.items()
    }
