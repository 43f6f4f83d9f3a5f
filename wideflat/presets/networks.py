"""Which function makes the network that a preset names; a file can only name those of this package.

A run directory may come from anybody. What its ``config.json`` calls ``model`` is looked up in :data:`NETWORKS` and
nowhere else. A preset that the user makes in Python may name any function, as ``module:function``: the user chose it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable

from torch import nn

from wideflat import models
from wideflat.models.resnet import quick_network

__all__ = ["NETWORKS", "chosen_network", "listed_network"]

#: The networks of this package by the names that files have for them.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "densenet121": models.densenet121,
    "efficientnet_b0": models.efficientnet_b0,
    "pyramidnet272": models.pyramidnet272,
    "resnet18": models.resnet18,
    "resnet50": models.resnet50,
    "resnet110": models.resnet110,
    "smallconvnet": models.smallconvnet,
    "vgg3x512": models.vgg3x512,
    "wideflat.experiments.cells:quick_network": quick_network,  # as the runs of the reduced forms have it
}


def listed_network(name: str) -> Callable[..., nn.Module]:
    """The function of this package that makes the network of this name. Nothing is imported.

    Example:
        >>> listed_network("smallconvnet").__name__
        'smallconvnet'
        >>> listed_network("torch.hub:load")
        Traceback (most recent call last):
        ...
        ValueError: the network 'torch.hub:load' was named by a file, and files only name networks of wideflat: ...
    """
    if not isinstance(name, str) or name not in NETWORKS:
        raise ValueError(
            f"the network {name!r} was named by a file, and files only name networks of wideflat: "
            f"{', '.join(name for name in NETWORKS if ':' not in name)}. If it is your own, say so: --build "
            "module:function, or Run.load_model(build=...)"
        )
    return NETWORKS[name]


def chosen_network(name: str) -> Callable[..., nn.Module]:
    """The function that a user's own preset names: one of :data:`NETWORKS`, or ``module:function``, which is imported.

    Example:
        >>> chosen_network("torch.nn:Linear").__name__
        'Linear'
        >>> chosen_network("smalconvnet")
        Traceback (most recent call last):
        ...
        ValueError: wideflat.models has no 'smalconvnet', ... Did you mean 'smallconvnet'? There are densenet121, ...
    """
    if name in NETWORKS:
        return NETWORKS[name]
    module, colon, function = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, list(NETWORKS), n=1)
        raise ValueError(
            f"wideflat.models has no {name!r}, and it is not of the form module:function. "
            + (f"Did you mean {near[0]!r}? " if near else "")
            + f"There are {', '.join(name for name in NETWORKS if ':' not in name)}."
        )
    try:
        found = getattr(importlib.import_module(module), function, None) if module else None
    except ImportError as error:
        raise ValueError(f"model {name!r}: the module {module!r} cannot be imported ({error})") from error
    if not callable(found):
        raise ValueError(f"model {name!r}: there is no function {function!r} in the module {module!r}")
    return found
