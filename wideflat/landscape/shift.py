r"""What a definite change of the weights does: the way to other weights, rounding to few bits, pruning.

.. code-block:: text

    E(w + t (w' - w)) - E(w)          other weights w', a position is t
    E(Q_b(w)) - E(w)                  rounded, a position is the number of bits
    E(P_f(w)) - E(w)                  pruned, a position is the share that is 0

Beside each stands the local energy at the sigma whose noise is as long as the change, sigma = |w' - w| / |a|: is the
change harmless because the minimum is flat, or because it is short, or does it go in a better direction than noise?

Error bars are over data, of differences of the same examples (:mod:`wideflat.landscape.points`). The barrier on the way
to other weights is how far the curve rises above its chord,

.. code-block:: text

    barrier = max over t in [0, 1] of  E(w_t) - (1 - t) E(w) - t E(w'),

with the interval that a simultaneous confidence band of all t has at its largest.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.checks import choice, flag, numbers_of, shown
from wideflat.checks.options import check_fields, text
from wideflat.checks.records import array, dense, reading
from wideflat.distributed.whole import whole_tensors
from wideflat.energy.measure import local_energy
from wideflat.energy.opening import Opened, opened
from wideflat.energy.request import BatchNorm
from wideflat.evaluation.blocks import Blocks
from wideflat.evaluation.evaluation import Evaluation, Forward, Metric
from wideflat.evaluation.selection import Selection
from wideflat.kernels.float64 import doubled, fetched, squared_length
from wideflat.landscape.alignment import aligned, require_same_answers
from wideflat.landscape.points import Sample, move, sample
from wideflat.landscape.rounding import pruned, quantized
from wideflat.noise.scales import Scale, Scales, transposed_groups
from wideflat.noise.shared_noise import SharedNoise, unwritten
from wideflat.notebook import axes_or_new
from wideflat.progress import Progress
from wideflat.saved import Saved
from wideflat.seeds import derive_seed

__all__ = ["ShiftProfile", "shift_profile"]

#: Draws from which the quantile of a simultaneous band is taken.
DRAWS = 4000


@dataclass(repr=False)
class ShiftProfile(Saved):
    """What a change of the weights does, with error bars over data.

    Attributes:
        positions: t, bits or shares, shape (P,).
        mean: E there less E(w), shape (P,).
        stderr: Standard error of each mean over data; of n errors never below 1/n, as nothing that was seen is certain.
        baseline: E(w).
        baseline_stderr: Its standard error over data.
        lengths: |w' - w| at each position.
        scaled_lengths: |(w' - w) / a|, what :meth:`wideflat.LocalEnergy.certified` takes; infinite where a weight of
            scale 0 has moved.
        sigmas: The sigma whose noise has the same length.
        noise_mean: dE of that noise; NaN where it was not measured.
        noise_stderr: Its standard error, over noise.
        barrier: Of the way to other weights; None for rounding and pruning.
        barrier_interval: Its ends, at 95 %.
        kind: ``"other"``, ``"quantize"`` or ``"prune"``.
        conventions: As in :class:`wideflat.LocalEnergy`.
    """

    positions: np.ndarray
    mean: np.ndarray
    stderr: np.ndarray
    baseline: float
    baseline_stderr: float
    lengths: np.ndarray
    scaled_lengths: np.ndarray
    sigmas: np.ndarray
    noise_mean: np.ndarray
    noise_stderr: np.ndarray
    barrier: float | None = None
    barrier_interval: tuple[float, float] | None = None
    kind: str = "other"
    conventions: dict[str, Any] = field(default_factory=dict)

    _WHAT = "shift profile"
    _ARRAYS = (
        "positions", "mean", "stderr", "lengths", "scaled_lengths", "sigmas", "noise_mean", "noise_stderr",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        choice("kind", self.kind, ("other", "quantize", "prune"))
        shapes = {getattr(self, name).shape for name in self._ARRAYS}
        if shapes != {(len(self.positions),)}:
            raise ValueError(f"every position must have a value, got arrays of the shapes {sorted(shapes)}")
        if self.barrier_interval is not None:
            ends = array("barrier_interval", self.barrier_interval)
            if ends.shape != (2,):
                raise ValueError(f"barrier_interval must be two numbers, got {shown(self.barrier_interval)}")
            self.barrier_interval = float(ends[0]), float(ends[1])

    def plot(self, ax: Any = None, label: str | None = None, **style: Any) -> Any:
        """Draw the change and, dashed, noise of equal length; returns the axes of matplotlib."""
        ax, label = axes_or_new(ax), text("label", label)
        bars = ax.errorbar(
            self.positions, self.mean, yerr=self.stderr, label=label, **{"capsize": 2, "marker": ".", **style}
        )
        if np.isfinite(self.noise_mean).any():
            color = bars.lines[0].get_color()
            ax.errorbar(self.positions, self.noise_mean, yerr=self.noise_stderr, color=color, linestyle="--", alpha=0.6)
        ax.set_xlabel({"other": "$t$", "quantize": "bits", "prune": "share of weights that are 0"}[self.kind])
        ax.set_ylabel(rf"$\delta E$  [{self.conventions.get('metric', 'error')}]")
        if label is not None:
            ax.legend()
        return ax

    def about(self) -> str:
        """The conventions that change the answer, in one line."""
        c = self.conventions
        with reading("shift profile"):
            parts = [
                f"{c['metric']} of {c['architecture']}; {c['examples']} examples; moved: {c['parameters']}",
                f"noise: {c['scale']}",
                "hidden units aligned" if c.get("aligned") else "",
                f"per {c['per']}" if self.kind == "quantize" else "",
                f"batch norm: {c['batch_norm']}" if c.get("batch_norm") else "",
            ]
            return "; ".join(part for part in parts if part)

    def _columns(self) -> dict[str, list[Any]]:
        return {name: getattr(self, name).tolist() for name in self._ARRAYS}

    def _remarks(self) -> list[str]:
        return [f"E(w) = {self.baseline:.5g}", self.about() if self.conventions else ""]

    def __str__(self) -> str:
        head = {"other": "t", "quantize": "bits", "prune": "share"}[self.kind]
        lines = [f"{head:>8} {'dE':>11} {'stderr':>10} {'length':>9} {'sigma':>9} {'noise dE':>11} {'stderr':>10}"]
        columns = (
            self.positions,
            self.mean,
            self.stderr,
            self.lengths,
            self.sigmas,
            self.noise_mean,
            self.noise_stderr,
        )
        for row in zip(*columns, strict=True):
            lines.append("{:8.4g} {:11.5f} {:10.2g} {:9.3g} {:9.3g} {:11.5f} {:10.2g}".format(*row))
        lines.append(f"E(w) = {self.baseline:.5f} +- {self.baseline_stderr:.2g}")
        if self.barrier is not None and self.barrier_interval is not None:
            lines.append("barrier {:.5f} [{:.5f}, {:.5f}]".format(self.barrier, *self.barrier_interval))
        if self.conventions:
            lines.append(self.about())
        return "\n".join(lines)


def shift_profile(
    model: nn.Module,
    data: Any,
    other: Mapping[str, Tensor] | nn.Module | None = None,
    *,
    quantize: Sequence[int] | None = None,
    prune: Sequence[float] | None = None,
    positions: Sequence[float] | Tensor | np.ndarray | None = None,
    per: str = "tensor",
    metric: Metric = "error",
    batch_norm: BatchNorm = "eval",
    parameters: Selection | None = None,
    scale: Scale = "relative",
    noise: bool = True,
    max_passes: float | None = None,
    seed: int = 0,
    progress: bool = True,
    batch_size: int | None = None,
    forward: Forward | None = None,
    calibration: int = 1024,
    align: bool = False,
) -> ShiftProfile:
    r"""What a definite change of the weights does to the metric; give one of ``other``, ``quantize`` and ``prune``.

    Args:
        model: Any network; it is left as it was found.
        data: See :func:`wideflat.local_energy`; it is gone through once a position.
        other: Other weights of the same network, fine-tuned, merged, averaged: its state dictionary or itself. The
            floating-point buffers (statistics of batch norm) move along.
        quantize: Numbers of bits: weights are rounded to the nearest, symmetrically.
        prune: Shares: so many of the weights, the smallest, become 0.
        positions: For ``other`` the t; default 0, 0.1, ..., 1. They may lie outside of [0, 1].
        per: One step of rounding for the ``"tensor"`` or for each output ``"channel"``.
        metric: See :func:`wideflat.local_energy`.
        batch_norm: The same; ``"recalibrate"`` computes statistics anew at every position.
        parameters: Which parameters move; by default all for ``other``, ``"weights"`` for the others.
        scale: Of the noise beside it.
        noise: Measure the local energy at the sigmas of equal length.
        max_passes: Of that measurement.
        seed: Of the noise and of the batches.
        progress: Show progress.
        batch_size: Examples a batch, where batches are made here.
        forward: See :func:`wideflat.local_energy`.
        calibration: Examples from which ``"recalibrate"`` computes statistics.
        align: First permute the hidden units and channels of ``other``, which leaves what it computes, so that its
            weights are nearest to those of the model (:mod:`wideflat.landscape.alignment`). Networks whose layers are
            not known to treat all units alike are refused.

    Example:
        One weight, w = 2 and w' = 4, and the metric w x with x = 1: E grows by 2 t, and there is no barrier.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad(): _ = model.weight.fill_(2.0)
        >>> data = torch.ones(4, 1), torch.ones(4)
        >>> found = shift_profile(model, data, {"weight": torch.tensor([[4.0]])}, positions=[0.5, 1.0],
        ...                       metric=lambda outputs, targets: outputs[:, 0], progress=False)
        >>> found.mean.tolist(), found.lengths.tolist(), found.sigmas.tolist(), found.barrier
        ([1.0, 2.0], [1.0, 2.0], [0.5, 1.0], 0.0)
    """
    given = {"other": other, "quantize": quantize, "prune": prune}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise ValueError(f"give exactly one of other=, quantize= and prune=; got {' and '.join(chosen) or 'none'}")
    kind, noise, align = chosen[0], flag("noise", noise), flag("align", align)
    if choice("per", per, ("tensor", "channel")) != "tensor" and kind != "quantize":
        raise ValueError(f'per="{per}" is for quantize=, not for {kind}=')
    if parameters is None:
        parameters = "all" if kind == "other" else "weights"
    begun = opened(
        model, data, metric, parameters, batch_norm=batch_norm,
        forward=forward, batch_size=batch_size, seed=seed, statistics=("eval", "recalibrate", "batch"),
    )  # fmt: skip
    model, evaluation, names, blocks = begun.model, begun.evaluation, begun.names, begun.blocks
    scales = Scales(model, names, scale)
    places, change = _places(kind, given[kind], positions), SharedNoise(model, names)
    weights = {name: dict(model.named_parameters())[name].detach().clone() for name in names}
    if align:
        if kind != "other":
            raise ValueError(f"align is for other weights, not for {kind}=")
        given["other"] = _aligned(begun, other)
    ways = _ways(kind, given[kind], places, weights, per, model)
    display = Progress("shift profile", len(ways) + 1, progress)
    with unwritten(model), evaluation.explained(), evaluation.prepared(), change, display as bar:
        batches = _calibration(evaluation, blocks, calibration) if evaluation.recalibrates else []
        stops = [_stop(evaluation, change, way, batches) for way in ways]
        found = sample(evaluation, blocks, stops, bar)
    paired = found.contrast(np.eye(len(ways))[1 : 1 + len(places)] - np.eye(len(ways))[0])
    lengths, scaled = _lengths(ways[1 : 1 + len(places)], scales)
    size = math.sqrt(squared_length(scales.values.values()))
    sigmas = lengths / size
    measured = (np.full(len(places), np.nan),) * 2
    if noise:
        beside = local_energy(
            model, data, sigmas, metric=metric, batch_norm=batch_norm, parameters=names, scale=scale, seed=seed,
            max_passes=max_passes, progress=progress, batch_size=begun.batch_size, forward=forward,
            calibration=calibration,
        )  # fmt: skip
        measured = beside.mean, beside.stderr
    barrier, ends = _barrier(found, places, seed) if kind == "other" else (None, None)
    examples = round(float(found.weights.sum()))
    stderr = paired.stderr
    if evaluation.metric_name == "error":  # one more wrong answer would not have been a surprise
        stderr = np.where(lengths > 0, np.hypot(stderr, found.one_more), stderr)
    return ShiftProfile(
        places, paired.mean, stderr, float(found.mean[0]), float(found.stderr[0]), lengths, scaled, sigmas,
        *measured, barrier, ends, kind,
        begun.conventions(
            "shift profile", perturbed=scales.size, examples=examples, scale=scales.name, unmoved=scales.unmoved,
            per=per if kind == "quantize" else None, aligned=align,
        ),
    )  # fmt: skip


@dataclass
class _Way:
    """A change of parameters and buffers, and how far along it to go."""

    directions: dict[str, Tensor]
    buffers: dict[str, Tensor]
    t: float


def _places(kind: str, given: Any, positions: Any) -> np.ndarray:
    if kind != "other" and positions is not None:
        raise ValueError(f"positions are for other weights; those of {kind}= are its own values")
    if kind == "other" and positions is None:
        return np.linspace(0, 1, 11)
    name, values = ("positions", positions) if kind == "other" else (kind, given)
    return np.array(numbers_of(name, values))


def _ways(
    kind: str, given: Any, places: np.ndarray, weights: dict[str, Tensor], per: str, model: nn.Module
) -> list[_Way]:
    """The change at w itself, at each position, and, for other weights, at these."""
    still = _Way({name: torch.zeros_like(weight) for name, weight in weights.items()}, {}, 0.0)
    if kind == "other":
        directions, buffers = _to_other(model, weights, given)
        return [_Way(directions, buffers, t) for t in (0.0, *places, 1.0)]
    changed: Callable[[float], dict[str, Tensor]]
    if kind == "quantize":
        groups = transposed_groups(model)
        changed = lambda bits: {  # noqa: E731
            name: quantized(weight, int(bits), per, groups.get(name)) for name, weight in weights.items()
        }
        if any(bits != int(bits) for bits in places):
            raise ValueError(f"bits must be whole numbers >= 2, got {places.tolist()}")
    else:
        changed = lambda share: pruned(weights, share)  # noqa: E731
    found = [changed(place) for place in places]
    return [still, *(_Way({name: new[name] - weights[name] for name in weights}, {}, 1.0) for new in found)]


def _aligned(begun: Opened, other: Any) -> dict[str, Tensor]:
    """Other weights in the order of units that is nearest, with which the network is seen to answer the same."""
    state, evaluation = _state(other), begun.evaluation
    found = aligned(begun.model, state)
    with unwritten(begun.model), evaluation.explained(), evaluation.prepared():
        require_same_answers(evaluation, begun.blocks.first(), state, found)
    return found


def _state(other: Any) -> dict[str, Tensor]:
    """The tensors of other weights."""
    state = other.state_dict() if isinstance(other, nn.Module) else other
    if not isinstance(state, Mapping):
        raise TypeError(f"other must be a state dictionary or a network, got {type(other).__name__}")
    return whole_tensors(state)


def _to_other(
    model: nn.Module, weights: dict[str, Tensor], other: Mapping[str, Tensor] | nn.Module
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The differences of parameters and of floating-point buffers to other weights of the same network."""
    state = _state(other)
    missing, unknown = [name for name in weights if name not in state], set(state) - set(model.state_dict())
    if missing or unknown:
        raise ValueError(
            "other must be weights of the same network"
            + (f"; it has no {', '.join(missing[:4])}" if missing else "")
            + (f"; the network has no {', '.join(sorted(unknown)[:4])}" if unknown else "")
        )
    buffers = {name: b for name, b in model.named_buffers() if name in state and b.is_floating_point()}
    for name, ours in {**weights, **buffers}.items():
        if dense(name, state[name]).shape != ours.shape:
            raise ValueError(f"{name} has shape {tuple(ours.shape)} here and {tuple(state[name].shape)} in other")
    directions = {name: state[name].detach().to(weight) - weight for name, weight in weights.items()}
    return directions, {name: state[name].detach().to(buffer) - buffer for name, buffer in buffers.items()}


def _calibration(evaluation: Evaluation, blocks: Blocks, examples: int) -> list[Any]:
    """Batches from which statistics are computed anew."""
    batches, seen = [], 0
    for block in blocks.visit(0):
        batches.append(evaluation.load(block.batch))
        seen += block.size
        if seen >= examples:
            break
    return batches


def _stop(evaluation: Evaluation, change: SharedNoise, way: _Way, calibration: list[Any]) -> Callable[[], None]:
    """A function that moves the network along a way."""
    to = move(evaluation, change, way.directions, way.buffers)

    def place() -> None:
        to(way.t)
        if calibration:
            evaluation.recalibrate(calibration)

    return place


def _lengths(ways: Sequence[_Way], scales: Scales) -> tuple[np.ndarray, np.ndarray]:
    """|delta| and |delta / a| of each way, as far as it is gone."""
    plain, scaled = [], []
    for way in ways:
        squares, ratios = [], []
        for name, direction in way.directions.items():
            delta, a = abs(way.t) * doubled(direction).abs(), doubled(scales.values[name]).abs()
            squares.append(delta.square().sum())
            ratios.append(torch.where(delta > 0, delta / a, 0.0).square().sum())
        found = [float(number) for number in fetched([*squares, *ratios])]
        plain.append(math.sqrt(functools.reduce(operator.add, found[: len(squares)], 0.0)))
        scaled.append(math.sqrt(functools.reduce(operator.add, found[len(squares) :], 0.0)))
    return np.array(plain), np.array(scaled)


def _barrier(found: Sample, places: np.ndarray, seed: int) -> tuple[float, tuple[float, float]]:
    """The largest height above the chord, and its interval at 95 %."""
    inside = [k for k, t in enumerate(places) if 0 < t < 1]
    if not inside:
        return 0.0, (0.0, 0.0)
    change = found.values - found.values[0]  # the chord is t times the last of them
    heights = Sample(np.stack([change[k + 1] - places[k] * change[-1] for k in inside]), found.weights)
    variance = np.nan_to_num(heights.covariance)
    stderr = np.sqrt(np.diag(variance))
    # quantile of the largest deviation of all heights, in standard errors
    unit = np.where(stderr > 0, stderr, 1.0)
    values, vectors = np.linalg.eigh(variance / np.outer(unit, unit))
    root = vectors * np.sqrt(np.clip(values, 0, None))
    rng = np.random.default_rng(derive_seed(seed, "barrier"))
    largest = np.abs(rng.standard_normal((DRAWS, len(inside))) @ root.T).max(1)
    half = np.quantile(largest, 0.95) * stderr
    ends = float(np.max(heights.mean - half)), float(np.max(heights.mean + half))
    return max(0.0, float(heights.mean.max())), (max(0.0, ends[0]), max(0.0, ends[1]))
