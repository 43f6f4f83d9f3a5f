"""Checkpoints of replicas on many ranks, with torch.distributed.checkpoint: every rank writes what it holds.

A checkpoint is a folder of safetensors files (nothing in it can execute) whose keys begin with the replica they belong
to, ``replica0.model.conv1.weight``, and a ``manifest.json`` with their checksums. Each rank writes its own part;
sharded parameters stay sharded, and may be read by another number of data-parallel ranks. The folder takes its name
only when all of it is on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict
from torch.optim import Optimizer

from wideflat.distributed.mesh import MeshReplicas
from wideflat.files import DamagedState, sha256, write_json

if TYPE_CHECKING:
    from wideflat.replicas import ReplicaCoupling

__all__ = ["load_replicas", "save_replicas"]


def save_replicas(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    coupling: ReplicaCoupling,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write the state of all replicas to the folder ``path``; all ranks call it, and see the same file system.

    Args:
        path: The folder; one of that name is replaced, whole or not at all.
        model: The network of this rank (bare, in DistributedDataParallel, or sharded).
        optimizer: Of this rank.
        coupling: Made with ``mesh=``.
        extra: More to keep, of each replica: anything that JSON can carry, such as the state of `wideflat.Focusing`.
    """
    group = _group(coupling)
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    tensors, plain = _state(model, optimizer, coupling, extra)
    keys = {f"replica{group.index}.{name}": value for name, value in tensors.items()}
    dcp.save(keys, storage_writer=HuggingFaceStorageWriter(str(part), save_distributed=True))
    write_json(part / f"replica{group.index}.rank{dist.get_rank()}.json", plain)
    dist.barrier()
    if first:
        files = {file.name: sha256(file) for file in sorted(part.iterdir())}
        write_json(part / "manifest.json", {"num_replicas": group.num_replicas, "files": files})
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.replace(path, old)
        os.replace(part, path)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load_replicas(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    coupling: ReplicaCoupling,
    *,
    from_barycenter: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Go on from what `save_replicas` wrote; all ranks call it.

    On as many replicas as were saved each gets its own state, bit for bit. On another number there is no such state;
    when asked to (``from_barycenter``), all replicas start from the barycenter of those saved, with optimizers at rest.

    Args:
        path: The folder.
        model: The network of this rank.
        optimizer: Of this rank.
        coupling: Made with ``mesh=``.
        from_barycenter: Start from the barycenter if the number of replicas differs.
        say: Where it is said that this was done.

    Returns:
        What was given as ``extra`` when this replica (or the first one) was saved.

    Raises:
        DamagedState: If a file is missing, truncated or altered; the message names it.
        ValueError: If another number of replicas was saved, and ``from_barycenter`` is false.
    """
    group = _group(coupling)
    path = Path(path)
    saved = _verified(path)
    if saved == group.num_replicas:
        source = group.index
        tensors, _ = _state(model, optimizer, coupling, None)
        plain = _plain(path, source)
        tensors = _load(path, source, tensors)
        model_state, optimizer_state = _unflatten(tensors, plain)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    elif not from_barycenter:
        raise ValueError(
            f"{path} holds {saved} replicas and there are {group.num_replicas} here; start with {saved}, or ask for "
            "from_barycenter=True: all replicas then start from the barycenter of those saved, optimizers at rest"
        )
    else:
        source = 0
        plain = _plain(path, source)
        tensors, _ = _state(model, optimizer, coupling, None)
        own = {name: value for name, value in tensors.items() if name.startswith("model.")}
        kept = {name: value for name, value in tensors.items() if name.startswith("coupling.")}
        tensors = _load(path, source, kept) if kept else {}
        mean: dict[str, Tensor] = {}
        for a in range(saved):
            for name, value in _load(path, a, {name: torch.empty_like(value) for name, value in own.items()}).items():
                if not value.is_floating_point():
                    mean.setdefault(name, value)
                else:
                    mean[name] = mean[name] + value.double() / saved if name in mean else value.double() / saved
        weights: dict[str, Any] = {}
        for name, value in mean.items():
            weights[name.removeprefix("model.")] = value.to(own[name].dtype)
        set_model_state_dict(model, weights)
        say(f"{path} holds {saved} replicas; all {group.num_replicas} here start from their barycenter, at rest")
    coupling.load_state_dict(_coupling_state(tensors, plain["coupling"]))
    return plain["extra"]


def _group(coupling: ReplicaCoupling) -> MeshReplicas:
    if not isinstance(coupling.group, MeshReplicas):
        raise TypeError("checkpoints of torch.distributed are for replicas on ranks: ReplicaCoupling(model, mesh=...)")
    return coupling.group


def _state(
    model: nn.Module, optimizer: Optimizer, coupling: ReplicaCoupling, extra: dict[str, Any] | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of this rank by name, and everything else."""
    found: tuple[Any, Any] = get_state_dict(model, optimizer)
    weights, state = found
    tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in weights.items()}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{parameter}"] = value
            else:
                numbers.setdefault(name, {})[parameter] = value
    groups = [dict(each) for each in state["param_groups"]]
    settings = {}
    for name, value in coupling.state_dict().items():
        if isinstance(value, list):  # the center of EASGD
            tensors |= {f"coupling.{name}.{number}": tensor for number, tensor in enumerate(value)}
        else:
            settings[name] = value
    return tensors, {"numbers": numbers, "groups": groups, "coupling": settings, "extra": extra or {}}


def _coupling_state(tensors: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    """What a coupling loads: its settings, and the lists of tensors that it keeps."""
    lists: dict[str, list[Tensor]] = {}
    for key, value in tensors.items():  # in the order in which they were named
        if key.startswith("coupling."):
            lists.setdefault(key.split(".")[1], []).append(value)
    return {**settings, **lists}


def _unflatten(tensors: dict[str, Tensor], plain: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    weights: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        kind, rest = key.split(".", 1)
        if kind == "model":
            weights[rest] = value
        elif kind == "optimizer":
            name, parameter = rest.split(".", 1)
            state.setdefault(parameter, {})[name] = value
    for name, values in plain["numbers"].items():
        for parameter, value in values.items():
            state.setdefault(parameter, {})[name] = value
    return weights, {"state": state, "param_groups": plain["groups"]}


def _load(path: Path, replica: int, into: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill the tensors with those of a saved replica."""
    keys = {f"replica{replica}.{name}": value for name, value in into.items()}
    dcp.load(keys, storage_reader=HuggingFaceStorageReader(str(path)))
    prefix = f"replica{replica}."
    return {name.removeprefix(prefix): value for name, value in keys.items()}


def _plain(path: Path, replica: int) -> dict[str, Any]:
    """What is not a tensor; the same on all ranks of a replica."""
    return json.loads(min(path.glob(f"replica{replica}.rank*.json")).read_text())


def _verified(path: Path) -> int:
    """The number of replicas in a checkpoint whose files are all as they were written; the first rank looks."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [_verify(path)]
        except (DamagedState, OSError) as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], str):
        raise DamagedState(answer[0])
    return int(answer[0])


def _verify(path: Path) -> int:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except FileNotFoundError:
        raise DamagedState(f"{path} is not a checkpoint of replicas: it has no manifest.json") from None
    except ValueError:
        raise DamagedState(f"{path / 'manifest.json'} is damaged: it is not a whole JSON document") from None
    for name, expected in manifest["files"].items():
        if not (path / name).exists():
            raise DamagedState(f"{path / name} is missing")
        if (actual := sha256(path / name)) != expected:
            raise DamagedState(f"{path / name} is damaged: expected SHA-256 {expected}, got {actual}")
    return int(manifest["num_replicas"])
