"""The network that a command is given: a run of ``wideflat train``, or a checkpoint and a function of the user."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wideflat.commands import UsageError
from wideflat.files import must_not_swell
from wideflat.training.runs import Run

__all__ = ["from_checkpoint", "load_weights", "named_function", "run_at"]


def run_at(path: Path, committees: str = "") -> Run:
    """The run at a path.

    Args:
        path: A run directory.
        committees: What to say of one that holds committee machines, for a command that does not measure these.
    """
    if committees and ((path / "solutions.npz").exists() or path.suffix == ".npz"):
        raise UsageError(f"{path} holds committee machines, {committees}")
    if path.is_file() and not (path.parent / "config.json").exists():
        raise UsageError(
            f"{path} is a checkpoint: give --build module:function, a function that returns the model and its "
            "training data"
        )
    return Run.open(path)


def from_checkpoint(build: str, path: Path, device: str, measure: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The network of a checkpoint, its data and its options, as a function of the user makes them.

    Args:
        build: ``module:function``.
        path: The checkpoint, which is loaded into the network.
        device: Where the network goes.
        measure: What the options are of, for an error.
    """
    built = named_function(build)()
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not isinstance(built[0], nn.Module):
        raise ValueError(
            f"{build} must return (model, data) or (model, data, options of {measure}); got {type(built).__name__}"
        )
    load_weights(built[0], path)
    return built[0].to(device), built[1], dict(built[2]) if len(built) == 3 else {}


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a checkpoint into ``model`` without executing anything that is in it.

    Args:
        model: The network.
        path: A ``.safetensors`` file, or a state dictionary that ``torch.save`` wrote, also one that is an entry
            ``state_dict``, ``model_state_dict`` or ``model`` of a larger dictionary. Prefixes that wrappers add to the
            names (``module.``, ``_orig_mod.``) are taken off.
    """
    state = _read_checkpoint(path)
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no state dictionary of tensors; save the model's state_dict()")
    for prefix in ("module.", "_orig_mod."):
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from None


def _read_checkpoint(path: Path) -> Any:
    """What is in a checkpoint; never anything but tensors and plain values."""
    try:
        must_not_swell(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint {path}") from None
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint of tensors: {(str(error) or type(error).__name__).splitlines()[0]} "
            "(files that contain other objects are not loaded; save the model's state_dict())"
        ) from None


def named_function(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` names, looked for in the current folder too."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise UsageError(f"--build must be module:function, got {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise UsageError(f"--build {name}: {error}. Modules are looked for in the current folder too") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise UsageError(f"--build {name}: module {module} has no function {function}")
    return found
