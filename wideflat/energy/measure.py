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
(a count) stderr^2 also has 1/(number of evaluations)^2: the error bar of "nothing went wrong so far" is not zero.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from wideflat.committee.channel import log_majority
from wideflat.energy.blocks import Block, Blocks, repeated, truncated
from wideflat.energy.evaluation import Evaluation, Forward, Metric
from wideflat.energy.example_noise import ExampleNoise
from wideflat.energy.folding import FoldedNetwork
from wideflat.energy.profile import Comparison, Interrupted, LocalEnergy
from wideflat.energy.shared_noise import FirstLayer, Selection, SharedNoise, select_parameters
from wideflat.energy.stopping import StoppingRule
from wideflat.energy.stratified import Estimate, stratified
from wideflat.files import atomic_write
from wideflat.progress import Progress
from wideflat.seeds import derive_seed

__all__ = [
    "Comparison",
    "Interrupted",
    "LocalEnergy",
    "LocalEnergyTrace",
    "committee_local_energy",
    "layer_profiles",
    "local_energy",
]

Noise: TypeAlias = Literal["auto", "batch", "example", "pass"]
BatchNorm: TypeAlias = Literal["eval", "recalibrate", "batch"]

#: Passes where neither ``max_passes`` nor ``target_stderr`` says how many: the fewest whose error bar is free of the
#: variance between data, and the paper's 64 realisations (Sec. B.3) where the spread over perturbations is the result.
DEFAULT_PASSES = {"batch": 2, "example": 2, "pass": 64}
#: Passes after which a target that was not reached is given up.
MOST_PASSES = 1000
#: Blocks that are evaluated before the first look at the error bars; then at every quarter more.
ROUND = 16
#: Bytes of prepared batches and of products of a first layer that are kept from one pass to the next.
KEPT_BYTES = 2**28
#: Bytes of a block whose examples are repeated to evaluate several passes at once.
TILED_BYTES = 2**26


