"""A state on disk: any nesting of tensors and plain values, whole or not at all.

It is two files: tensors (safetensors) and all the rest (JSON), which names the SHA-256 of the first and of itself. Each
is written under another name, synchronised and renamed, the JSON last: a state exists only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from wideflat.checks import a_kind
from wideflat.checks.records import in_json
from wideflat.files import DamagedState, atomic_write, read_whole, write_json

__all__ = ["DamagedState", "load_state", "read_about", "remove_state", "save_state"]

#: Version of the form; a state of a later version is refused instead of misread.
FORMAT = 1
#: The most bytes of each of the two files of a state.
MOST_STATE = 2**36


def save_state(path: str | os.PathLike[str], state: Any, about: dict[str, Any] | None = None) -> None:
    """Write ``state`` to ``path`` + ``.safetensors`` (its tensors) and ``path`` + ``.json`` (all the rest).

    Args:
        path: Where, without a suffix. A state of that name is replaced whole, or not at all.
        state: Any nesting of dictionaries, lists and tuples of tensors, numbers, strings, booleans and None, such as
            the ``state_dict()`` of models and optimizers. Memory formats (channels last) are kept.
        about: Something to note beside the state, in the JSON file.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "state"
        >>> save_state(path, {"weight": torch.ones(2), "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], 3: None})
        >>> load_state(path)
        {'weight': tensor([1., 1.]), 'groups': [{'lr': 0.1, 'betas': (0.9, 0.99)}], 3: None}
    """
    from safetensors.torch import save

    table, blob = _files(path)
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "", tensors)
    data = save(tensors)
    with atomic_write(blob, "wb") as file:
        file.write(data)
    about = None if about is None else json.loads(in_json("about", about))
    content = {"format": FORMAT, "about": about, "tensors_sha256": hashlib.sha256(data).hexdigest(), "state": tree}
    write_json(table, {**content, "sha256": _digest(content)})


def load_state(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Any:
    """Read what :func:`save_state` wrote, bit for bit.

    Args:
        path: The name given to :func:`save_state`.
        device: Where the tensors go.

    Raises:
        DamagedState: If a file is missing, truncated or altered; the message names it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    table, blob = _files(path)
    content = _read_json(table)
    data = _read(blob)
    actual = hashlib.sha256(data).hexdigest()
    if actual != content["tensors_sha256"]:
        raise DamagedState(
            f"{blob} is damaged: expected SHA-256 {content['tensors_sha256']}, got {actual} ({len(data)} bytes)"
        )
    try:
        there = load(data)
    except SafetensorError as error:
        raise DamagedState(f"{blob} is damaged: {error}") from None
    tensors = {name: tensor.to(device) for name, tensor in there.items()}
    try:
        return _decode(content["state"], tensors)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedState(f"{table} is damaged: {type(error).__name__}: {error!s:.100}") from None


def read_about(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What was noted beside a state, given its name; None if there is no such state."""
    table, _ = _files(path)
    return _read_json(table)["about"] if table.exists() else None


def remove_state(path: str | os.PathLike[str]) -> None:
    """Remove both files of a state; the JSON first, so that no half of it looks whole."""
    for file in _files(path):
        file.unlink(missing_ok=True)


def _files(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The JSON file and the tensors of a state of this name."""
    path = Path(path)
    return path.with_name(path.name + ".json"), path.with_name(path.name + ".safetensors")


def _read(path: Path) -> bytes:
    try:
        return read_whole(path, MOST_STATE)
    except FileNotFoundError:
        raise DamagedState(f"{path} is missing") from None
    except (ValueError, IsADirectoryError) as error:
        raise DamagedState(f"{path} is damaged: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
        expected = content.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # ValueError: neither JSON nor UTF-8
        raise DamagedState(
            f"{path} is damaged: it is not a whole JSON document ({path.stat().st_size} bytes)"
        ) from None
    if _digest(content) != expected:
        raise DamagedState(f"{path} is damaged: expected SHA-256 {expected}, got {_digest(content)}")
    if not isinstance(content.get("format"), int) or not {"about", "tensors_sha256", "state"} <= content.keys():
        raise DamagedState(f"{path} is damaged: it is no state of a training")
    if content["format"] > FORMAT:
        raise RuntimeError(
            f"{path} was written by a later version of wideflat (format {content['format']}, this one reads up to "
            f"{FORMAT}): pip install --upgrade wideflat"
        )
    return content


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON form of ``value``; its tensors go to ``tensors`` under names that tell where they were."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value, name, tensors)
    if isinstance(value, (list, tuple)):
        items = [_encode(item, _within(name, i), tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        inner = {key: _encode(item, _within(name, key), tensors) for key, item in value.items()}
        plain = all(isinstance(key, str) and not key.startswith("$") for key in inner)
        return inner if plain else {"$items": [[key, item] for key, item in inner.items()]}
    raise TypeError(f"a state holds tensors, numbers, strings, lists and dictionaries; {name or 'it'} is {type(value)}")


def _within(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _encode_tensor(value: Tensor, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if is_lazy(value) or value.is_meta or value.layout is not torch.strided or value.is_nested or value.is_quantized:
        raise TypeError(f"a state holds dense tensors with content; {name} is {a_kind(value)} without them")
    while name in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
        name += "'"
    tensors[name] = value.detach().to("cpu", copy=True).contiguous()
    channels_last = value.dim() == 4 and not value.is_contiguous() and _is_channels_last(value)
    return {"$tensor": name, **({"channels_last": True} if channels_last else {})}


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        tensor = tensors[value["$tensor"]]
        return tensor.contiguous(memory_format=torch.channels_last) if value.get("channels_last") else tensor
    if "$items" in value:
        return {key: _decode(item, tensors) for key, item in value["$items"]}
    if "$tuple" in value:
        return tuple(_decode(item, tensors) for item in value["$tuple"])
    return {key: _decode(item, tensors) for key, item in value.items()}


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)
