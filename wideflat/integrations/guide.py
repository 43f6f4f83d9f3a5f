"""What the callbacks of all trainers do alike: focusing by their clock, readings for their logs, an end at w."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from wideflat.batch_norm import refresh_batch_norm
from wideflat.checks import choice, flag
from wideflat.checks import number as checked_number
from wideflat.checks.doors import asks
from wideflat.cycles import Cycles
from wideflat.focusing import Focusing

__all__ = ["Guide", "innermost", "with_center"]

#: How a model is called with a batch, as in `wideflat.refresh_batch_norm`.
Forward = Callable[[nn.Module, Any], object]


@asks
def with_center(optimizers: Iterable[Any]) -> list[Cycles]:
    """Those of a trainer's optimizers that have a center, without the wrappers that trainers put around them.

    >>> import torch, wideflat
    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> with_center([torch.optim.SGD([w]), wideflat.EntropySGD([w], lr=0.5)])[0].param_groups[0]["lr"]
    0.5
    """
    return [inside for inside in map(innermost, optimizers) if isinstance(inside, Cycles)]


def innermost(optimizer: Any) -> Any:
    """An optimizer without the wrappers that trainers put around it.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    >>> innermost(SimpleNamespace(optimizer=sgd)) is sgd
    True
    """
    while not isinstance(optimizer, Cycles) and isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


@dataclass
class Guide:
    """Focusing of a trainer's optimizers, by steps or by epochs.

    Args:
        factor: gamma (or pull) at the end of training over that at its start; None leaves it as it is.
        by: ``"step"`` changes it after each step, ``"epoch"`` after each epoch.
        total: Steps or epochs until the end; None takes what the trainer says.
        kind: ``"exponential"``, ``"cosine"`` or ``"constant"``, as in `wideflat.Focusing`.
        batch_norm: Refresh the statistics of batch-norm layers at the end of training, if there are any.
    """

    factor: float | None = 10.0
    by: str = "step"
    total: float | None = None
    kind: str = "exponential"
    batch_norm: bool = True

    def __post_init__(self) -> None:
        choice("by", self.by, ("step", "epoch"))
        self.factor = None if self.factor is None else checked_number("factor", self.factor, above=0)
        self.total = None if self.total is None else checked_number("total", self.total, above=0)
        self.batch_norm = flag("batch_norm", self.batch_norm)
        if not isinstance(self.kind, str):
            raise TypeError(
                "kind must be a name ('exponential', 'cosine' or 'constant'), since it is saved with the trainer's "
                f"state; got {type(self.kind).__name__}"
            )
        self.optimizers: list[Cycles] = []
        self.focusings: list[Focusing] = []

    @property
    def settings(self) -> dict[str, Any]:
        """What it was made with."""
        return asdict(self)

    def start(self, optimizers: Sequence[Any], total: float, gamma0: list[list[float]]) -> None:
        """Take charge of a trainer's optimizers at the start of training, or of what is left of it.

        Args:
            optimizers: All optimizers of the trainer.
            total: Steps or epochs until the end, as the trainer says.
            gamma0: What `gamma0` was, where training is resumed; an empty list otherwise.
        """
        self.optimizers = with_center(optimizers)
        if not self.optimizers:
            raise TypeError(
                "FocusingCallback needs an optimizer with a center, such as wideflat.EntropySGD or wideflat.Entropic; "
                f"the trainer has {', '.join(type(optimizer).__name__ for optimizer in optimizers) or 'none'}. "
                "(SAM has none and needs none: see SAMCallback for the Trainer of Hugging Face)"
            )
        self.focusings = []
        if self.factor is None:
            return
        total = self.total or total
        if not 0 < total < float("inf"):
            raise ValueError(f"the trainer does not know how long it trains ({total} {self.by}s): pass total=...")
        for number, optimizer in enumerate(self.optimizers):
            focusing = Focusing(optimizer, self.factor, total, kind=self.kind)
            if number < len(gamma0):  # the optimizer has been loaded with the gamma of the middle
                focusing.load_state_dict({**focusing.state_dict(), "gamma0": gamma0[number]})
            self.focusings.append(focusing)

    def move_to(self, tau: int) -> None:
        """So many steps, or epochs, are done: gamma is a function of that alone."""
        for focusing in self.focusings:
            focusing.load_state_dict({**focusing.state_dict(), "tau": tau})

    @property
    def gamma0(self) -> list[list[float]]:
        """The gamma of the first start, in each optimizer's groups: all that is saved beside their state."""
        return [list(focusing.gamma0) for focusing in self.focusings]

    def show_center(self) -> None:
        """Put w into the model."""
        for optimizer in self.optimizers:
            optimizer.eval()

    def show_explorer(self) -> None:
        """Put w' back into the model, for training."""
        for optimizer in self.optimizers:
            optimizer.train()

    def readings(self) -> dict[str, float]:
        """For the logs: gamma or pull, d(w', w), and whether the model holds w now."""
        readings = {}
        for number, optimizer in enumerate(self.optimizers):
            end = f"_{number}" if len(self.optimizers) > 1 else ""
            if hasattr(optimizer, "pull"):
                readings[f"pull{end}"] = float(optimizer.pull)
            else:
                readings[f"gamma{end}"] = float(optimizer.param_groups[0]["gamma"])
            readings[f"distance{end}"] = optimizer.distance().item()
            readings[f"at_center{end}"] = float(optimizer.at_center)
        return readings

    def finish(self, model: nn.Module, batches: Iterable[Any] | None, forward: Forward | None = None) -> None:
        """The end of training: close the cycle, so that the model holds w, with the batch norm of w."""
        self.show_explorer()
        for optimizer in self.optimizers:
            optimizer.flush()
        self.refresh(model, batches, forward)

    def refresh(self, model: nn.Module, batches: Iterable[Any] | None, forward: Forward | None = None) -> None:
        """Recompute the statistics of batch norm, if that is wanted; a model without it is left alone."""
        if self.batch_norm and batches is not None:
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
            refresh_batch_norm(model, batches, forward=forward, group=group)
