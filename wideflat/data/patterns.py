"""Patterns for binary classification: inputs with labels +1 and -1, from arrays or a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from wideflat.checks import real_tensor
from wideflat.checks.doors import asks
from wideflat.files import atomic_write, read_npz

__all__ = ["Patterns", "binarize", "check_patterns"]

#: What is accepted where patterns are given: anything that ``numpy.asarray`` or torch understands.
Array: TypeAlias = "Tensor | np.ndarray | list"


#: Arrays of a file that may be missing, or empty.
TESTS = ("test_inputs", "test_targets")


@asks
@dataclass(frozen=True)
class Patterns:
    """A training set and, if there is one, a test set of a binary classification task.

    Attributes:
        inputs: Training inputs, one pattern a row, float32 of shape (P, N).
        targets: Their labels, +1 or -1, float32 of shape (P,).
        test_inputs: Test inputs of shape (Q, N); Q may be 0.
        test_targets: Their labels.
        source: Where the patterns come from, in words; it is kept with every result.

    Example:
        >>> patterns = Patterns.from_arrays([[1, -1], [1, 1]], [1, -1])
        >>> patterns.inputs.shape, patterns.targets.tolist(), len(patterns.test_inputs)
        (torch.Size([2, 2]), [1.0, -1.0], 0)
    """

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    source: str = "arrays"

    @classmethod
    def from_arrays(
        cls,
        inputs: Array,
        targets: Array,
        test_inputs: Array | None = None,
        test_targets: Array | None = None,
        source: str = "arrays",
    ) -> Patterns:
        """Check arrays and make patterns of them. Without test arrays the test set is empty."""
        x, y = check_patterns(inputs, targets)
        if (test_inputs is None) != (test_targets is None):
            raise ValueError("test_inputs and test_targets belong together: give both or neither")
        if test_inputs is None or test_targets is None:
            return cls(x, y, x.new_empty(0, x.shape[1]), y.new_empty(0), source)
        test_x, test_y = check_patterns(test_inputs, test_targets, name="test_")
        if test_x.shape[1] != x.shape[1]:
            raise ValueError(f"test patterns have {test_x.shape[1]} inputs, training patterns have {x.shape[1]}")
        return cls(x, y, test_x, test_y, source)

    @classmethod
    @asks
    def from_file(cls, path: str | os.PathLike[str]) -> Patterns:
        """Read an ``.npz`` file with ``inputs``, ``targets`` and, if wanted, ``test_inputs`` and ``test_targets``."""
        arrays = read_npz(path)
        missing = {"inputs", "targets"} - arrays.keys()
        if missing:
            found = ", ".join(sorted(arrays)) or "nothing"
            raise ValueError(
                f"{os.fspath(path)} must hold arrays 'inputs' (P, N) and 'targets' (P,), and may hold 'test_inputs' "
                f"and 'test_targets'; it holds {found}"
            )
        test_inputs, test_targets = (arrays[name] if name in arrays and arrays[name].size else None for name in TESTS)
        return cls.from_arrays(
            arrays["inputs"],
            arrays["targets"],
            test_inputs,
            test_targets,
            source=f"file {os.path.basename(os.fspath(path))}",
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the patterns as an ``.npz`` file that :meth:`from_file` reads; whole or not at all."""
        with atomic_write(path, "wb") as file:
            np.savez_compressed(
                file,
                inputs=self.inputs.detach().cpu().numpy(),
                targets=self.targets.detach().cpu().numpy(),
                test_inputs=self.test_inputs.detach().cpu().numpy(),
                test_targets=self.test_targets.detach().cpu().numpy(),
            )


def check_patterns(inputs: Array, targets: Array, name: str = "") -> tuple[Tensor, Tensor]:
    """Inputs and targets as float32 tensors of shape (P, N) and (P,), or an error that says what is wrong.

    Args:
        inputs: One pattern a row, +-1 or real numbers. Images of shape (P, height, width) are flattened.
        targets: The labels, +1 or -1.
        name: What to write before ``inputs`` and ``targets`` in an error message.
    """
    x, y = _tensor(inputs, f"{name}inputs"), _tensor(targets, f"{name}targets")
    if x.ndim < 2:
        raise ValueError(f"{name}inputs must have one pattern a row, shape (P, N); got shape {tuple(x.shape)}")
    if x.numel() == 0:
        raise ValueError(f"{name}inputs are empty: shape {tuple(x.shape)}")
    x = x.reshape(len(x), -1)
    if y.shape != (len(x),):
        raise ValueError(
            f"{name}targets must be one label for each of the {len(x)} patterns, shape ({len(x)},); "
            f"got shape {tuple(y.shape)}"
        )
    labels = y.unique().tolist()
    if not set(labels) <= {-1.0, 1.0}:
        found = ", ".join(f"{label:g}" for label in labels[:5]) + (", ..." if len(labels) > 5 else "")
        hint = "; for labels 0 and 1 use 2 * targets - 1" if set(labels) <= {0.0, 1.0} else ""
        raise ValueError(f"{name}targets must be +1 or -1, got {found}{hint}")
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name}inputs have entries that are not finite numbers")
    empty = (x == 0).all(dim=1)
    if bool(empty.any()):
        raise ValueError(
            f"{int(empty.sum())} of {len(x)} {name}inputs are zero everywhere (the first is pattern "
            f"{int(empty.nonzero()[0])}): no weights can classify them; leave such patterns out"
        )
    return x, y


def binarize(images: Array) -> Tensor:
    """Each image as +1 where a pixel is above the image's own median and -1 elsewhere (Appendix B.1).

    Args:
        images: Shape (P, N) or (P, height, width).

    Returns:
        float32 of shape (P, N).

    Example:
        >>> binarize([[0, 10, 20, 30]])
        tensor([[-1., -1.,  1.,  1.]])
    """
    x = _tensor(images, "images").double()
    if x.ndim < 2 or not x.numel():
        raise ValueError(f"images must be (P, N) or (P, height, width), got shape {tuple(x.shape)}")
    x = x.reshape(len(x), -1)
    median = x.quantile(0.5, dim=1, keepdim=True)
    x = torch.where(x > median, 1.0, -1.0)
    constant = (x < 0).all(dim=1)
    if bool(constant.any()):
        first = int(constant.nonzero()[0])
        raise ValueError(
            f"{int(constant.sum())} of {len(x)} images have no pixel above their median (the first is image {first}): "
            "they are constant or saturated; leave them out"
        )
    return x.float()


def _tensor(array: Array, name: str) -> Tensor:
    try:
        return real_tensor(name, array).detach().cpu().to(torch.float32, copy=not isinstance(array, Tensor))
    except TypeError as error:
        raise ValueError(f"{error}; {name} must be an array of numbers") from error
