"""Eqs. 7 and 8, App. B.1: the committee machine, its settings, its trainer."""

from wideflat.committee.machine import (
    SETTINGS,
    CommitteeMachine,
    Interrupted,
    Setting,
    Solutions,
    balanced_error,
    changes_from,
    committee_loss,
    errors,
    train,
)

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
]
