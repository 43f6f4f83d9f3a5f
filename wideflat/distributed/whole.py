"""A sharded network as an ordinary one: a copy with all of its weights on this rank, for what measures networks.

The measures point parameters at other memory, take them apart and put noise on them that is a function of the place;
all of this is written for whole tensors. So a sharded network (``fully_shard``, tensor parallelism) is gathered once
and measured as if it had never been sharded. It must fit on one device for that.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wideflat.centered import warn_off_center
from wideflat.kernels.shards import is_sharded

__all__ = ["whole_network", "whole_tensors"]

#: Where the hooks and the methods live that gather parameters and turn inputs into DTensors.
_MACHINERY = "torch.distributed."
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


@torch.no_grad()
def whole_network(model: nn.Module) -> nn.Module:
    """The network itself if it is not sharded; else a copy of it that is not. All ranks call it.

    The copy has the classes, names, buffers and hooks of the network, but for those of ``torch.distributed``. The
    network need not be the module that was sharded as the root: a part of that, or something around it, will do.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> whole_network(model) is model
        True
    """
    if not isinstance(model, nn.Module):  # whoever asked says what is wrong with it
        return model
    sharded: list[Any] = [module for module in model.modules() if _is_fully_sharded(module)]
    for module in sharded:  # after a forward pass the root holds other parameters, whole ones
        module.reshard()
    if not sharded and not any(is_sharded(tensor) for tensor in (*model.parameters(), *model.buffers())):
        return model
    warn_off_center(model.parameters())
    model = getattr(model, "_orig_mod", model)  # compiled: the machinery is compiled into it
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_sharded(tensor):
            whole: Any = tensor.detach()
            full = whole.full_tensor()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(full, tensor.requires_grad) if is_parameter else full
    for module in sharded:  # first all of them, since they refer to each other
        memo[id(module)] = object.__new__(_own_class(module))
    for module in sharded:
        memo[id(module)].__dict__.update(copy.deepcopy(_own_attributes(module), memo))
    found = copy.deepcopy(model, memo)
    for module in found.modules():  # tensor parallelism changes no class
        module.__dict__.update({name: _others(getattr(module, name)) for name in _HOOKS if hasattr(module, name)})
    return found


def whole_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same by names, each as a whole tensor: the state dict of a sharded network, for one that is not.

    >>> whole_tensors({"weight": torch.ones(2)})["weight"].tolist()
    [1.0, 1.0]
    """
    found = dict(tensors)
    for name, value in found.items():
        if isinstance(value, Tensor) and is_sharded(value):
            found[name] = value.detach().full_tensor()  # type: ignore[attr-defined] # a DTensor
    return found


def _is_fully_sharded(module: nn.Module) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _own_class(module: nn.Module) -> type:
    """The class that a module had before ``fully_shard`` put its own in front of it."""
    classes = type(module).__mro__
    from torch.distributed.fsdp import FSDPModule

    return classes[classes.index(FSDPModule) + 1]


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds, without the machinery of ``fully_shard``."""
    attributes = {}
    for name, value in module.__dict__.items():
        if name.startswith(("__composable_api", "_is_fsdp", "_fsdp")) or _is_machinery(value):
            continue
        attributes[name] = _others(value) if name in _HOOKS else value
    return attributes


def _others(hooks: Any) -> Any:
    """The hooks that are not those of ``torch.distributed``."""
    return type(hooks)((key, hook) for key, hook in hooks.items() if not _is_machinery(hook))


def _is_machinery(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith(_MACHINERY)
