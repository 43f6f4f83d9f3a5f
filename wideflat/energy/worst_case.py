r"""The worst case in a ball around the weights, the flatness that sharpness-aware minimisation looks at.

.. code-block:: text

    dE_max(w, sigma) = max over |delta|^2 <= sigma^2 D of  E(w + a delta)  -  E(w)

a is the scale of the noise (:mod:`wideflat.energy.scales`; w by default). D is the number of perturbed weights, so
delta has the length that sigma z has in Eq. 4, and sigma means the same on the axis of both curves. The maximum is
looked for by gradient ascent of the loss: one step is the perturbation of SAM (with the elementwise scale of ASAM),
more steps find more. What is found is a lower bound of the maximum.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.distributed.whole import whole_network
from wideflat.energy.blocks import Block, Blocks
from wideflat.energy.evaluation import Evaluation, Forward, Metric
from wideflat.energy.profile import LocalEnergy, architecture, check_sigmas, conventions
from wideflat.energy.request import whole_passes
from wideflat.energy.scales import Scale, Scales
from wideflat.energy.selection import Selection, select_parameters
from wideflat.energy.shared_noise import SharedNoise
from wideflat.progress import Progress

__all__ = ["worst_case"]


def worst_case(
    model: nn.Module,
    data: Any,
    sigmas: Sequence[float] | Tensor | np.ndarray,
    *,
    noise: Literal["pass", "batch"] = "pass",
    steps: int = 1,
    metric: Metric = "error",
    objective: Metric = "loss",
    scale: Scale = "relative",
    batch_norm: Literal["eval", "batch"] = "eval",
    parameters: Selection = "all",
    seed: int = 0,
    progress: bool = True,
    batch_size: int | None = None,
    forward: Forward | None = None,
) -> LocalEnergy:
    r"""How much the metric grows in the worst direction that gradient ascent finds in a ball around w.

    Args:
        model: Any network; it is left as it was found.
        data: See :func:`wideflat.local_energy`.
        sigmas: Radii of the ball, in units that make them comparable with the noise of Eq. 4: the root mean square of
            the change of a weight over its a.
        noise: What the direction is the worst for: ``"pass"`` the whole data set, ``"batch"`` each batch on its own
            (what SAM does while training, a larger value).
        steps: Steps of the ascent; 1 is SAM's perturbation.
        metric: What is measured: ``"error"``, ``"loss"`` or a function of outputs and targets.
        objective: What the ascent increases: ``"loss"`` (default) or a differentiable function of outputs and targets.
        scale: The a of the ball above: ``"relative"``, ``"absolute"``, ``"layer"``, ``"filter"`` or a tensor for each
            name, as in :func:`wideflat.local_energy`.
        batch_norm: ``"eval"`` (running statistics) or ``"batch"`` (those of each batch).
        parameters: Which parameters move; see :func:`wideflat.energy.selection.select_parameters`.
        seed: Draws which example goes into which batch.
        progress: Show progress.
        batch_size: Examples a batch, where batches are made here.
        forward: See :func:`wideflat.local_energy`.

    Returns:
        A :class:`wideflat.LocalEnergy` whose ``stderr`` is zero: nothing here is random.

    Example:
        A loss that is linear in one weight, L = -w x with w = 2 and x = 1: the worst w in the ball is 2 - 2 sigma, so
        the loss grows by 2 sigma.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad(): _ = model.weight.fill_(2.0)
        >>> minus = lambda outputs, targets: -outputs[:, 0]
        >>> data = torch.ones(4, 1), torch.ones(4)
        >>> worst_case(model, data, [0.5], metric=minus, objective=minus, progress=False).mean.tolist()
        [1.0]
    """
    radii = check_sigmas(sigmas)
    if noise not in ("pass", "batch"):
        raise ValueError(f'noise must be "pass" or "batch", got {noise!r}: a worst case has no noise of one example')
    if not hasattr(steps, "__index__") or operator.index(steps) < 1:
        raise ValueError(f"steps must be a whole number >= 1, got {steps!r}")
    if isinstance(objective, str) and objective == "error":
        raise ValueError('objective must have a gradient, and the error is a step function; use objective="loss"')
    if batch_norm not in ("eval", "batch"):
        raise ValueError(f'batch_norm must be "eval" or "batch", got {batch_norm!r}')
    model = whole_network(model)
    evaluation = Evaluation(model, metric, batch_norm, forward)
    names, words = select_parameters(model, parameters)
    scales = Scales(model, names, scale)
    ascent = Evaluation(model, objective, batch_norm, forward)
    blocks, batch_size = whole_passes(evaluation, data, batch_size, seed)
    shown = Progress("worst case", enabled=progress)
    with evaluation.prepared(), SharedNoise(model, names) as change, shown as bar:
        search = _Ascent(evaluation, ascent, change, scales, steps, bar)
        totals, base, sizes = np.zeros(len(radii)), 0.0, 0
        for group in _groups(blocks, noise):
            with evaluation.explained():
                value, size = search.totals(group, 0.0)
            base += value
            sizes += size
            totals += search.climb(group, radii)
    return LocalEnergy(
        sigmas=radii,
        mean=(totals - base) / sizes,
        stderr=np.zeros(len(radii)),
        baseline=base / sizes,
        evaluations=np.full(len(radii), sizes),
        passes=np.ones(len(radii)),
        conventions=conventions(
            f"worst case ({scales.name}, {steps} step{'s' if steps > 1 else ''}, {noise})",
            metric=evaluation.metric_name,
            meaning=evaluation.meaning,
            objective=ascent.metric_name,
            noise=noise,
            batch_norm=batch_norm if evaluation.norms else None,
            batch_size=batch_size if noise == "batch" or (evaluation.norms and batch_norm == "batch") else None,
            parameters=words,
            perturbed=scales.size,
            scale=scales.name,
            unmoved=scales.unmoved,
            architecture=architecture(model),
            examples=sizes,
            seed=seed,
        ),
    )


class _Ascent:
    """Gradient ascent from w, projected onto the ball."""

    def __init__(
        self,
        evaluation: Evaluation,
        ascent: Evaluation,
        change: SharedNoise,
        scales: Scales,
        steps: int,
        bar: Progress,
    ) -> None:
        self.evaluation, self.ascent, self.change, self.bar = evaluation, ascent, change, bar
        self.steps = steps
        self.names, self.scale = list(scales.values), scales.values
        self.radius = math.sqrt(scales.size)

    def totals(self, blocks: Callable[[], Iterable[Block]], sigma: float) -> tuple[float, int]:
        """Sum of the metric over the examples at w + sigma times the direction, and their number."""
        self.change.apply(sigma)
        total, count = 0.0, 0
        for block in blocks():
            value, counted = self.evaluation.mean(self.evaluation.load(block.batch), block.size)
            total += float(value) * counted
            count += counted
            self.bar.advance()
        return total, count

    def climb(self, blocks: Callable[[], Iterable[Block]], radii: np.ndarray) -> np.ndarray:
        """Sum of the metric over the examples at the worst point found for each radius."""
        self.change.apply(0.0)
        first = self._direction(blocks)
        found = []
        for sigma in radii:
            delta = first
            for _ in range(1, self.steps):
                self._set(delta)
                self.change.apply(float(sigma))
                step = self._direction(blocks)
                delta = {name: delta[name] + step[name] for name in self.names}
                excess = _norm(delta) / self.radius
                if excess > 1:
                    delta = {name: value / excess for name, value in delta.items()}
            self._set(delta)
            found.append(self.totals(blocks, float(sigma))[0])
        return np.array(found)

    def _set(self, delta: dict[str, Tensor]) -> None:
        self.change.point({name: self.scale[name] * delta[name] for name in self.names})

    def _direction(self, blocks: Callable[[], Iterable[Block]]) -> dict[str, Tensor]:
        """The gradient of the objective in delta, scaled to the length of the ball of sigma = 1."""
        total = {name: torch.zeros_like(scale) for name, scale in self.scale.items()}
        for block in blocks():
            with self.ascent.differentiable(self.names) as parameters:
                value, counted = self.ascent.mean(self.ascent.load(block.batch), block.size)
                if not value.requires_grad:
                    raise ValueError(
                        f"objective {self.ascent.metric_name} has no gradient: it must be a differentiable function of "
                        "the outputs, and these of the chosen parameters"
                    )
                gradients = torch.autograd.grad(value * counted, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(self.names, gradients, strict=True):
                if gradient is not None:
                    total[name].addcmul_(gradient, self.scale[name])
            self.bar.advance()
        length = _norm(total)
        factor = self.radius / length if length > 0 else 0.0
        return {name: value * factor for name, value in total.items()}


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def _groups(blocks: Blocks, noise: str) -> Iterator[Callable[[], Iterable[Block]]]:
    """What one direction is the worst for, each as a function that goes through its blocks."""
    if noise == "pass":
        yield lambda: blocks.visit(0)
    else:
        for block in blocks.visit(0):
            yield functools.partial(list[Block], [block])
