"""Figure 1: five ways to train a committee machine, compared by local entropy, local energy and test error."""

from __future__ import annotations

import dataclasses
import functools

from wideflat.checks import perhaps
from wideflat.committee import SETTINGS, Setting
from wideflat.experiments.committee_figure import Case, CommitteeFigure, CommitteeOptions
from wideflat.experiments.experiment import Item
from wideflat.experiments.options import MaybeFloat, MaybeInt, MaybeTexts

__all__ = ["ITEM", "Fig1Options"]

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


@dataclasses.dataclass
class Fig1Options(CommitteeOptions):
    """Committee machine: local entropy, local energy and test error of the five settings.

    Examples:
      wideflat reproduce fig1 --quick
      wideflat reproduce fig1 --restarts 50 --draws balanced random
      wideflat reproduce fig1 --methods bp ep sample --restarts 6
    """

    slow_restarts: MaybeInt = None
    """Restarts of rSGD slow, which needs 90,000 epochs of ten replicas; 15 when left out (quick: 4)."""
    settings: MaybeTexts = None
    """Which settings: sgd-fast, sgd-slow, rsgd-fast, esgd, rsgd-slow; all of them when left out."""
    align: bool = False
    """Match the hidden units of the replicas before they are coupled."""
    gradient_scale: MaybeFloat = None
    """What multiplies the gradient of the mean loss; flatness depends on it. 100 when left out (a sum over a batch)."""


def cases(options: Fig1Options, quick: bool, subsets: int) -> list[Case]:
    """One for each setting; rSGD slow last, since it takes longest."""
    chosen = options.settings or sorted(SETTINGS, key="rsgd-slow".__eq__)
    if unknown := sorted(set(chosen) - set(SETTINGS)):
        near = perhaps(unknown[0], SETTINGS)
        raise ValueError(f"settings must be some of {', '.join(SETTINGS)}; got {', '.join(unknown)}{near}")
    usual = options.restarts or (6 if quick else 50)
    restarts = {**dict.fromkeys(chosen, usual), "rsgd-slow": options.slow_restarts or (4 if quick else 15)}
    return [Case(name, _setting(name, options, quick), -(-restarts[name] // subsets)) for name in chosen]


def _setting(name: str, options: Fig1Options, quick: bool) -> Setting:
    setting = (QUICK if quick else SETTINGS)[name].replace(polish_epochs=POLISH_EPOCHS)
    if options.gradient_scale is not None:
        setting = setting.replace(gradient_scale=options.gradient_scale)
    return setting.replace(align=options.align and setting.algorithm == "rsgd")


ITEM = Item(
    name="fig1",
    title="Figure 1: flatness and generalisation of a committee machine",
    claim=(
        "The paper trains a committee machine of 9 units on 500 images of dresses and coats in five settings and finds "
        "the same order under three measures: the entropic algorithms (rSGD, eSGD) end in the flattest minima, by "
        "local entropy and by local energy, and have the smallest test error; SGD slow follows; SGD fast is last."
    ),
    quick_means=(
        "a few restarts of each setting on one or two training subsets; gamma of rSGD slow grows 20 times faster, and "
        "eSGD goes through its schedules 10 times faster with L = 5"
    ),
    options=Fig1Options,
    make=functools.partial(CommitteeFigure, cases=cases, references=("sgd-fast", "sgd-slow")),
)
