"""Figure 1: five ways to train a committee machine, compared by local entropy, local energy and test error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wideflat.committee import SETTINGS, Setting
from wideflat.experiments.committee_figure import Case, CommitteeFigure

__all__ = ["Fig1"]

#: Epochs of plain SGD that may follow a training which ended with errors, so that its local entropy is defined.
POLISH_EPOCHS = 500

#: The settings of the quick form. The two longest trainings go through their schedules 20 and 10 times faster. The
#: outer learning rate of eSGD grows with that, so that w covers the same way; its inner loop takes fewer, larger steps.
QUICK: dict[str, Setting] = {
    **SETTINGS,
    "sgd-slow": SETTINGS["sgd-slow"].replace(max_epochs=3000),
    "rsgd-slow": SETTINGS["rsgd-slow"].replace(gamma1=2e-3, max_epochs=7500, typical_epochs=5200),
    "esgd": SETTINGS["esgd"].replace(
        lr=1e-2,
        inner_lr=2e-2,
        inner_steps=5,
        tanh_beta1=1e-3,
        omega1=5e-3,
        gamma1=5e-4,
        max_epochs=1500,
        typical_epochs=1300,
    ),
}


class Fig1(CommitteeFigure):
    """SGD fast, SGD slow, rSGD fast, rSGD slow and eSGD on the reduced Fashion-MNIST.

    Args:
        folder: Where everything goes.
        restarts: Restarts of each setting on each draw, divided over the training subsets (default 50; quick: 4).
        slow_restarts: The same for rSGD slow, which needs 90,000 epochs of ten replicas (default: 15; quick: 2).
        align: Match the hidden units of the replicas before they are coupled.
        gradient_scale: What multiplies the gradient of the mean loss (None: 100, which with mini-batches of 100 is the
            gradient of the sum). The paper does not say, and flatness depends on it.
        settings: Which of the five settings, by name; None for all of them, rSGD slow last, since it takes longest.
        **more: See :class:`wideflat.experiments.committee_figure.CommitteeFigure`.
    """

    name = "fig1"
    title = "Figure 1: flatness and generalisation of a committee machine"
    claim = (
        "The paper trains a committee machine of 9 units on 500 images of dresses and coats in five settings and finds "
        "the same order under three measures: the entropic algorithms (rSGD, eSGD) end in the flattest minima, by "
        "local entropy and by local energy, and have the smallest test error; SGD slow follows; SGD fast is last."
    )
    references = ("sgd-fast", "sgd-slow")
    quick_means = (
        "a few restarts of each setting on one training subset; gamma of rSGD slow grows 20 times faster, and eSGD "
        "goes through its schedules 10 times faster with L = 5"
    )

    def __init__(
        self,
        folder: Path,
        quick: bool = False,
        restarts: int | None = None,
        slow_restarts: int | None = None,
        align: bool = False,
        gradient_scale: float | None = None,
        settings: Sequence[str] | None = None,
        **more: Any,
    ) -> None:
        if quick:
            more = {"subsets": 1, "methods": ("bp",), **more}
        super().__init__(folder, quick, **more)
        chosen = settings or sorted(SETTINGS, key="rsgd-slow".__eq__)
        if unknown := set(chosen) - set(SETTINGS):
            raise ValueError(f"settings must be some of {', '.join(SETTINGS)}; got {', '.join(sorted(unknown))}")
        restarts = restarts or (4 if quick else 50)
        slow_restarts = slow_restarts or (2 if quick else 15)
        known = QUICK if quick else SETTINGS
        if gradient_scale is not None:
            known = {name: setting.replace(gradient_scale=gradient_scale) for name, setting in known.items()}
        self.cases = [
            Case(
                name,
                known[name].replace(polish_epochs=POLISH_EPOCHS, align=align and known[name].algorithm == "rsgd"),
                -(-(slow_restarts if name == "rsgd-slow" else restarts) // self.subsets),
            )
            for name in chosen
        ]
