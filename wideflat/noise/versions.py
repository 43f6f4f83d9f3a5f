"""Weights that are changed behind torch's back, for networks that keep something as long as a weight has its version.

A merged, inverted or folded weight that is kept under ``weight._version`` is right in training, since optimizers write
in place, and would be that of the last point for all others when a measurement points the parameter at memory of its
own. So while weights are moved they have versions that nothing else reaches, another one at each point; at the end the
version is what it was, and a graph from before can still be differentiated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Versions"]

#: Versions from here on are ours: a counter has 32 bits, and no training writes two thousand million times.
FIRST = 2**31
_NUMBERS = itertools.count()


class Versions:
    """The versions of some tensors while they are moved.

    Args:
        tensors: Those; without those made in inference mode, which have none.

    Example:
        >>> w = torch.zeros(2)
        >>> versions = Versions([w])
        >>> before = w._version
        >>> versions.advance(); first = w._version
        >>> versions.advance(); first == w._version
        False
        >>> versions.restore(); before == w._version
        True
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._own = [tensor._version for tensor in self._tensors]

    def advance(self) -> None:
        """The values are others now."""
        _set(self._tensors, [FIRST + next(_NUMBERS) % FIRST] * len(self._tensors))

    def restore(self) -> None:
        """The values are those of before."""
        _set(self._tensors, self._own)


def _set(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    if not tensors or torch.compiler.is_compiling():
        return
    write: Any = torch._C._autograd._unsafe_set_version_counter
    try:
        write(tuple(tensors), tuple(versions))
    except TypeError:  # earlier versions of torch take one
        for tensor, version in zip(tensors, versions, strict=True):
            write(tensor, version)
