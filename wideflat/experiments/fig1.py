"""Figure 1: five ways to train a committee machine, compared by local entropy, local energy and test error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wideflat.committee import SETTINGS, Setting
from wideflat.experiments.committee_figure import Case, CommitteeFigure

__all__ = ["Fig1"]

#: Epochs of plain SGD that may follow a training which ended with errors, so that its local entropy is defined.
POLISH_EPOCHS = 500

#: In the quick form the schedules of the two longest trainings run so many times faster.
QUICK_SPEED = {"rsgd-slow": 20, "esgd": 10}
#: And no training takes more epochs than these.
QUICK_EPOCHS = {"sgd-slow": 3000, "esgd": 1000}


class Fig1(CommitteeFigure):
    """SGD fast, SGD slow, rSGD fast, rSGD slow and eSGD on the reduced Fashion-MNIST.

    Args:
        folder: Where everything goes.
        restarts: Restarts of each setting on each draw, divided over the training subsets (default 50; quick: 4).
        slow_restarts: The same for rSGD slow, which needs 90,000 epochs of ten replicas (default: 15; quick: 2).
        align: Match the hidden units of the replicas before they are coupled.
        **more: See :class:`wideflat.experiments.committee_figure.CommitteeFigure`.
    """

    name = "fig1"
    title = "Figure 1: flatness and generalisation of a committee machine"
    claim = (
        "The paper trains a committee machine of 9 units on 500 images of dresses and coats in five settings and finds "
        "the same order under three measures: the entropic algorithms (rSGD, eSGD) end in the flattest minima, by "
        "local entropy and by local energy, and have the smallest test error; SGD slow follows; SGD fast is last."
    )
    quick_means = (
        "a few restarts of each setting on one training subset; the schedules of rSGD slow and eSGD run "
        f"{QUICK_SPEED['rsgd-slow']} and {QUICK_SPEED['esgd']} times faster, and eSGD ends after at most "
        f"{QUICK_EPOCHS['esgd']} epochs"
    )

    def __init__(
        self,
        folder: Path,
        quick: bool = False,
        restarts: int | None = None,
        slow_restarts: int | None = None,
        align: bool = False,
        **more: Any,
    ) -> None:
        if quick:
            more = {"subsets": 1, "methods": ("bp",), **more}
        super().__init__(folder, quick, **more)
        restarts = restarts or (4 if quick else 50)
        slow_restarts = slow_restarts or (2 if quick else 15)
        self.cases = [
            Case(
                name,
                (quicker(name) if quick else setting).but(
                    polish_epochs=POLISH_EPOCHS, align=align and setting.algorithm == "rsgd"
                ),
                -(-(slow_restarts if name == "rsgd-slow" else restarts) // self.subsets),
            )
            for name, setting in SETTINGS.items()
        ]

    def cost(self) -> str:
        """In words."""
        count = sum(case.restarts for case in self.cases) * self.subsets * len(self.draws)
        return f"{count} trainings of a committee machine and their local entropy"


def quicker(name: str) -> Setting:
    """A setting for the quick form: gamma grows faster, over fewer epochs.

    For eSGD beta and omega keep pace, since they are what ends it; the replicas of rSGD are brought together by gamma.

    Example:
        >>> quicker("esgd").gamma1 / SETTINGS["esgd"].gamma1, quicker("sgd-fast") == SETTINGS["sgd-fast"]
        (10.0, True)
    """
    setting, speed = SETTINGS[name], QUICK_SPEED.get(name, 1)
    pace = speed if setting.algorithm == "esgd" else 1
    limit = setting.max_epochs // speed
    return setting.but(
        tanh_beta1=pace * setting.tanh_beta1,
        omega1=pace * setting.omega1,
        gamma1=speed * setting.gamma1,
        max_epochs=min(limit, QUICK_EPOCHS.get(name, limit)),
        typical_epochs=setting.typical_epochs // speed,
    )
