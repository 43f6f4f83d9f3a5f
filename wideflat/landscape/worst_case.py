r"""The worst case in a ball around the weights, the flatness that sharpness-aware minimisation looks at.

.. code-block:: text

    dE_max(w, sigma) = max over the ball of  E(w + a delta)  -  E(w)

    "l2"       |delta|_2 <= sigma sqrt(D)
    "linf"     |delta_i| <= sigma for all i

a is the scale of the noise (:mod:`wideflat.noise.scales`; w by default). D is the number of perturbed weights, so in
the l2 ball delta has the length that sigma z has in Eq. 4; the linf ball lies in it. sigma means the same on the axis
of all three curves. With a = \|w\| this is what is called adaptive sharpness, of radius rho = sigma sqrt(D) or sigma;
the local energy of the loss is its average-case twin.

The maximum is looked for by gradient ascent of the loss (:mod:`wideflat.landscape.ascent`): one step is the
perturbation of SAM (with the elementwise scale of ASAM), more steps and restarts find more. What is found is a lower
bound of the maximum; a ball holds all smaller ones, so with more than one step the curve never falls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.checks import choice, shown, whole
from wideflat.energy.opening import opened
from wideflat.energy.profile import LocalEnergy, check_sigmas
from wideflat.evaluation.blocks import Block, Blocks
from wideflat.evaluation.evaluation import Evaluation, Forward, Metric
from wideflat.evaluation.selection import Selection
from wideflat.landscape.ascent import BALLS, Ball, climb
from wideflat.noise.scales import Scale, Scales
from wideflat.noise.shared_noise import SharedNoise
from wideflat.progress import Progress
from wideflat.seeds import derive_seed

__all__ = ["worst_case"]

#: More steps of an ascent, or restarts, are never meant.
MOST_STEPS = 10**5


def worst_case(
    model: nn.Module,
    data: Any,
    sigmas: Sequence[float] | Tensor | np.ndarray,
    *,
    noise: Literal["pass", "batch"] = "pass",
    steps: int = 1,
    ball: str = "l2",
    restarts: int = 0,
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
        steps: Steps of the ascent; 1 is SAM's perturbation, 20 is usual for what is called adaptive sharpness.
        ball: ``"l2"`` or ``"linf"``; see the head of this module.
        restarts: Ascents from random points of the ball besides that from w. The worst of all counts.
        metric: What is measured: ``"error"``, ``"loss"``, ``"normalized loss"`` (of logits divided by their standard
            deviation) or a function of outputs and targets.
        objective: What the ascent increases: ``"loss"`` (default), ``"normalized loss"`` or a differentiable function
            of outputs and targets.
        scale: The a of the ball above: ``"relative"``, ``"absolute"``, ``"layer"``, ``"filter"`` or a tensor for each
            name, as in :func:`wideflat.local_energy`.
        batch_norm: ``"eval"`` (running statistics) or ``"batch"`` (those of each batch).
        parameters: Which parameters move; see :func:`wideflat.evaluation.selection.select_parameters`.
        seed: Draws which example goes into which batch, and the points of restarts.
        progress: Show progress.
        batch_size: Examples a batch, where batches are made here.
        forward: See :func:`wideflat.local_energy`.

    Returns:
        A :class:`wideflat.LocalEnergy` whose ``stderr`` is zero: it is a lower bound that was reached, not an estimate.

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
    if not isinstance(noise, str) or noise not in ("pass", "batch"):
        raise ValueError(f'noise must be "pass" or "batch", got {shown(noise)}: a worst case is not of one example')
    steps, restarts = whole("steps", steps, 1, MOST_STEPS), whole("restarts", restarts, 0, MOST_STEPS)
    choice("ball", ball, BALLS)
    if isinstance(objective, str) and objective == "error":
        raise ValueError('objective must have a gradient, and the error is a step function; use objective="loss"')
    begun = opened(
        model, data, metric, parameters, batch_norm=batch_norm, forward=forward, batch_size=batch_size, seed=seed
    )
    evaluation, blocks = begun.evaluation, begun.blocks
    scales = Scales(begun.model, begun.names, scale)
    ascent = Evaluation(begun.model, objective, batch_norm, forward)
    display = Progress("worst case", enabled=progress)
    with evaluation.prepared(), SharedNoise(begun.model, begun.names) as change, display as bar:
        search = _Search(evaluation, ascent, change, scales, (ball, steps, restarts, seed), bar)
        totals, base, sizes = np.zeros(len(radii)), 0.0, 0
        for number, group in enumerate(_groups(blocks, noise)):
            with evaluation.explained():
                here, size = search.totals(group, None)
            base += here
            sizes += size
            totals += search.worst(group, radii, here, number)
    return LocalEnergy(
        sigmas=radii,
        mean=(totals - base) / sizes,
        stderr=np.zeros(len(radii)),
        baseline=base / sizes,
        evaluations=np.full(len(radii), sizes),
        passes=np.ones(len(radii)),
        conventions=begun.conventions(
            _words(scales.name, ball, steps, restarts, noise),
            batches_matter=noise == "batch",
            objective=ascent.metric_name,
            ball=ball,
            steps=steps,
            restarts=restarts,
            noise=noise,
            perturbed=scales.size,
            scale=scales.name,
            unmoved=scales.unmoved,
            examples=sizes,
        ),
    )


def _words(scale: str, ball: str, steps: int, restarts: int, noise: str) -> str:
    """What was measured; one step in the l2 ball is called as it was before there were others."""
    words = [scale, ball if ball != "l2" else "", f"{steps} step{'s' if steps > 1 else ''}"]
    words += ["with momentum" if steps > 1 else "", f"{restarts} restarts" if restarts else "", noise]
    return f"worst case ({', '.join(word for word in words if word)})"


class _Search:
    """Looks for the worst points of balls around w. Points are vectors delta; the weights there are w + a delta."""

    def __init__(
        self,
        evaluation: Evaluation,
        ascent: Evaluation,
        change: SharedNoise,
        scales: Scales,
        effort: tuple[str, int, int, int],
        bar: Progress,
    ) -> None:
        self.evaluation, self.ascent, self.change, self.bar = evaluation, ascent, change, bar
        self.ball, self.steps, self.restarts, self.seed = effort
        self.names, self.scale = list(scales.values), scales.values
        self.center = torch.zeros_like(scales.flat())

    def totals(self, blocks: Callable[[], Iterable[Block]], delta: Tensor | None) -> tuple[float, int]:
        """Sum of the metric over the examples at a point (None for w), and the number of examples."""
        self._move(delta)
        values, counts = [], []
        for block in blocks():
            value, counted = self.evaluation.mean(self.evaluation.load(block.batch), block.size)
            values.append(value.detach())
            counts.append(counted)
            self.bar.advance()
        return _total(values, counts), sum(counts)

    def worst(self, blocks: Callable[[], Iterable[Block]], radii: np.ndarray, base: float, number: int) -> np.ndarray:
        """Sum of the metric over the examples at the worst point found for each radius."""
        objective = functools.partial(self._objective, blocks)
        first = objective(self.center, True)
        plain = self.steps == 1 and not self.restarts  # the perturbation of SAM, whatever it does
        found = np.full(len(radii), base)
        for k in np.argsort(radii, kind="stable"):
            radius = float(radii[k])
            ball = Ball(self.ball, radius * math.sqrt(len(self.center)) if self.ball == "l2" else radius)
            if plain:
                point = ball.project(2 * ball.radius * ball.steepest(first[1]))
                found[k] = self.totals(blocks, point)[0]
                continue
            starts = [(self.center, first)] + [(self._random(ball, k, number, i), None) for i in range(self.restarts)]
            for start, known in starts:
                climbed = climb(objective, ball, start, self.steps, known)
                found[k] = max(found[k], self.totals(blocks, climbed.best)[0])
        if not plain:  # a ball holds the smaller ones
            order = np.argsort(radii, kind="stable")
            found[order] = np.maximum.accumulate(found[order])
        return found

    def _random(self, ball: Ball, k: int, number: int, restart: int) -> Tensor:
        seed = derive_seed(self.seed, "restart", int(k), number, restart)
        return ball.random(self.center, torch.Generator().manual_seed(seed))

    def _move(self, delta: Tensor | None) -> None:
        if delta is None:
            self.change.apply(0.0)
            return
        parts = delta.split([self.scale[name].numel() for name in self.names])
        directions = {
            name: self.scale[name] * part.view(self.scale[name].shape)
            for name, part in zip(self.names, parts, strict=True)
        }
        self.change.point(directions)
        self.change.apply(1.0)

    def _objective(
        self, blocks: Callable[[], Iterable[Block]], delta: Tensor, with_gradient: bool
    ) -> tuple[float, Tensor]:
        """The sum of the objective over the examples, and its gradient in delta (zeros if it is not asked for)."""
        self._move(delta)
        gradient = {name: torch.zeros_like(scale) for name, scale in self.scale.items()}
        values, counts = [], []
        for block in blocks():
            with self.ascent.differentiable(self.names if with_gradient else []) as parameters:
                value, counted = self.ascent.mean(self.ascent.load(block.batch), block.size)
                values.append(value.detach())
                counts.append(counted)
                if with_gradient:
                    self._add(gradient, value * counted, list(parameters.values()))
            self.bar.advance()
        return _total(values, counts), torch.cat([part.flatten() for part in gradient.values()])

    def _add(self, gradient: dict[str, Tensor], value: Tensor, parameters: list[nn.Parameter]) -> None:
        if not value.requires_grad:
            raise ValueError(
                f"objective {self.ascent.metric_name} has no gradient: it must be a differentiable function of the "
                "outputs, and these of the chosen parameters"
            )
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        for name, part in zip(self.names, found, strict=True):
            if part is not None:
                gradient[name].addcmul_(part, self.scale[name])


def _groups(blocks: Blocks, noise: str) -> Iterator[Callable[[], Iterable[Block]]]:
    """What one direction is the worst for, each as a function that goes through its blocks."""
    if noise == "pass":
        yield lambda: blocks.visit(0)
    else:
        for block in blocks.visit(0):
            yield functools.partial(list[Block], [block])


def _total(values: list[Tensor], counts: list[int]) -> float:
    """The sum of means times counts: the host waits for the device once for all of them."""
    means = torch.stack(values).cpu().double() if values else torch.zeros(0, dtype=torch.float64)
    return math.fsum(mean * count for mean, count in zip(means.tolist(), counts, strict=True))
