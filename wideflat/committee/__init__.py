"""Eqs. 7 and 8, App. B.1: the committee machine, its settings, its trainer."""

from typing import TYPE_CHECKING, Any

from wideflat.committee.machine import CommitteeMachine, balanced_error, committee_loss, errors, wrong_patterns
from wideflat.committee.settings import SETTINGS, Setting, changes_from
from wideflat.committee.solutions import Solutions

if TYPE_CHECKING:
    from wideflat.committee.training import Interrupted, train

__all__ = [
    "SETTINGS",
    "CommitteeMachine",
    "Interrupted",
    "Setting",
    "Solutions",
    "balanced_error",
    "changes_from",
    "committee_loss",
    "errors",
    "train",
    "wrong_patterns",
]


def __getattr__(name: str) -> Any:
    """The trainer, once it is asked for: it brings the readers of data along, which ``import wideflat`` does not."""
    if name in ("Interrupted", "train"):
        from wideflat.committee import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
