"""One block of data at one sigma after the other: its noise, the evaluations, and what is kept from pass to pass.

The fast path points the parameters at noisy buffers (or gives every example noise of its own), lets a first layer serve
every sigma, folds batch norm into convolutions, and repeats the examples of small blocks to evaluate several passes at
once. The plain one writes w + sigma a z into the weights, evaluates the network as it is, and writes w back. Which of
them it is, is settled once, by comparing both (:mod:`~wideflat.energy.self_check`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from wideflat.energy.ranks import world_size
from wideflat.energy.request import Plan
from wideflat.evaluation.blocks import Block, cloned, repeated, seed_everything
from wideflat.evaluation.folding import FoldedNetwork
from wideflat.evaluation.probe import depends_on_company
from wideflat.kernels.float64 import fetched
from wideflat.noise.first_layer import FirstLayer
from wideflat.noise.shared_noise import SharedNoise
from wideflat.noise.uses import Unforeseen
from wideflat.seeds import derive_seed

__all__ = ["BlockEnergy", "Pending", "generator_of"]

#: Evaluations up to which the check of a fast path that only spares a copy of the weights costs more than it saves.
FEW_EVALUATIONS = 32
#: Bytes of prepared batches and of products of a first layer that are kept from one pass to the next.
KEPT_BYTES = 2**28
#: Bytes of a block whose examples are repeated to evaluate several passes at once.
TILED_BYTES = 2**26
#: Examples that are evaluated at once at most, where blocks are repeated for several passes.
TILED_EXAMPLES = 4096


@dataclass
class Pending:
    """What was launched for a block: nobody has waited for it yet.

    Attributes:
        tiles: How many passes at once.
        active: Which sigmas.
        values: The means of the metric, (tiles, sigmas), or, of a device without float64, the metric at each of these.
        baseline: The metric at w, where it was evaluated.
        doubt: Whether examples influence each other after all, where that was tried.
    """

    tiles: int
    active: np.ndarray
    values: list[Tensor]
    baseline: Tensor | None
    doubt: Tensor | None = None


@dataclass
class _Kept:
    """A batch as the network gets it, and the products of its first layer that do not depend on z."""

    batch: Any
    products: dict[tuple[Any, ...], Tensor]


class BlockEnergy:
    """The dE of single blocks.

    Args:
        plan: What is measured, and how.

    Attributes:
        baselines: E(w) of each block, in every pass where it was evaluated.
        sizes: Examples of each block that count.
        answers: Targets of each block that count.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.evaluation, self.example, self.common = plan.evaluation, plan.example, plan.request.common_noise
        self.shared: SharedNoise | None = None
        self.first_layer: FirstLayer | None = None
        self.baselines: dict[int, list[float]] = {}
        self.sizes: dict[int, int] = {}
        self.answers: dict[int, int] = {}
        self._fixed = plan.blocks.fixed and not plan.behaviour.random
        self._calibration: list[Any] = []
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._room = KEPT_BYTES

    # ---- how the network is evaluated

    def prepare(self) -> None:
        """Prepare the fast path: the kind of noise, a folded network, the first layer."""
        plan, evaluation = self.plan, self.evaluation
        self._gather_calibration()
        names = plan.names
        if self.example is not None:
            names = self.example.shared_names()
        elif not (plan.behaviour.random or plan.behaviour.carries):  # a trace would keep what one call drew or found
            evaluation.fold(cloned(evaluation.load(plan.first.batch)))
        network = evaluation.module.network if isinstance(evaluation.module, FoldedNetwork) else evaluation.model
        if names:
            self.shared = SharedNoise(network, names, scales=plan.scales.factors)
            seen = isinstance(evaluation.source(plan.first.batch), Tensor)
            linear = seen and self.example is None and self.common and network is evaluation.model
            if linear and not (self._calibration or plan.behaviour.writes):
                self.first_layer = FirstLayer(network, self.shared.originals(), [self.shared.directions()])

    def take_plain_path(self) -> None:
        """Perturb the weights in place and evaluate the network as it is, from here on.

        Raises:
            Unforeseen: With noise of each example, which has no plain path.
        """
        if self.example is not None:
            raise Unforeseen(
                'noise="example": an example alone, with weights perturbed as it was, has other outputs than in its '
                'batch; use noise="batch" for this network'
            )
        self._in_place()
        self.plan.notes.append("plain path: the fast one gave other outputs for the same noise")

    def take_cheap_path(self) -> bool:
        """Perturb the weights in place where the check of the fast path would cost more than that path saves.

        With neither a folded network nor a first layer for all sigmas it saves one copy of the weights an evaluation.
        """
        plan, sigmas = self.plan, np.count_nonzero(self.plan.request.sigmas)
        plain = self.example is None and self.first_layer is None and self.evaluation.module is self.evaluation.model
        blocks = plan.blocks.count
        if not plain or plan.request.target_stderr is not None or blocks is None or world_size() > 1:
            return False  # ranks check together, or none does
        if not 0 < plan.passes * blocks * sigmas <= FEW_EVALUATIONS:
            return False
        self._in_place()
        return True

    def _in_place(self) -> None:
        self.evaluation.module = self.evaluation.model
        plan = self.plan
        # copies, as the self-check had: what a network keeps of a batch is not for another sigma
        plan.behaviour = replace(plan.behaviour, writes=True)
        self.shared = SharedNoise(self.evaluation.model, plan.names, in_place=True, scales=plan.scales.factors)
        self.first_layer = None

    def __enter__(self) -> BlockEnergy:
        if self.shared is not None:
            self.shared.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.shared is not None:
            self.shared.__exit__()

    def _gather_calibration(self) -> None:
        """The batches from which statistics are computed anew for each perturbation."""
        if not self.evaluation.recalibrates:
            return
        if self.plan.blocks.one_pass:
            raise ValueError(
                'batch_norm="recalibrate" needs data that can be gone through more than once; got an iterator'
            )
        seen = 0
        for block in self.plan.blocks.visit(0):
            self._calibration.append(self.evaluation.load(block.batch))
            seen += block.size
            if seen >= self.plan.request.calibration:
                break

    def tiles(self, left: float) -> int:
        """How many of the ``left`` passes are evaluated at once: several where blocks are small and share no noise."""
        blocks, size = self.plan.blocks, self.plan.batch_size
        if self.example is None or not self.example.independent or size is None or left % 1:
            return 1
        if not (self._fixed and blocks.in_memory and self.plan.behaviour.per_example):
            return 1
        room = TILED_BYTES // max(1, blocks.bytes // (blocks.count or 1))
        return max(1, min(int(left), TILED_EXAMPLES // size, room))

    # ---- one block

    def launch(self, block: Block, number: int, tiles: int, active: np.ndarray) -> Pending:
        """Evaluate one block for each of ``tiles`` passes and each active sigma; :meth:`settled` has the results."""
        evaluation, j, sigmas = self.evaluation, block.index, self.plan.request.sigmas
        kept = self._kept.get((j, tiles))
        if kept is None:
            single = evaluation.load(block.batch)
            kept = _Kept(repeated(single, tiles), {})
        before, baseline, doubt = _versions(kept.batch), None, None
        known = self.baselines.setdefault(j, [])
        if not (known and self._fixed and self.plan.blocks.fixed and self.plan.blocks.indexed):
            result = self._result(single, 0.0, number, j)
            if not known:
                doubt = self._doubt(single, block, result[0])
            baseline = _in_float64(torch.mean, evaluation.score(*result, block.size))
            self.sizes[j], self.answers[j] = evaluation.counted, evaluation.answers
        place = (number,) if self.plan.noise == "pass" else (number, j)
        generator = generator_of(evaluation.device, derive_seed(self.plan.request.seed, "noise", *place))
        self.start(kept.batch, block.size * tiles, generator, kept.products, tiles)
        values = []
        for s in np.flatnonzero(active):
            if not self.common:
                generator.manual_seed(derive_seed(self.plan.request.seed, "noise", *place, "sigma", int(s)))
                if self.shared is not None:
                    self.shared.draw(generator)
            value = self._at(kept.batch, block.size * tiles, float(sigmas[s]), number, j)
            if self.plan.request.antithetic:
                value = (value + self._at(kept.batch, block.size * tiles, -float(sigmas[s]), number, j)) / 2
            values.append(_in_float64(partial(_means, tiles=tiles), value))
        if _versions(kept.batch) != before:
            raise Unforeseen("the network writes into its input, which it did not do with the first batch")
        self._keep(j, tiles, kept)
        if values and values[0].dtype == torch.float64:
            values = [torch.stack(values, 1)]
        return Pending(tiles, active.copy(), values, baseline, doubt)

    def settled(self, launched: Mapping[int, Pending]) -> dict[int, np.ndarray]:
        """The dE of blocks for each of their passes and each sigma, (tiles, S); NaN where that was not active.

        The host waits once for all of them.

        Raises:
            Unforeseen: Where examples influence each other that were thought not to.
        """
        sigmas, found = self.plan.request.sigmas, {}
        tensors = [one.baseline for one in launched.values() if one.baseline is not None]
        values = [value for one in launched.values() for value in one.values]
        doubts = [one.doubt.to(torch.float32) for one in launched.values() if one.doubt is not None]
        fetch = fetched([*tensors, *values, *doubts])
        if any(map(bool, fetch[len(tensors) + len(values) :])):
            raise Unforeseen("the examples of a batch influence each other, which those of the first batch did not")
        arrived = iter(fetch)
        for j, one in launched.items():
            if one.baseline is not None:
                self.baselines[j].append(float(next(arrived).mean()))
        for j, one in launched.items():
            rows = found[j] = np.full((one.tiles, len(sigmas)), np.nan)
            rows[:, sigmas == 0] = 0.0
            if one.values:
                change = _joined([next(arrived) for _ in one.values], one.tiles) - self.baselines[j][-1]
                # an overflow counts as infinite; NaN means not evaluated
                rows[:, one.active] = np.where(np.isnan(change), np.inf, change)
        return found

    def start(
        self, batch: Any, size: int, generator: torch.Generator, products: dict | None = None, tiles: int = 1
    ) -> None:
        """Begin with another batch and another z."""
        source = None if self.plan.behaviour.writes else self.evaluation.source(batch)
        if self.example is not None:
            self.example.start(source, size, generator, products, tiles)
        if self.shared is not None and self.common:
            self.shared.draw(generator)
        if self.first_layer is not None:
            self.first_layer.start(source)

    def _doubt(self, batch: Any, block: Block, outputs: Any) -> Tensor | None:
        """Try with some later blocks, ever fewer of them, what was found out about examples with the first."""
        j, size = block.index, block.size
        if self.example is None or self.plan.behaviour.examples != "independent" or size < 2 or j < 1 or j & (j - 1):
            return None
        return depends_on_company(self.evaluation, batch, size, outputs, derive_seed(self.plan.request.seed, j) % size)

    def _at(self, batch: Any, size: int, sigma: float, number: int, index: int) -> Tensor:
        """The metric of a batch at w + sigma a z, with the z that was drawn."""
        return self.evaluation.score(*self._result(batch, sigma, number, index), size)

    def _result(self, batch: Any, sigma: float, number: int, index: int) -> tuple[Any, Any]:
        """Its outputs and targets."""
        if self.plan.behaviour.random:  # the same numbers for every sigma and for the baseline
            seed_everything(derive_seed(self.plan.request.seed, "network", number, index))
        return self.outputs(batch, sigma, self._calibration)

    def outputs(self, batch: Any, sigma: float, calibration: list[Any]) -> tuple[Any, Any]:
        """Outputs and targets of a batch at w + sigma a z, with the z that was drawn."""
        evaluation = self.evaluation
        if self.shared is not None:
            self.shared.apply(sigma)
        if isinstance(evaluation.module, FoldedNetwork):
            evaluation.module.refold()
        if calibration:
            evaluation.recalibrate(calibration)
        layer: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.example is not None and sigma:
            self.example.apply(sigma, fresh=not self.common and sigma > 0)  # -sigma: z, there and back
            layer = self.example
        elif self.first_layer is not None and sigma:
            self.first_layer.at(sigma)
            layer = self.first_layer
        if self.plan.behaviour.writes:
            batch = cloned(batch)
        with layer:
            return evaluation.outputs(batch)

    def _keep(self, j: int, tiles: int, kept: _Kept) -> None:
        """Keep a prepared batch and the noiseless products of its first layer for the next pass, if there is room."""
        if (j, tiles) not in self._kept and self._fixed and self.plan.blocks.in_memory:
            tensors = [leaf for leaf in tree_leaves((kept.batch, kept.products)) if isinstance(leaf, Tensor)]
            room = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if room <= self._room:
                self._room -= room
                self._kept[j, tiles] = kept


def _means(value: Tensor, tiles: int) -> Tensor:
    """The mean of the metric over the examples, for each of so many passes."""
    return value.reshape(tiles, -1).mean(1) if value.dim() else value.expand(tiles)


def _joined(values: list[Tensor], tiles: int) -> np.ndarray:
    """The means at each sigma side by side, (tiles, sigmas), where they are not yet."""
    means = values[0] if values[0].dim() == 2 else torch.stack([_means(value, tiles) for value in values], 1)
    return means.numpy()


def _in_float64(mean: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """A mean, where it can be taken in float64; else the values, of which it is taken on the CPU."""
    return mean(value) if value.dtype == torch.float64 else value


def generator_of(device: torch.device, seed: int) -> torch.Generator:
    """A generator on the device, or on the CPU where the device has none."""
    where = device if device.type in ("cpu", "cuda", "mps", "xpu") else "cpu"
    return torch.Generator(device=where).manual_seed(seed)


def _versions(batch: Any) -> list[int]:
    """How often each tensor of a batch has been written to."""
    return [leaf._version for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and not leaf.is_inference()]
