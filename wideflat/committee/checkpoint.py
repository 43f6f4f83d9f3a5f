"""Training in the middle, on disk: the weights of all restarts at their last refresh, and whose they are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wideflat.committee import archive
from wideflat.data.patterns import Patterns

__all__ = ["Restart", "digest", "read", "write"]

_FORMAT = "wideflat committee checkpoint 1"


@dataclass
class Restart:
    """Where one restart stands: its weights at an epoch, and how it ended if it has."""

    seed: int
    weights: Tensor  # (y, H, N)
    epoch: int = 0
    stop: str = ""
    value: float = float("nan")


def digest(patterns: Patterns) -> str:
    """Of the training patterns: a checkpoint goes on with those that it began with."""
    found = hashlib.sha256(patterns.inputs.contiguous().numpy().tobytes())
    found.update(patterns.targets.contiguous().numpy().tobytes())
    return found.hexdigest()


def write(path: str | os.PathLike[str], identity: dict[str, Any], restarts: Sequence[Restart]) -> None:
    """Write a checkpoint, whole or not at all.

    Args:
        path: The file.
        identity: All that the training depends on; `read` compares it.
        restarts: As they are at their last refresh.
    """
    lines = [{"epoch": restart.epoch, "stop": restart.stop, "value": restart.value} for restart in restarts]
    weights = torch.stack([restart.weights for restart in restarts]).numpy()
    record = {"format": _FORMAT, "identity": identity, "restarts": lines}
    archive.write(path, record, {"weights": weights}, compressed=False)


def read(path: str | os.PathLike[str], identity: dict[str, Any], restarts: Sequence[Restart]) -> list[Restart]:
    """The restarts as a checkpoint has them.

    Args:
        path: The file.
        identity: Of the training that is to go on.
        restarts: As they begin; they say which shape and type the weights must have.

    Raises:
        ValueError: The file is damaged, its arrays are not those that its record speaks of, or it is of another run.
    """
    where = os.fspath(path)
    try:
        record, arrays = archive.read(path, _FORMAT)
        saved, lines = record["identity"], record["restarts"]
        differing = [name for name, value in json.loads(json.dumps(identity)).items() if saved.get(name) != value]
        if not differing:
            shape = (len(restarts), *restarts[0].weights.shape)
            weights = torch.from_numpy(archive.check_shapes(arrays, {"weights": shape})["weights"])
            found = [_at(*item) for item in zip(restarts, weights, lines, strict=True)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{where} is not a whole checkpoint of committee training ({error}); delete it to start again"
        ) from error
    if differing:
        raise ValueError(
            f"{where} is the checkpoint of another run: it differs in {', '.join(differing)}; "
            "give the same arguments, or another file"
        )
    return found


def _at(restart: Restart, weights: Tensor, line: dict[str, Any]) -> Restart:
    """A restart where a line of the record has it."""
    epoch, stop, value = line["epoch"], line["stop"], line["value"]
    if not (isinstance(epoch, int) and epoch >= 0 and isinstance(stop, str) and isinstance(value, (int, float))):
        raise ValueError(f"a restart is said to be at {line}")
    return dataclasses.replace(restart, weights=weights.to(restart.weights.dtype), epoch=epoch, stop=stop, value=value)