def automatic_batch_size(model: nn.Module, evaluation: Evaluation, block: Any, noise: str, examples: int) -> int:
    """Examples that share a z, from the cost of drawing one against that of evaluating an example.

    Drawing z for D parameters takes as long as about c = 800 D / (flops of an example) examples, and variance times
    time is least at b = sqrt(c (1 - rho) / rho); rho is taken as 0.02. At least 16 blocks where the data allow it.
    The choice depends on the network and the data alone, not on timings, so that equal seeds give equal results.
    """
    if evaluation.device.type != "cpu":
        size = 512.0
    elif noise == "pass":
        size = 128.0
    else:
        one = truncated(block, 1)
        flops = 0
        with contextlib.suppress(Exception), FlopCounterMode(display=False) as counter:
            evaluation.outputs(evaluation.load(one))
            flops = counter.get_total_flops()
        parameters = sum(p.numel() for p in model.parameters())
        size = 7 * math.sqrt(800 * parameters / flops) if flops else 128.0
        if noise == "example":
            size = 2 * size
    size = min(max(size, 16), 512)
    size = 2 ** round(math.log2(size))
    return max(1, min(int(size), -(-examples // 16)) if noise != "pass" else min(int(size), examples))


def whole_passes(evaluation: Evaluation, data: Any, batch_size: int | None, seed: int) -> tuple[Blocks, int | None]:
    """The data in blocks for a measure that goes through all of them several times, and the size of the blocks."""
    with evaluation.prepared():
        blocks = Blocks(data, batch_size or 128, seed)
        if blocks.one_pass:
            raise ValueError("data is an iterator, which can be gone through only once; give a list or a DataLoader")
        if batch_size is None and blocks.examples is not None:
            first = blocks.first().batch
            batch_size = automatic_batch_size(evaluation.model, evaluation, first, "pass", blocks.examples)
            blocks = Blocks(data, batch_size, seed)
    return blocks, batch_size


def automatic_noise(evaluation: Evaluation, block: Block, names: Sequence[str]) -> str:
    """``"example"`` where every perturbed parameter can have a z of its own for each example, else ``"batch"``."""
    if evaluation.norms and evaluation.batch_norm != "eval":
        return "batch"  # statistics are taken over examples, which must share their noise
    if evaluation.values(evaluation.load(block.batch), block.size).dim() == 0:
        return "batch"  # and so must the examples of a metric that is one number for all of them
    return "example" if _example_noise(evaluation, block, names).independent else "batch"


def _example_noise(evaluation: Evaluation, block: Block, names: Sequence[str]) -> ExampleNoise:
    """Noise of every example, with what the network does found out by a batch."""
    batch, size = evaluation.load(block.batch), block.size
    smaller = [(truncated(batch, size - 1), size - 1)] if size > 1 else []
    noise = ExampleNoise(evaluation.model, names)
    noise.probe(evaluation.outputs, [(batch, size), *smaller])
    return noise


# -------------------------------------------------------------------------------------------------- the measurement


def local_energy(
    model: nn.Module,
    data: Any,
    sigmas: Sequence[float] | Tensor | np.ndarray,
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
) -> LocalEnergy:
    r"""dE(w, sigma) = E_z[E(w + sigma z * w)] - E(w) over a range of sigma (Eq. 4), with error bars.

    Args:
        model: Any network. Its weights, buffers and modes and all random states are as before afterwards, whatever
            happens. It is evaluated in eval mode (no dropout).
        data: The training data: tensors ``(inputs, targets)`` in memory, a data set, a ``DataLoader`` or any iterable
            of batches. Order and augmentation of a loader are the same in every pass. Batches that are not
            ``(inputs, targets)`` need ``forward``.
        sigmas: Strengths of the noise.
        noise: What shares one z: ``"batch"`` each batch, ``"example"`` each example (by local reparametrisation and
            Flipout, see :mod:`wideflat.energy.shared_noise`), ``"pass"`` the whole data set, as in the paper; only the
            last gives the spread over perturbations. All three have the same expectation. ``"auto"`` (default) is
            ``"example"`` where that needs no Flipout (all layers linear, of one vector an example), else ``"batch"``;
            ``conventions["noise"]`` says which it was.
        metric: ``"error"``, ``"loss"`` (cross-entropy), or a function of outputs and targets that gives one number for
            each example (or one for the batch). What the first two mean for which outputs and targets stands in
            :mod:`wideflat.energy.metrics`; ``conventions["meaning"]`` says what was taken.
        batch_norm: Which statistics the perturbed network normalises with: ``"eval"`` the running statistics of the
            unperturbed network (Eq. 4 literally), ``"batch"`` those of each batch, ``"recalibrate"`` running
            statistics computed anew for each perturbation. This changes the answer up to tenfold.
        parameters: Which parameters are perturbed; see :func:`~wideflat.energy.shared_noise.select_parameters`.
            This too.
        target_stderr: Stop at each sigma when its standard error is below this, by the rule of
            :mod:`wideflat.energy.stopping`: the number of evaluations is decided by a pilot.
        max_passes: Stop at each sigma after this many passes over the data. May be a fraction where the data can be
            indexed: then the error bar includes the choice of the data. Default: 2 (64 with ``noise="pass"``), or, with
            a ``target_stderr``, as many as it takes up to 1000.
        seed: Of the noise. The result does not depend on the number of processes.
        progress: Show progress and an estimate of what is left.
        common_noise: Use one z for all sigmas: cheaper, and a smoother curve; the points are then correlated (see
            ``covariance``). False draws z for each.
        batch_size: Examples a block where the blocks are made here; by default from the sizes of network and data.
        forward: A function of the model and a batch that returns ``(outputs, targets)``.
        augment: Applied to the inputs of each batch, freshly in every pass; perturbed and unperturbed network see the
            same. Give it if the network was trained with it (App. B.2) and the data do not already do it.
        calibration: Examples from which ``"recalibrate"`` computes statistics.

    Returns:
        The profile. ``print`` it, ``plot()`` it, ``compare()`` it, ``save()`` it.

    Raises:
        Interrupted: At Ctrl-C; its ``profile`` is what was measured so far.

    Note:
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
    measurement = _Measurement(
        model, data, sigmas, noise, metric, batch_norm, parameters, target_stderr, max_passes, seed, common_noise,
        batch_size, forward, augment, calibration,
    )  # fmt: skip
    with Progress(f"local energy ({noise})", measurement.total(), enabled=progress and _rank() == 0) as bar:
        try:
            measurement.run(bar)
        except KeyboardInterrupt:
            raise Interrupted(measurement.result(complete=False)) from None
    profile = measurement.result()
    assert profile is not None
    return profile


@dataclass
class _Kept:
    """A batch as the network gets it, and the products of its first layer that do not depend on z."""

    batch: Any
    products: dict[tuple[int, str], Tensor]


class _Measurement:
    """One call of :func:`local_energy`: its settings, its table of blocks, its loop."""

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        sigmas: Any,
        noise: str,
        metric: Metric,
        batch_norm: str,
        parameters: Selection,
        target_stderr: float | None,
        max_passes: float | None,
        seed: int,
        common_noise: bool,
        batch_size: int | None,
        forward: Forward | None,
        augment: Callable[[Any], Any] | None,
        calibration: int,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        self.sigmas = check_sigmas(sigmas)
        if noise != "auto" and noise not in DEFAULT_PASSES:
            raise ValueError(f'noise must be "auto", "batch", "example" or "pass", got {noise!r}')
        if batch_norm not in ("eval", "recalibrate", "batch"):
            raise ValueError(f'batch_norm must be "eval", "recalibrate" or "batch", got {batch_norm!r}')
        if target_stderr is not None and not target_stderr > 0:
            raise ValueError(f"target_stderr must be positive, got {target_stderr}")
        if max_passes is not None and not max_passes > 0:
            raise ValueError(f"max_passes must be positive, got {max_passes}")
        if noise == "example" and batch_norm != "eval":
            raise ValueError(
                f'batch_norm="{batch_norm}" needs examples that share their noise, since statistics are taken over '
                'examples: use noise="batch" or noise="pass", or batch_norm="eval"'
            )
        self.model, self.seed, self.common = model, int(seed), bool(common_noise)
        self.target = target_stderr
        self.rule = None if target_stderr is None else StoppingRule(target_stderr, len(self.sigmas))
        self.evaluation = Evaluation(model, metric, batch_norm, forward)
        self.names, self.words = select_parameters(model, parameters)
        self.calibration = calibration
        probe = Blocks(data, batch_size or 32, self.seed, augment)
        with self.evaluation.prepared():
            first = probe.first()
            if noise == "auto":
                noise = automatic_noise(self.evaluation, first, self.names)
            if batch_size is None and probe.examples is not None:
                batch_size = automatic_batch_size(model, self.evaluation, first.batch, noise, probe.examples)
            self.blocks = Blocks(data, batch_size or 32, self.seed, augment) if not probe.one_pass else probe
        self.noise, self.batch_size = noise, batch_size
        self.max_passes = max_passes or (MOST_PASSES if target_stderr is not None else DEFAULT_PASSES[noise])
        if self.blocks.one_pass:
            if noise == "pass" or (max_passes or 1) > 1:
                raise ValueError(
                    "data is an iterator, which can be gone through only once; give a list, a data set or a DataLoader "
                    f'for more than one pass (noise="{noise}", max_passes={self.max_passes})'
                )
            self.max_passes = 1
        if self.max_passes % 1 and (not self.blocks.indexed or noise == "pass"):
            raise ValueError(
                f"max_passes={self.max_passes}: part of a pass needs data that can be indexed (tensors, a data set, a "
                'list of batches) and noise "batch" or "example"'
            )
        if noise == "pass" and self.max_passes < 2:
            raise ValueError('noise="pass" needs at least max_passes=2: one perturbation has no error bar')
        self.rank, self.world = _rank(), _world()
        self.rows: list[np.ndarray] = []  # one table (blocks, S) a pass, NaN where nothing was evaluated
        self.baselines: dict[int, list[float]] = {}  # of each block, in every pass where it was evaluated
        self.sizes: dict[int, int] = {}
        self.active = self.sigmas > 0
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._room = KEPT_BYTES
        self._current: dict[int, np.ndarray] = {}

    # ---- the loop

    def total(self) -> float | None:
        """Blocks to evaluate at most, if that is known."""
        if self.blocks.count is None or self.target is not None:
            return None
        return math.ceil(self.max_passes * self.blocks.count / self.world)

    def run(self, bar: Progress) -> None:
        """Evaluate until every sigma has its error bar, or the passes are used up."""
        with self.evaluation.prepared(), contextlib.ExitStack() as stack:
            self._set_up(stack)
            number = 0
            while number < self.max_passes and self.active.any():
                tiles = self._tiles(number)
                for part in self._parts(number):
                    self._round(number, part, tiles, bar)
                    if self.target is not None:
                        self._stop_where_reached()
                        if not self.active.any():
                            break
                number += tiles
            if not self.rows:  # nothing to perturb with: the baseline alone
                self._round(0, None, 1, bar)

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        """Find out how to evaluate this network with this kind of noise, by its first batch."""
        evaluation = self.evaluation
        first = self.blocks.first()
        batch, size = evaluation.load(first.batch), first.size
        self.example: ExampleNoise | None = None
        self.shared: SharedNoise | None = None
        self.first_layer: FirstLayer | None = None
        self.calibration_batches: list[Any] = []
        self.per_example = evaluation.values(batch, size).dim() == 1  # also tells a metric that does not work
        if evaluation.recalibrates:
            if self.blocks.one_pass:
                raise ValueError(
                    'batch_norm="recalibrate" needs data that can be gone through more than once; got an iterator'
                )
            seen = 0
            for block in self.blocks.visit(0):
                self.calibration_batches.append(evaluation.load(block.batch))
                seen += block.size
                if seen >= self.calibration:
                    break
        names = self.names
        if self.noise == "example":
            self.example = _example_noise(evaluation, first, self.names)
            names = self.example.shared_names()
        else:
            evaluation.fold(batch)
        network = evaluation.module.network if isinstance(evaluation.module, FoldedNetwork) else self.model
        if names:
            self.shared = stack.enter_context(SharedNoise(network, names))
            if self.example is None and self.common and network is self.model and not self.calibration_batches:
                self.first_layer = FirstLayer(self.shared)

    def _tiles(self, number: int) -> int:
        """How many passes are evaluated at once: several where blocks are small and no two examples share noise."""
        if self.example is None or not self.example.independent or self.batch_size is None:
            return 1
        if not (self.blocks.fixed and self.blocks.in_memory and self.per_example) or self.max_passes % 1:
            return 1
        left = int(self.max_passes - number)
        if self.target is not None:
            left = min(left, max(2, number))
        room = TILED_BYTES // max(1, self.blocks.bytes // (self.blocks.count or 1))
        return max(1, min(left, 4096 // self.batch_size, room))

    def _parts(self, number: int) -> Iterator[list[int] | None]:
        """The blocks of a pass in rounds; None for all of them as they come."""
        if not self.blocks.indexed or self.noise == "pass":
            yield None
            return
        assert self.blocks.count is not None
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", number))
        order = torch.randperm(self.blocks.count, generator=generator).tolist()
        order = order[: math.ceil(min(1.0, self.max_passes - number) * self.blocks.count)]
        start = 0
        while start < len(order):
            seen = start + number * len(order)
            end = len(order) if self.target is None else start + max(ROUND, seen // 4)
            yield order[start:end]
            start = end

    def _round(self, number: int, part: list[int] | None, tiles: int, bar: Progress) -> None:
        """Evaluate some blocks and enter what they gave into the table."""
        self._current = {}
        try:
            for block in self._visit(number, part):
                self._current[block.index] = self._measure(block, number, tiles, bar)
        except KeyboardInterrupt:
            if self.noise != "pass" and self.world == 1:  # what this round has measured so far is not lost
                self._enter(number, self._current, tiles)
            raise
        self._enter(number, self._gather(self._current), tiles)

    def _visit(self, number: int, part: list[int] | None) -> Iterator[Block]:
        """The blocks of this process."""
        if self.blocks.sharded:
            for block in self.blocks.visit(number):
                yield replace(block, index=block.index * self.world + self.rank)
        else:
            yield from self.blocks.visit(number, part, lambda j: j % self.world == self.rank)

    def _gather(self, rows: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """What all processes measured in this round."""
        if self.world == 1:
            return rows
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, (rows, {j: self.baselines[j] for j in rows}, {j: self.sizes[j] for j in rows}))
        everything: dict[int, np.ndarray] = {}
        for theirs, baselines, sizes in gathered:
            everything.update(theirs)
            self.baselines.update(baselines)
            self.sizes.update(sizes)
        return everything

    def _enter(self, number: int, rows: dict[int, np.ndarray], tiles: int) -> None:
        if not rows:
            return
        if self.noise == "pass":  # one z for all blocks: together they are one
            sizes = np.array([self.sizes[j] for j in rows], dtype=float)
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

    # ---- one block

    def _measure(self, block: Block, number: int, tiles: int, bar: Progress) -> np.ndarray:
        """The dE of one block for each of ``tiles`` passes and each sigma, (tiles, S); NaN where it is not active."""
        evaluation, j, size = self.evaluation, block.index, block.size * tiles
        kept = self._kept.get((j, tiles))
        if kept is None:
            single = evaluation.load(block.batch)
            kept = _Kept(repeated(single, tiles), {})
        batch = kept.batch
        known = self.baselines.setdefault(j, [])
        if not (known and self.blocks.fixed and self.blocks.indexed):
            known.append(float(self._at(single, block.size, 0.0).mean()))
            self.sizes[j] = evaluation.counted
        place = (number,) if self.noise == "pass" else (number, j)
        generator = _generator(evaluation.device, derive_seed(self.seed, "noise", *place))
        if self.example is not None:
            self.example.start(evaluation.source(batch), size, generator, kept.products, tiles)
        if self.shared is not None and self.common:
            self.shared.draw(generator)
        if self.first_layer is not None:
            self.first_layer.start(evaluation.source(batch))
        values = []
        for s in np.flatnonzero(self.active):
            if not self.common:
                generator.manual_seed(derive_seed(self.seed, "noise", *place, "sigma", int(s)))
                if self.shared is not None:
                    self.shared.draw(generator)
            value = self._at(batch, size, float(self.sigmas[s]))
            values.append(value.reshape(tiles, -1).mean(1) if value.dim() else value.expand(tiles))
        self._keep(j, tiles, kept)
        rows = np.full((tiles, len(self.sigmas)), np.nan)
        rows[:, self.sigmas == 0] = 0.0
        if values:
            found = torch.stack(values, 1).cpu().numpy() - known[-1]
            rows[:, self.active] = np.where(
                np.isnan(found), np.inf, found
            )  # an overflow counts; NaN means not evaluated
        bar.advance(tiles)
        return rows

    def _at(self, batch: Any, size: int, sigma: float) -> Tensor:
        """The metric of a batch at w + sigma z * w, with the z that was drawn."""
        evaluation = self.evaluation
        if self.shared is not None:
            self.shared.apply(sigma)
        if isinstance(evaluation.module, FoldedNetwork):
            evaluation.module.refold()
        if self.calibration_batches:
            evaluation.recalibrate(self.calibration_batches)
        layer: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.example is not None and sigma:
            self.example.apply(sigma, fresh=not self.common)
            layer = self.example
        elif self.first_layer is not None and sigma:
            self.first_layer.apply(sigma)
            layer = self.first_layer
        with layer:
            outputs, targets = evaluation.outputs(batch)
        return evaluation.score(outputs, targets, size)

    def _keep(self, j: int, tiles: int, kept: _Kept) -> None:
        """Keep a prepared batch and the noiseless products of its first layer for the next pass, if there is room."""
        if (j, tiles) not in self._kept and self.blocks.fixed and self.blocks.in_memory:
            tensors = [leaf for leaf in tree_leaves((kept.batch, kept.products)) if isinstance(leaf, Tensor)]
            room = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if room <= self._room:
                self._room -= room
                self._kept[j, tiles] = kept

    # ---- what comes out

    def _table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What blocks gave in every pass at each sigma, their sizes, evaluations, what is added to variances."""
        count = max(len(table) for table in self.rows)
        if self.blocks.indexed and self.noise != "pass":
            count = max(count, self.blocks.count or 0)
        table = np.full((len(self.rows), count, len(self.sigmas)), np.nan)
        for row, values in zip(table, self.rows, strict=True):
            row[: len(values)] = values
        if self.noise == "pass":
            sizes = np.array([sum(self.sizes.values())], dtype=float)
        else:
            sizes = np.array([self.sizes.get(j, 0) for j in range(count)], dtype=float)
        evaluations = np.einsum("pjs,j->s", (~np.isnan(table)).astype(float), sizes)
        extra = np.zeros(len(self.sigmas))
        if self.evaluation.metric_name == "error":  # one more wrong answer would not have been a surprise
            with np.errstate(divide="ignore"):
                extra = np.where((evaluations > 0) & (self.sigmas > 0), 1 / evaluations**2, 0.0)
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

    def result(self, complete: bool = True) -> LocalEnergy | None:
        """The profile as far as it was measured; None if nothing was."""
        if not self.rows:
            return None
        estimate, stderr, evaluations = self._estimate()
        known = {j: np.mean(values) for j, values in self.baselines.items() if values}
        sizes = np.array([self.sizes[j] for j in known], dtype=float)
        base = np.array(list(known.values()))
        whole = len(sizes) == (self.blocks.count or -1) * (self.world if self.blocks.sharded else 1)
        share = sizes / sizes.sum()
        spread = 0.0
        if not whole:
            spread = float(np.sqrt((share**2 * (base - share @ base) ** 2).sum() * len(base) / max(len(base) - 1, 1)))
        examples = self.blocks.examples or int(sizes.sum())
        norms = bool(self.evaluation.norms)
        conventions = {
            "measure": "local energy",
            "metric": self.evaluation.metric_name,
            "meaning": self.evaluation.meaning,
            "noise": self.noise,
            "batch_norm": self.evaluation.batch_norm if norms else None,
            "batch_size": self.batch_size if norms and self.evaluation.batch_norm == "batch" else None,
            "parameters": self.words,
            "perturbed": sum(p.numel() for name, p in self.model.named_parameters() if name in set(self.names)),
            "architecture": architecture(self.model),
            "examples": examples,
            "augmented": self.blocks.augmented,
            "common_noise": self.common,
            "block_size": int(sizes.max()),
            "seed": self.seed,
        }
        if self.example is not None:
            conventions["treatment"] = dict(self.example.treatment)
        return LocalEnergy(
            sigmas=self.sigmas,
            mean=estimate.mean,
            stderr=stderr,
            baseline=float(share @ base),
            degrees_of_freedom=estimate.degrees_of_freedom,
            covariance=estimate.covariance,
            baseline_stderr=spread,
            evaluations=evaluations,
            passes=evaluations / examples,
            samples=np.concatenate(self.rows) if self.noise == "pass" else None,
            conventions=conventions,
            complete=complete and not (self.target is not None and bool(self.active.any())),
        )


def architecture(model: nn.Module) -> str:
    """A network in a few words, to tell whether two are of one kind."""
    return f"{type(model).__name__}, {sum(p.numel() for p in model.parameters())} parameters"


def check_sigmas(sigmas: Any) -> np.ndarray:
    """The strengths of the noise as an array, if that is what they are."""
    try:
        values = np.atleast_1d(np.asarray(sigmas, dtype=float))
    except (TypeError, ValueError):  # words, or lists of different lengths
        values = np.empty(0)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"sigmas must be a sequence of numbers >= 0, got {sigmas!r}")
    return values


def _generator(device: torch.device, seed: int) -> torch.Generator:
    where = device if device.type in ("cpu", "cuda", "mps", "xpu") else "cpu"
    return torch.Generator(device=where).manual_seed(seed)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# --------------------------------------------------------------------------------------- many profiles of one network


def layer_profiles(
    model: nn.Module,
    data: Any,
    sigmas: Sequence[float] | Tensor | np.ndarray,
    layers: Iterable[str] | None = None,
    **options: Any,
) -> dict[str, LocalEnergy]:
    """One profile for each layer, with noise on the parameters of that layer alone.

    Args:
        model: The network.
        data: See :func:`local_energy`.
        sigmas: Strengths of the noise.
        layers: Names of modules; by default all that have parameters of their own.
        **options: Passed on to :func:`local_energy`.

    Returns:
        The profiles by the name of the layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> data = torch.randn(20, 3), torch.randint(2, (20,))
        >>> list(layer_profiles(model, data, [0.1], progress=False))
        ['0', '2']
    """
    if "parameters" in options:
        raise ValueError("layer_profiles chooses the parameters itself: give layers= instead of parameters=")
    own = {prefix for prefix, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
    wanted = [prefix for prefix, _ in model.named_modules() if prefix in own] if layers is None else list(layers)
    if unknown := [layer for layer in wanted if layer not in dict(model.named_modules())]:
        raise ValueError(f"the network has no layer {unknown[0]!r}; its layers are {', '.join(sorted(own))}")
    profiles = {}
    for layer in wanted:

        def inside(name: str, _: nn.Parameter, layer: str = layer) -> bool:
            if layer == "":
                return "." not in name
            return name.startswith(layer + ".")

        inside.__qualname__ = f"layer {layer}"
        try:
            profiles[layer] = local_energy(model, data, sigmas, parameters=inside, **options)
        except ValueError as error:
            if "selects none" in str(error):  # all its parameters are tied to those of another layer
                continue
            raise
    return profiles


class LocalEnergyTrace:
    """Traces the profile along a training run (the paper's figures of flatness against epochs).

    Call it after every epoch (or whatever is counted); it measures every ``every``-th time and keeps the profiles.
    With an optimizer that moves the weights away from its center, call it inside ``with optimizer.center():``.

    Args:
        data: See :func:`local_energy`.
        sigmas: Strengths of the noise.
        every: Measure when ``step`` is a multiple of this.
        path: Write all profiles to this JSON file after each measurement.
        **options: Passed on to :func:`local_energy`.

    Example:
        >>> data = torch.randn(20, 3), torch.randint(2, (20,))
        >>> trace = LocalEnergyTrace(data, [0.1, 0.2], every=2, progress=False)
        >>> model = nn.Linear(3, 2)
        >>> for epoch in range(1, 5):
        ...     _ = trace(model, epoch)
        >>> sorted(trace.profiles)
        [2, 4]
    """

    def __init__(
        self,
        data: Any,
        sigmas: Sequence[float] | Tensor | np.ndarray,
        every: int = 1,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be >= 1, got {every}")
        self.data, self.sigmas, self.every, self.path, self.options = data, sigmas, every, path, options
        self.profiles: dict[int, LocalEnergy] = {}

    def __call__(self, model: nn.Module, step: int) -> LocalEnergy | None:
        """Measure ``model`` if it is time to; returns the profile then, else None."""
        if step % self.every:
            return None
        profile = self.profiles[step] = local_energy(model, self.data, self.sigmas, **self.options)
        if self.path is not None and _rank() == 0:
            self.save(self.path)
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all profiles as JSON, whole or not at all."""
        content = {"format": 1, "profiles": {str(step): profile.to_dict() for step, profile in self.profiles.items()}}
        with atomic_write(path) as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> dict[int, LocalEnergy]:
        """The profiles that :meth:`save` wrote, by step."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return {int(step): LocalEnergy.from_dict(profile) for step, profile in content["profiles"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a whole trace of local-energy profiles: {error}") from None

    def plot(self, ax: Any = None) -> Any:
        """Draw all profiles, the later the darker; returns the axes."""
        if not self.profiles:
            raise ValueError("nothing was measured yet")
        steps = sorted(self.profiles)
        for i, step in enumerate(steps):
            shade = 0.25 + 0.75 * (i + 1) / len(steps)
            profile = self.profiles[step]
            label = f"{step} (E = {100 * profile.baseline:.2f}%)"
            if profile.conventions.get("metric") != "error":
                label = f"{step} (E = {profile.baseline:.3g})"
            ax = profile.plot(ax, label=label, color="C0", alpha=shade)
        return ax


# ------------------------------------------------------------------------------------------- exact, for one network


def committee_local_energy(
    weights: Tensor, inputs: Tensor, targets: Tensor, sigmas: Sequence[float] | Tensor | np.ndarray
) -> Tensor:
    r"""dE(w, sigma) of committee machines, exactly.

    The pre-activation of unit h on pattern x under the noise is N(w_h . x, sigma^2 sum_i w_hi^2 x_i^2), so the unit
    votes for the target y with probability Phi(y w_h . x / (sigma sqrt(sum_i w_hi^2 x_i^2))), independently of the
    others, and the number of right votes has a Poisson binomial distribution (:mod:`wideflat.committee.channel`).

    Args:
        weights: Shape (..., H, N) with H odd: one committee, or any number of them at once.
        inputs: Shape (P, N).
        targets: +1 or -1, shape (P,).
        sigmas: Strengths of the noise, S of them.

    Returns:
        dE in float64, shape (..., S).

    Example:
        One unit, one weight, one pattern: wrong when 1 + sigma z < 0.

        >>> committee_local_energy(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1), [0.0, 1.0]).round(decimals=4)
        tensor([0.0000, 0.1587], dtype=torch.float64)
    """
    if weights.dim() < 2 or inputs.dim() != 2 or weights.shape[-1] != inputs.shape[1] or len(targets) != len(inputs):
        raise ValueError(
            "expected weights (..., H, N), inputs (P, N) and targets (P,); got "
            f"{tuple(weights.shape)}, {tuple(inputs.shape)}, {tuple(targets.shape)}"
        )
    w, x, y = weights.detach().double(), inputs.double(), targets.double()
    lead = w.shape[:-2]
    w = w.reshape(-1, *w.shape[-2:])  # (R, H, N)
    field = torch.einsum("rhn,pn->hrp", w, x) * y  # y w_h . x
    scale = torch.einsum("rhn,pn->hrp", w * w, x * x).sqrt()
    right = (field > 0) | ((field == 0) & (y > 0))  # sign(0) = +1, as in CommitteeMachine
    baseline = (right.sum(0) * 2 < w.shape[1]).double().mean(-1)  # (R,)
    out = []
    for sigma in check_sigmas(sigmas):
        if sigma == 0:
            out.append(torch.zeros_like(baseline))
            continue
        u = field / (sigma * scale)
        log_p, log_q = torch.special.log_ndtr(u), torch.special.log_ndtr(-u)
        out.append(log_majority(log_q, log_p).exp().mean(-1) - baseline)
    return torch.stack(out, -1).reshape(*lead, len(out))
