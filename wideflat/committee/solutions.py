"""What training leaves: the weights of every restart, and how each ended."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wideflat.checks import elements, instance, whole
from wideflat.checks.options import text
from wideflat.committee import archive
from wideflat.committee.machine import CommitteeMachine
from wideflat.committee.settings import Setting
from wideflat.notebook import Result, axes_or_new

__all__ = ["Solutions"]


@dataclass(repr=False)
class Solutions(Result):
    """What training left: the weights of every restart, with an honest record of how each ended.

    Attributes:
        weights: (R, H, N), rows of norm one. For rSGD the normalised barycenter, for eSGD w.
        inputs: The training inputs, (P, N).
        targets: Their labels.
        test_inputs: The test inputs, (Q, N); Q may be 0.
        test_targets: Their labels.
        name: Name of the setting, or of the algorithm for one that has no name.
        setting: Every option that the solutions were trained with.
        seeds: Seed of each restart.
        epochs: Epochs that each restart took (the polish not counted).
        stop: Why each ended: ``"errors"``, ``"loss"``, ``"distance"`` for the rule of its setting, ``"max_epochs"`` or
            ``"interrupted"`` without it.
        value: What the rule measures, at the end: training errors, loss or distance.
        errors_before: Training errors before the polish.
        train_errors: Training errors of ``weights``.
        polish_epochs: Epochs that the polish took; 0 where there was none.
        polish_movement: |w_after - w_before|^2 / H of the polish.
        test_error: Fraction of test patterns that are wrong; NaN without a test set.
        balanced_test_error: Mean of that fraction in the two classes.
        options: How it was computed (number format, form, source of the patterns).
    """

    weights: Tensor
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    name: str
    setting: Setting
    seeds: list[int]
    epochs: list[int]
    stop: list[str]
    value: list[float]
    errors_before: list[int]
    train_errors: list[int]
    polish_epochs: list[int]
    polish_movement: list[float]
    test_error: list[float]
    balanced_test_error: list[float]
    options: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def reached(self) -> list[bool]:
        """Whether each restart met the stopping rule of its setting."""
        return [stop == self.setting.stop for stop in self.stop]

    @property
    def solved(self) -> list[bool]:
        """Whether each restart has no training errors. Only such references belong in a ranking by local entropy."""
        return [count == 0 for count in self.train_errors]

    def machine(self, restart: int) -> CommitteeMachine:
        """The network of one restart, in evaluation mode."""
        hidden, num_inputs = self.weights.shape[1:]
        network = CommitteeMachine(num_inputs, hidden, dtype=self.weights.dtype)
        network.weight.data.copy_(self.weights[self._place(restart)])
        return network.eval()

    def _place(self, restart: Any) -> int:
        return whole("the number of a restart", restart, -len(self), len(self) - 1)

    def summary(self) -> dict[str, float]:
        """Means over the restarts: shares reached and solved, epochs, errors before the polish, test errors and spread.

        The spread is the standard deviation between restarts (NaN for a single one).
        """
        test = np.array(self.test_error, dtype=float)
        balanced = np.array(self.balanced_test_error, dtype=float)
        with np.errstate(invalid="ignore"):
            return {
                "restarts": len(self),
                "reached": float(np.mean(self.reached)),
                "solved_before_polish": float(np.mean(np.array(self.errors_before) == 0)),
                "solved": float(np.mean(self.solved)),
                "epochs": float(np.mean(self.epochs)),
                "epochs_least": float(np.min(self.epochs)),
                "epochs_most": float(np.max(self.epochs)),
                "errors_before": float(np.mean(self.errors_before)),
                "test_error": float(test.mean()),
                "test_error_spread": float(test.std(ddof=1)) if len(test) > 1 else math.nan,
                "balanced_test_error": float(balanced.mean()),
                "balanced_test_error_spread": float(balanced.std(ddof=1)) if len(test) > 1 else math.nan,
            }

    def __str__(self) -> str:
        """One line, and what the restarts have in common."""
        summary, n = self.summary(), len(self)
        spread = summary["test_error_spread"]
        error = f"{100 * summary['test_error']:.2f}" + (f" ± {100 * spread:.2f}" if spread == spread else "")
        return (
            f"{n} solution{'s' if n > 1 else ''} of {self.name}: {sum(self.solved)} of {n} without training errors, "
            f"test error {error} %, {summary['epochs']:.0f} epochs; weights {tuple(self.weights.shape)}"
        )

    def _columns(self) -> dict[str, list[Any]]:
        """One row a restart."""
        return {name.rstrip("s") if name == "seeds" else name: list(getattr(self, name)) for name in _RECORD}

    def _remarks(self) -> list[str]:
        return [str(self)]

    def plot(self, ax: Any = None, label: str | None = None, **style: Any) -> Any:
        """Draw the test errors of the restarts against their epochs; returns the axes of matplotlib."""
        ax = axes_or_new(ax)
        ax.plot(self.epochs, 100 * np.array(self.test_error), "o", label=text("label", label) or self.name, **style)
        ax.set_xlabel("epochs")
        ax.set_ylabel("test error (%)")
        ax.legend()
        return ax

    def subset(self, restarts: Sequence[int]) -> Solutions:
        """The solutions of some restarts, by position."""
        places = [self._place(i) for i in elements("restarts", restarts, "a sequence of whole numbers")]
        chosen: dict[str, Any] = {name: [getattr(self, name)[i] for i in places] for name in _RECORD}
        return dataclasses.replace(self, weights=self.weights[places], **chosen)

    def joined(self, more: Solutions) -> Solutions:
        """These solutions and others of the same setting on the same patterns."""
        instance("more", more, Solutions)
        if self.setting.identity() != more.setting.identity() or not torch.equal(self.inputs, more.inputs):
            raise ValueError("only solutions of one setting on the same training patterns can be joined")
        both: dict[str, Any] = {name: getattr(self, name) + getattr(more, name) for name in _RECORD}
        return dataclasses.replace(self, weights=torch.cat([self.weights, more.weights]), **both)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one ``.npz`` file of plain arrays and JSON, whole or not at all."""
        record = {
            "format": _FORMAT,
            "name": self.name,
            "setting": dataclasses.asdict(self.setting),
            "options": self.options,
            **{name: getattr(self, name) for name in _RECORD},
        }
        patterns = {name: _compact(getattr(self, name)) for name in _PATTERNS}
        archive.write(path, record, {"weights": self.weights.numpy(), **patterns}, compressed=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Solutions:
        """Read what :meth:`save` wrote. Nothing is unpickled.

        Raises:
            ValueError: The file is damaged or something else, or its arrays are not those that its record speaks of.
        """
        try:
            record, arrays = archive.read(path, _FORMAT)
            known = {item.name for item in dataclasses.fields(Setting)}
            setting = Setting(**{name: value for name, value in record.pop("setting").items() if name in known})
            tensors = _checked(setting, record, arrays)
            return cls(setting=setting, **tensors, **record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{os.fspath(path)} is not a whole file of committee solutions ({error}); such files are written by "
                "`wideflat train committee-...` and Solutions.save"
            ) from error


_FORMAT = "wideflat committee solutions 1"
_PATTERNS = ("inputs", "targets", "test_inputs", "test_targets")
_RECORD = (
    "seeds",
    "epochs",
    "stop",
    "value",
    "errors_before",
    "train_errors",
    "polish_epochs",
    "polish_movement",
    "test_error",
    "balanced_test_error",
)


def _checked(setting: Setting, record: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The arrays of a file as tensors, if they have the sizes that its record says."""
    lengths = {len(record[name]) if isinstance(record[name], list) else -1 for name in _RECORD}
    if len(lengths) > 1 or -1 in lengths:
        raise ValueError(f"its record does not have one entry a restart for each of {', '.join(_RECORD)}")
    sizes = {name: arrays[name].shape for name in ("inputs", "test_inputs")}
    if any(len(size) != 2 for size in sizes.values()):
        raise ValueError(f"inputs must have one pattern a row, have the shapes {list(sizes.values())}")
    (count, num_inputs), (test_count, _) = sizes.values()
    weights = archive.check_shapes(arrays, {"weights": (lengths.pop(), setting.hidden, num_inputs)})
    shapes = {
        "inputs": (count, num_inputs),
        "targets": (count,),
        "test_inputs": (test_count, num_inputs),
        "test_targets": (test_count,),
    }
    patterns = archive.check_shapes(arrays, shapes, kinds="fi")
    tensors: dict[str, Any] = {name: torch.from_numpy(array).to(torch.float32) for name, array in patterns.items()}
    return {"weights": torch.from_numpy(weights["weights"]), **tensors}


def _compact(patterns: Tensor) -> np.ndarray:
    """Patterns as int8 where that loses nothing."""
    small = patterns.to(torch.int8)
    return (small if torch.equal(small.to(patterns.dtype), patterns) else patterns).numpy()
