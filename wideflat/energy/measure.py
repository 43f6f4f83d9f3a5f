r"""Local energy: how fast the error of a network grows around its weights, for any network, with error bars.

.. code-block:: text

    dE(w, sigma) = E_z [ E_train(w + sigma z * w) ] - E_train(w),      z ~ N(0, I)                              (Eq. 4)

The expectation over z is taken for every example on its own, E_z mean_i e_i = mean_i E_z e_i, so the examples need not
share z. With n examples, v the variance of e_i over z and rho the correlation of two examples that share z,

.. code-block:: text

    noise="pass"      one z for the whole data set          variance of one pass   (v / n) (1 + (n - 1) rho)
    noise="batch"     one z for every batch of b            variance of one pass   (v / n) (1 + (b - 1) rho)
    noise="example"   one z for every example               variance of one pass    v / n

All three are unbiased, but the first needs n/b times as many passes as the second for the same error bar where rho is
not small. The third costs no more than the second where every layer is linear and sees one vector an example (an MLP, a
committee), and about twice as much in convolutions; the default, ``noise="auto"``, chooses by that. Error bars come
from independent blocks of noise, never from the number of examples: the data set is fixed, z alone is random.

The estimator and its error bars are those of :mod:`wideflat.energy.stratified`, with batches as blocks. For the error
(a count) stderr^2 also has 1/(number of answers)^2: the error bar of "nothing went wrong so far" is not zero. An answer
is an example, or a token or pixel where each of these has a target.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.checks import flag
from wideflat.distributed.whole import whole_network
from wideflat.energy.block_energy import BlockEnergy, Pending
from wideflat.energy.profile import Interrupted, LocalEnergy
from wideflat.energy.ranks import gathered, rank, world_size
from wideflat.energy.request import SIGMAS, BatchNorm, Noise, Plan, Request, plan
from wideflat.energy.self_check import Steady, fast_path_differs
from wideflat.energy.stopping import StoppingRule
from wideflat.energy.stratified import Estimate, stratified
from wideflat.evaluation.blocks import Block
from wideflat.evaluation.evaluation import Forward, Metric
from wideflat.evaluation.selection import Selection
from wideflat.noise.scales import Scale
from wideflat.noise.shared_noise import unwritten
from wideflat.noise.uses import Unforeseen
from wideflat.progress import Progress
from wideflat.seeds import derive_seed

__all__ = ["local_energy"]

#: Blocks that are evaluated before the first look at the error bars; then at every quarter more.
ROUND = 16


def local_energy(
    model: nn.Module,
    data: Any,
    sigmas: Sequence[float] | Tensor | np.ndarray = SIGMAS,
    *,
    noise: Noise = "auto",
    metric: Metric = "error",
    batch_norm: BatchNorm = "eval",
    parameters: Selection = "all",
    target_stderr: float | None = None,
    max_passes: float | None = None,
    seed: int = 0,
    progress: bool = True,
    common_noise: bool = True,
    batch_size: int | None = None,
    forward: Forward | None = None,
    augment: Callable[[Any], Any] | None = None,
    calibration: int = 1024,
    scale: Scale = "relative",
    antithetic: bool = False,
) -> LocalEnergy:
    r"""dE(w, sigma) = E_z[E(w + sigma a z)] - E(w) over a range of sigma (Eq. 4: a = \|w\|), with error bars.

    Args:
        model: Any network. Its weights, buffers and modes and all random states are as before afterwards, whatever
            happens. It is evaluated in eval mode (no dropout).
        data: The training data: tensors ``(inputs, targets)`` in memory, a data set, a ``DataLoader`` or any iterable
            of batches. Order and augmentation of a loader are the same in every pass. Batches that are not
            ``(inputs, targets)`` need ``forward``.
        sigmas: Strengths of the noise; 0, 0.05, ..., 0.5 when left out.
        noise: What shares one z: ``"batch"`` each batch, ``"example"`` each example (by local reparametrisation and
            Flipout, see :mod:`wideflat.noise.example_noise`), ``"pass"`` the whole data set, as in the paper; only the
            last gives the spread over perturbations. All three have the same expectation. ``"auto"`` (default) is
            ``"example"`` where that needs no Flipout (all layers linear, of one vector an example), else ``"batch"``;
            ``conventions["noise"]`` says which it was. Examples that influence each other share their noise, and
            ``"example"`` refuses them.
        metric: ``"error"``, ``"loss"`` (cross-entropy), or a function of outputs and targets that gives one number for
            each example (or one for the batch). What the first two mean for which outputs and targets stands in
            :mod:`wideflat.evaluation.metrics`; ``conventions["meaning"]`` says what was taken.
        batch_norm: Which statistics the perturbed network normalises with: ``"eval"`` the running statistics of the
            unperturbed network (Eq. 4 literally), ``"batch"`` those of each batch, ``"recalibrate"`` running
            statistics computed anew for each perturbation. This changes the answer up to tenfold.
        parameters: Which parameters are perturbed; see :func:`~wideflat.evaluation.selection.select_parameters`.
            This too.
        target_stderr: Stop at each sigma when its standard error is below this, by the rule of
            :mod:`wideflat.energy.stopping`: the number of evaluations is decided by a pilot.
        max_passes: Stop at each sigma after this many passes over the data. May be a fraction where the data can be
            indexed: then the error bar includes the choice of the data. Default: 2 (64 with ``noise="pass"``, or where
            all data are one batch), or, with a ``target_stderr``, as many as it takes up to 1000.
        seed: Of the noise. The result does not depend on the number of processes.
        progress: Show progress and an estimate of what is left.
        common_noise: Use one z for all sigmas: cheaper, and a smoother curve; the points are then correlated (see
            ``covariance``). False draws z for each.
        batch_size: Examples a block where the blocks are made here; by default from the sizes of network and data, or,
            where examples influence each other, all of them (up to 1024).
        forward: A function of the model and a batch that returns ``(outputs, targets)``.
        augment: Applied to the inputs of each batch, freshly in every pass; perturbed and unperturbed network see the
            same. Give it if the network was trained with it (App. B.2) and the data do not already do it.
        calibration: Examples from which ``"recalibrate"`` computes statistics.
        scale: What the noise is proportional to, the a of w + sigma a z: ``"relative"`` each weight, as in Eq. 4;
            ``"absolute"`` 1; ``"layer"`` the root mean square of its tensor; ``"filter"`` that of its output channel;
            or a mapping from names to tensors. See :mod:`wideflat.noise.scales`. ``conventions["unmoved"]`` counts
            the weights that it cannot move (those that are 0, under ``"relative"``); an error where that is all.
        antithetic: Take each z together with -z: two passes, whose mean is one result, so that what is odd in z
            cancels. Where the gradient at w makes most of the variance (``metric="loss"`` at small sigma, batches
            whose own minimum is elsewhere) the same error bar takes a tenth to a hundredth of the passes; where the
            curvature does, it takes twice as many. Not with ``noise="pass"``.

    Returns:
        The profile. ``print`` it, ``plot()`` it, ``compare()`` it, ``save()`` it.

    Raises:
        Interrupted: At Ctrl-C; its ``profile`` is what was measured so far.

    Note:
        Before anything is measured, the fast path is compared with the plain one (perturb the weights, run, restore)
        for the same noise on a few examples. Where they differ the plain one is used, and ``conventions["notes"]`` says
        so.

        With ``torch.distributed`` initialised each rank evaluates its share of the blocks, and all get the same result.

    Example:
        One weight w = 1, one example x = 1 with target +1: wrong when 1 + sigma z < 0, so dE = Phi(-1/sigma).

        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad(): _ = model.weight.fill_(1.0)
        >>> data = torch.ones(4096, 1), torch.ones(4096)
        >>> profile = local_energy(model, data, [1.0], noise="example", max_passes=8, progress=False)
        >>> bool(abs(profile.mean[0] - 0.1587) < 4 * profile.stderr[0] < 0.02)
        True
        >>> model.weight.item()
        1.0
    """
    request = Request(
        whole_network(model), data, sigmas, noise, metric, batch_norm, parameters, target_stderr, max_passes, seed,
        common_noise, batch_size, forward, augment, calibration, scale,
        antithetic,
    )  # fmt: skip
    settled = plan(request)
    try:
        return _measured(settled, progress)
    except Unforeseen as surprise:
        if request.noise == "example" or settled.blocks.one_pass:
            raise
        reason = f"measured again with care: {surprise}".replace('noise="example": ', "")
    return _measured(plan(request, careful=reason), progress)


def _measured(plan: Plan, progress: bool) -> LocalEnergy:
    loop = _Loop(plan)
    shown = f"local energy ({plan.request.noise})"
    with Progress(shown, loop.total(), enabled=flag("progress", progress) and rank() == 0) as bar:
        try:
            loop.run(bar)
        except KeyboardInterrupt:
            raise Interrupted(loop.result(complete=False)) from None
    profile = loop.result()
    assert profile is not None
    return profile


class _Loop:
    """Passes over the data in rounds of blocks, shared by all ranks, until every sigma has its error bar."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.blocks, self.sigmas = plan, plan.blocks, plan.request.sigmas
        self.target = plan.request.target_stderr
        self.rule = None if self.target is None else StoppingRule(self.target, len(self.sigmas))
        self.energy = BlockEnergy(plan)
        self.rows: list[np.ndarray] = []  # one table (blocks, S) a pass, NaN where nothing was evaluated
        self.active = self.sigmas > 0

    def total(self) -> float | None:
        """Blocks to evaluate at most, if that is known."""
        if self.blocks.count is None or self.target is not None:
            return None
        return math.ceil(self.plan.passes * self.blocks.count / world_size())

    def run(self, bar: Progress) -> None:
        """Evaluate until every sigma has its error bar, or the passes are used up."""
        plan = self.plan
        with unwritten(plan.request.model), plan.evaluation.prepared(), plan.carried.afterwards():
            steady = Steady(self.energy)
            self.energy.prepare()
            if not self.energy.take_cheap_path() and any(gathered(fast_path_differs(self.energy))):
                self.energy.take_plain_path()
            steady.restore()
            with self.energy:
                self._passes(bar)
            steady.check()

    def _passes(self, bar: Progress) -> None:
        number = 0
        while number < self.plan.passes and self.active.any():
            left = self.plan.passes - number
            if self.target is not None and not left % 1:
                left = min(left, max(2, number))
            tiles = self.energy.tiles(left)
            for part in self._parts(number):
                self._round(number, part, tiles, bar)
                if self.target is not None:
                    self._stop_where_reached()
                    if not self.active.any():
                        break
            number += tiles
        if not self.rows:  # nothing to perturb with: the baseline alone
            self._round(0, None, 1, bar)

    def _parts(self, number: int) -> Iterator[list[int] | None]:
        """The blocks of a pass in rounds; None for all of them as they come."""
        if not self.blocks.indexed or self.plan.noise == "pass":
            yield None
            return
        assert self.blocks.count is not None
        generator = torch.Generator().manual_seed(derive_seed(self.plan.request.seed, "order", number))
        order = torch.randperm(self.blocks.count, generator=generator).tolist()
        order = order[: math.ceil(min(1.0, self.plan.passes - number) * self.blocks.count)]
        start = 0
        while start < len(order):
            seen = start + number * len(order)
            end = len(order) if self.target is None else start + max(ROUND, seen // 4)
            yield order[start:end]
            start = end

    def _round(self, number: int, part: list[int] | None, tiles: int, bar: Progress) -> None:
        """Evaluate some blocks and enter what they gave into the table."""
        launched: dict[int, Pending] = {}
        surprise: Unforeseen | None = None
        try:
            for block in self._visit(number, part):
                launched[block.index] = self.energy.launch(block, number, tiles, self.active)
                bar.advance(tiles)
        except KeyboardInterrupt:
            if self.plan.noise != "pass" and world_size() == 1:  # what this round has measured so far is not lost
                with contextlib.suppress(Unforeseen):
                    self._enter(number, self.energy.settled(launched), tiles)
            raise
        except Unforeseen as error:  # all ranks hear of it before it is raised
            surprise = error
        rows: dict[int, np.ndarray] = {}
        try:
            rows = self.energy.settled(launched)
        except Unforeseen as error:
            surprise = surprise or error
        self._enter(number, self._gather(rows, surprise), tiles)

    def _visit(self, number: int, part: list[int] | None) -> Iterator[Block]:
        """The blocks of this process."""
        mine, world = rank(), world_size()
        if self.blocks.sharded:
            for block in self.blocks.visit(number):
                yield replace(block, index=block.index * world + mine)
        else:
            yield from self.blocks.visit(number, part, lambda j: j % world == mine)

    def _gather(self, rows: dict[int, np.ndarray], surprise: Unforeseen | None) -> dict[int, np.ndarray]:
        """What all processes measured in this round.

        Raises:
            Unforeseen: On all ranks, if one of them has met with a surprise.
        """
        baselines, sizes, answers = self.energy.baselines, self.energy.sizes, self.energy.answers
        everything: dict[int, np.ndarray] = {}
        mine = (rows, *({j: kept[j] for j in rows} for kept in (baselines, sizes, answers)), surprise)
        for theirs, their_baselines, their_sizes, their_answers, error in gathered(mine):
            if error is not None:
                raise error
            everything.update(theirs)
            baselines.update(their_baselines)
            sizes.update(their_sizes)
            answers.update(their_answers)
        return everything

    def _enter(self, number: int, rows: dict[int, np.ndarray], tiles: int) -> None:
        if not rows:
            return
        if self.plan.noise == "pass":  # one z for all blocks: together they are one
            sizes = np.array([self.energy.sizes[j] for j in rows], dtype=float)
            values = np.stack(list(rows.values()))  # (blocks, 1, S)
            rows = {0: np.einsum("j,jts->ts", sizes / sizes.sum(), values)}
        while len(self.rows) < number + tiles:
            self.rows.append(np.empty((0, len(self.sigmas))))
        for tile in range(tiles):
            table = self.rows[number + tile]
            if len(table) <= max(rows):
                missing = np.full((max(rows) + 1 - len(table), len(self.sigmas)), np.nan)
                table = self.rows[number + tile] = np.concatenate([table, missing])
            for j, values in rows.items():
                table[j] = values[tile]

    # ---- what comes out

    def _table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What blocks gave in every pass at each sigma, their sizes, evaluations, what is added to variances."""
        count = max(len(table) for table in self.rows)
        if self.blocks.indexed and self.plan.noise != "pass":
            count = max(count, self.blocks.count or 0)
        table = np.full((len(self.rows), count, len(self.sigmas)), np.nan)
        for row, values in zip(table, self.rows, strict=True):
            row[: len(values)] = values
        if self.plan.noise == "pass":
            sizes = np.array([sum(self.energy.sizes.values())], dtype=float)
        else:
            sizes = np.array([self.energy.sizes.get(j, 0) for j in range(count)], dtype=float)
        evaluations = np.einsum("pjs,j->s", (~np.isnan(table)).astype(float), sizes)
        if self.plan.request.antithetic:
            evaluations *= 2
        extra = np.zeros(len(self.sigmas))
        if self.plan.evaluation.metric_name == "error":  # one more wrong answer would not have been a surprise
            answers = evaluations * (sum(self.energy.answers.values()) / sum(self.energy.sizes.values()))
            with np.errstate(divide="ignore"):
                extra = np.where((evaluations > 0) & (self.sigmas > 0), 1 / answers**2, 0.0)
        return table, sizes, evaluations, extra

    def _estimate(self) -> tuple[Estimate, np.ndarray, np.ndarray]:
        """The estimate from the table, the standard errors, and the examples evaluated at each sigma."""
        table, sizes, evaluations, extra = self._table()
        with np.errstate(invalid="ignore"):  # where a loss has overflown, the mean is infinite and has no error bar
            estimate = stratified(table, sizes)
            if self.rule is not None:
                estimate = self.rule.widened(table, sizes, estimate)
        estimate.covariance[np.diag_indices(len(extra))] += extra
        zero = self.sigmas == 0
        estimate.mean[zero] = estimate.covariance[zero] = estimate.covariance[:, zero] = 0.0
        estimate.degrees_of_freedom[zero] = np.inf
        return estimate, np.sqrt(np.diag(estimate.covariance)), evaluations.astype(int)

    def _stop_where_reached(self) -> None:
        assert self.rule is not None
        table, sizes, _, extra = self._table()
        with np.errstate(invalid="ignore"):
            self.active &= ~self.rule.reached(table, sizes, stratified(table, sizes), extra)

    def _baseline(self) -> tuple[float, float, int, int]:
        """E(w) with its error bar over data, the number of examples, and that of the largest block."""
        known = {j: np.mean(values) for j, values in self.energy.baselines.items() if values}
        sizes = np.array([self.energy.sizes[j] for j in known], dtype=float)
        base = np.array(list(known.values()))
        whole = len(sizes) == (self.blocks.count or -1) * (world_size() if self.blocks.sharded else 1)
        share = sizes / sizes.sum()
        spread = 0.0
        if not whole:
            spread = float(np.sqrt((share**2 * (base - share @ base) ** 2).sum() * len(base) / max(len(base) - 1, 1)))
        return float(share @ base), spread, self.blocks.examples or int(sizes.sum()), int(sizes.max())

    def result(self, complete: bool = True) -> LocalEnergy | None:
        """The profile as far as it was measured; None if nothing was."""
        if not self.rows:
            return None
        estimate, stderr, evaluations = self._estimate()
        baseline, spread, examples, largest = self._baseline()
        return LocalEnergy(
            sigmas=self.sigmas,
            mean=estimate.mean,
            stderr=stderr,
            baseline=baseline,
            degrees_of_freedom=estimate.degrees_of_freedom,
            covariance=estimate.covariance,
            baseline_stderr=spread,
            evaluations=evaluations,
            passes=evaluations / examples,
            samples=np.concatenate(self.rows) if self.plan.noise == "pass" else None,
            conventions=self.plan.conventions(examples, largest),
            complete=complete and not (self.target is not None and bool(self.active.any())),
        )
