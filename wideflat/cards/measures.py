"""The measures of a card, each a record: what it is called, what it costs, how it is run, kept and made more exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from wideflat.cards.pooling import pooled
from wideflat.cards.subject import Subject, spread_of
from wideflat.checks.options import check_fields
from wideflat.energy.measure import local_energy
from wideflat.energy.profile import LocalEnergy
from wideflat.energy.request import whole_passes
from wideflat.energy.series import layer_profiles
from wideflat.evaluation.evaluation import Evaluation
from wideflat.evaluation.selection import Selection, select_parameters
from wideflat.hessian.eigenvalues import Spectrum
from wideflat.hessian.spectrum import spectrum
from wideflat.landscape.points import sample
from wideflat.landscape.shift import ShiftProfile, shift_profile
from wideflat.landscape.slices import Slice, slices
from wideflat.landscape.worst_case import worst_case
from wideflat.progress import Progress
from wideflat.seeds import derive_seed
from wideflat.volume.free_entropy import free_entropy
from wideflat.volume.volumes import FreeEntropy

__all__ = ["MEASURES", "AtTheWeights", "Measure"]

#: Examples that a profile of noise evaluates at a sigma where it does not choose itself, and passes over them at most.
EVALUATIONS, MOST_PASSES = 20_000, 16


@dataclass
class AtTheWeights:
    """Metric and loss at w, with standard errors over data; NaN for one that these outputs do not have."""

    metric: float
    metric_stderr: float
    loss: float
    loss_stderr: float
    metric_name: str
    loss_name: str
    examples: int

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> AtTheWeights:
        """The inverse of :meth:`to_dict`."""
        return cls(**content)


@dataclass(frozen=True)
class Measure:
    """One measure of a card.

    Attributes:
        name: Its key in the card.
        title: What it is, in a few words.
        kind: What its results are.
        cost: Its share of the time, roughly, as seen for a small convolutional network and a language model.
        run: Measures a subject; the second argument is the seed, the third the minutes that are left, if limited.
        parts: Whether the result is several of its kind, by name.
        join: Makes one result of two with other seeds; None where more work does not make it more exact.
        uncertainty: The error bar relative to the size of what is measured, where it can be made smaller.
    """

    name: str
    title: str
    kind: type
    cost: float
    run: Callable[[Subject, int, float | None], Any]
    parts: bool = False
    join: Callable[[Any, Any], Any] | None = None
    uncertainty: Callable[[Any], float] = lambda _: 0.0

    def to_plain(self, result: Any) -> Any:
        """A result as JSON has it."""
        if self.parts:
            return {name: part.to_dict() for name, part in result.items()}
        return result.to_dict()

    def from_plain(self, content: Any) -> Any:
        """The inverse of :meth:`to_plain`."""
        read = self.kind.from_dict  # type: ignore[attr-defined] # every kind has it
        return {name: read(part) for name, part in content.items()} if self.parts else read(content)


# ---- how each is run


def _at_the_weights(subject: Subject, seed: int, _: float | None) -> AtTheWeights:
    found: list[tuple[float, float, str]] = []
    examples = 0
    for metric in (subject.metric, subject.loss):
        evaluation = Evaluation(subject.model, metric, subject.options["batch_norm"], subject.options["forward"])
        blocks, _size = whole_passes(evaluation, subject.many, None, seed)
        with evaluation.prepared(), Progress("at the weights", enabled=False) as bar:
            values = sample(evaluation, blocks, [lambda: None], bar)
        examples = round(float(values.weights.sum()))
        least = values.one_more if evaluation.metric_name == "error" else 0.0  # it would be no surprise
        found.append((float(values.mean[0]), math.hypot(float(values.stderr[0]), least), evaluation.metric_name))
    (metric_mean, metric_bar, name), (loss_mean, loss_bar, loss_name) = found
    return AtTheWeights(metric_mean, metric_bar, loss_mean, loss_bar, name, loss_name, examples)


def _profile(scale: str) -> Callable[[Subject, int, float | None], LocalEnergy]:
    def run(subject: Subject, seed: int, _: float | None) -> LocalEnergy:
        passes = _passes(subject, of="examples") if isinstance(subject.many, list) else None  # of a loader
        passes = subject.effort.passes or passes
        return local_energy(
            subject.model, subject.many, subject.effort.sigmas, metric=subject.metric, scale=scale, seed=seed,
            progress=False, max_passes=passes, **subject.options,
        )  # fmt: skip

    return run


def _layers(subject: Subject, seed: int, _: float | None) -> dict[str, LocalEnergy]:
    options = {name: value for name, value in subject.options.items() if name != "parameters"}
    layers = _chosen_layers(subject)
    return layer_profiles(
        subject.model, subject.many, [subject.effort.layer_sigma], layers, metric=subject.metric, seed=seed,
        progress=False, max_passes=_short(subject, len(layers)), **options,
    )  # fmt: skip


def _passes(subject: Subject, shared_by: int = 1, of: str = "few") -> int:
    """Passes over the examples for a profile of noise.

    Args:
        subject: What is measured.
        shared_by: Profiles that share so many evaluations: a network of many layers must not cost by their number.
        of: Which examples.
    """
    return max(2, min(MOST_PASSES, math.ceil(EVALUATIONS / (shared_by * subject.conventions[of]))))


def _short(subject: Subject, shared_by: int = 1) -> int:
    """Passes over many examples that evaluate as many as those over few."""
    few, many = (subject.conventions[name] for name in ("few", "examples"))
    return max(2, math.ceil(_passes(subject, shared_by) * few / many))


def _chosen_layers(subject: Subject) -> list[str]:
    """The layers that have a parameter of their own among the chosen ones, in the order of the network."""
    names, _ = select_parameters(subject.model, subject.options["parameters"])
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _chosen_weights(subject: Subject) -> Selection:
    """What is rounded and pruned: of the chosen parameters those that are no biases and no normalisations."""
    selection = subject.options["parameters"]
    if isinstance(selection, str) and selection == "all":
        return "weights"
    (chosen, words), (weights, _) = (select_parameters(subject.model, some) for some in (selection, "weights"))

    def both(name: str, _: nn.Parameter) -> bool:
        return name in chosen and name in weights

    both.__qualname__ = f"weights that are {words}"
    return both


def _worst(subject: Subject, seed: int, _: float | None) -> dict[str, LocalEnergy]:
    effort = subject.effort
    shared: dict[str, Any] = {"metric": subject.loss, "seed": seed, "progress": False, **subject.options}
    climbs: dict[str, Any] = {"objective": subject.loss, "steps": effort.worst_steps, "restarts": effort.restarts}
    return {
        "l2": worst_case(subject.model, subject.few, effort.worst_sigmas, ball="l2", **climbs, **shared),
        "linf": worst_case(subject.model, subject.few, effort.worst_sigmas, ball="linf", **climbs, **shared),
        "average": local_energy(subject.model, subject.few, effort.worst_sigmas, max_passes=_passes(subject), **shared),
    }


def _spectrum(subject: Subject, seed: int, _: float | None) -> Spectrum:
    effort = subject.effort
    return spectrum(
        subject.model, subject.few, probes=effort.probes, steps=effort.steps, metric=subject.loss, seed=seed,
        progress=False, **subject.options,
    )  # fmt: skip


def _shift(subject: Subject, seed: int, _: float | None) -> dict[str, ShiftProfile]:
    options = {**subject.options, "parameters": _chosen_weights(subject)}
    shared: dict[str, Any] = {"metric": subject.metric, "seed": seed, "progress": False, **options}
    shared["max_passes"] = _short(subject)
    return {
        "quantize": shift_profile(subject.model, subject.many, quantize=subject.effort.bits, **shared),
        "prune": shift_profile(subject.model, subject.many, prune=subject.effort.fractions, **shared),
    }


def _slice(subject: Subject, seed: int, _: float | None) -> Slice:
    positions = np.linspace(-1, 1, subject.effort.points)
    return slices(
        subject.model, subject.few, "filter", positions=positions, metric=subject.loss, seed=seed, progress=False,
        **subject.options,
    )  # fmt: skip


def _entropy(subject: Subject, seed: int, minutes: float | None) -> FreeEntropy:
    found = free_entropy(
        subject.model, subject.fewest, subject.effort.entropy_sigma, measure=subject.loss, quick=True, seed=seed,
        minutes=minutes, progress=False, **subject.options,
    )  # fmt: skip
    if not found.points:
        raise ValueError("the minutes were over before its chains had ended")
    return found


# ---- how exact it is


def _relative(profile: LocalEnergy) -> float:
    height = spread_of(profile.mean.tolist())
    return spread_of(profile.stderr.tolist()) / height if height > 0 else 0.0


def _relative_of_layers(profiles: dict[str, LocalEnergy]) -> float:
    height = max(spread_of(profile.mean.tolist()) for profile in profiles.values())
    largest = max(spread_of(profile.stderr.tolist()) for profile in profiles.values())
    return largest / height if height > 0 else 0.0


def _relative_trace(found: Spectrum) -> float:
    return found.trace_stderr / abs(found.trace) if found.trace and math.isfinite(found.trace) else 0.0


def _joined_layers(a: dict[str, LocalEnergy], b: dict[str, LocalEnergy]) -> dict[str, LocalEnergy]:
    return {name: pooled(a[name], b[name]) for name in a}


#: In the order in which they are measured: the cheap and most asked for first.
MEASURES = (
    Measure("at_w", "error and loss", AtTheWeights, 2, _at_the_weights),
    Measure("relative", "local energy, relative noise", LocalEnergy, 200, _profile("relative"), join=pooled,
            uncertainty=_relative),
    Measure("filter", "local energy, filter noise", LocalEnergy, 200, _profile("filter"), join=pooled,
            uncertainty=_relative),
    Measure("layers", "layer profile", LocalEnergy, 60, _layers, parts=True, join=_joined_layers,
            uncertainty=_relative_of_layers),
    Measure("shift", "rounded and pruned", ShiftProfile, 30, _shift, parts=True),
    Measure("worst", "worst case", LocalEnergy, 80, _worst, parts=True),
    Measure("spectrum", "spectrum of the Hessian", Spectrum, 60, _spectrum, join=Spectrum.joined,
            uncertainty=_relative_trace),
    Measure("slice", "slice of the loss", Slice, 20, _slice),
    Measure("entropy", "free entropy", FreeEntropy, 60, _entropy),
)  # fmt: skip


def seed_of_round(seed: int, number: int) -> int:
    """The seed of the first, second, ... measurement of one measure."""
    return seed if number == 0 else derive_seed(seed, "round", number) % 2**31
