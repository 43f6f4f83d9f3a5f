"""The fast path held against the plain one, on a few examples at one sigma, before anything is measured.

With noise shared by a batch both have the same z: the buffers, the first layer and the folded network on one side, on
the other the network as it is, with w + sigma z * w written into its weights. With noise of each example, one example
of a batch as large as those of the measurement is evaluated again alone, with weights that give it the noise it had.
Whatever the plan has not seen (a weight that is read behind its back, examples that are routed, or mixed from some
number of them on, a folded copy that differs, outputs that are kept from the sigma before) makes them differ.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from wideflat.energy.block_energy import BlockEnergy, generator_of
from wideflat.energy.ranks import gathered
from wideflat.evaluation.agreement import SLACK, agree
from wideflat.evaluation.blocks import chosen, cloned, seed_everything
from wideflat.evaluation.carried import Carried
from wideflat.evaluation.probe import CHANGING, company, comparable, of_examples
from wideflat.evaluation.registered import require_same
from wideflat.noise.shared_noise import unwritten
from wideflat.noise.versions import Versions
from wideflat.seeds import derive_seed

__all__ = ["Steady", "fast_path_differs"]

#: Examples that are evaluated for the check; all of a block where they influence each other.
FEW = 8
#: Examples at most among which those with noise of their own are.
CROWD = 256


def fast_path_differs(energy: BlockEnergy) -> bool:
    """Whether the fast path gives other outputs than the network with its weights perturbed in place."""
    sigmas = energy.plan.request.sigmas
    if not (sigmas > 0).any():
        return False
    # neither so small that rounding hides the noise, nor so large that numbers overflow
    sigma = min(max(float(sigmas.max()), 0.05), 0.5)
    batch, size = _examples(energy)
    if energy.example is not None:
        return _example_differs(energy, batch, size, sigma)
    with energy:
        fast = _fast(energy, batch, size, sigma)
        directions = energy.shared.directions() if energy.shared is not None else {}
    with _InPlace(energy.evaluation.model, directions) as weights:
        weights.write(directions, sigma)
        return not agree(fast, _plain(energy, batch, size), slack=SLACK)


def _example_differs(energy: BlockEnergy, batch: Any, size: int, sigma: float) -> bool:
    """Whether two of a crowd have other outputs than alone, with weights that give them the noise they had."""
    assert energy.example is not None
    copies, tiles = _crowd(energy, size)
    crowd = copies * size
    energy.example.recording = True
    with energy:
        fast = _fast(energy, chosen(batch, list(range(size)) * copies, size), crowd, sigma, tiles)
        shared = energy.shared.directions() if energy.shared is not None else {}
    energy.example.recording = False
    draw = random.Random(derive_seed(energy.plan.request.seed, "self-check", "examples"))
    several = [k + size * draw.randrange(copies) for k in draw.sample(range(size), min(2, size))]
    # all of them before the weights, which they are made from, are written to
    directions = {example: shared | energy.example.directions(example) for example in several}
    with _InPlace(energy.evaluation.model, energy.plan.names) as weights:
        for example in directions:
            alone = company(example % size, size)
            weights.write(directions[example], sigma)
            plain = _plain(energy, chosen(batch, alone, size), len(alone))
            mine, theirs = of_examples(fast, crowd, [example] * len(alone), plain, len(alone))
            if not mine or not agree(mine, theirs, scale=fast, slack=SLACK):
                return True
    return False


def _crowd(energy: BlockEnergy, size: int) -> tuple[int, int]:
    """How often the few examples make a batch as large as those that will be measured, and how many of it are tiles."""
    tiles = energy.tiles(energy.plan.passes)
    copies = max(1, min((energy.plan.batch_size or size) * tiles, CROWD) // size)
    return copies, copies if tiles > 1 else 1


class Steady:
    """Whether the network at its weights is what it was, however often it was evaluated at others meanwhile.

    What it holds is put back before every comparison; a cache out of sight (in a closure, in a function) is not.

    Args:
        energy: What is measured, before it is.
    """

    def __init__(self, energy: BlockEnergy) -> None:
        self._energy = energy
        self._weights = dict(energy.plan.request.model.named_parameters())
        self._batch, self._size = _examples(energy)
        with unwritten(energy.plan.request.model):
            self._outputs = cloned(_plain(energy, self._batch, self._size))
        self._carried = Carried(energy.plan.request.model)

    def check(self) -> None:
        """Compare.

        Raises:
            ValueError: On all ranks, if one of them sees another network.
        """
        model = self._energy.plan.request.model
        require_same(self._weights, model)
        self._carried.restore()
        with unwritten(model), self._carried.afterwards():
            same = agree(_plain(self._energy, self._batch, self._size), self._outputs, slack=SLACK)
        if not all(gathered(same)):
            raise ValueError(CHANGING.format(type(model).__name__, "has been evaluated at other weights"))


class _InPlace:
    """w + sigma a z written into the weights themselves, and w at the end: one copy of them, however often."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        parameters = dict(model.named_parameters())
        self._kept = [(name, parameters[name], parameters[name].data, parameters[name].data.clone()) for name in names]
        self._versions = Versions(parameter for _, parameter, _, _ in self._kept)

    def write(self, directions: dict[str, Tensor], sigma: float) -> None:
        """Write w + sigma a z, where ``directions`` are a z by name."""
        for name, parameter, data, w in self._kept:
            _point(parameter, data)
            torch.add(w, directions[name], alpha=sigma, out=data)
        self._versions.advance()

    def __enter__(self) -> _InPlace:
        return self

    def __exit__(self, *_: object) -> None:
        for _name, parameter, data, w in self._kept:
            _point(parameter, data)
            data.copy_(w)
        self._versions.restore()


def _point(parameter: nn.Parameter, data: Tensor) -> None:
    """Let a parameter have its memory again, should the network have given it another."""
    if parameter.data_ptr() != data.data_ptr():
        parameter.data = data


def _examples(energy: BlockEnergy) -> tuple[Any, int]:
    """A few examples of the first batch; all of them where they may influence each other."""
    batch, size = energy.evaluation.load(energy.plan.first.batch), energy.plan.first.size
    if energy.plan.behaviour.examples != "independent" or size <= FEW:
        return batch, size
    return chosen(batch, list(range(FEW)), size), FEW


def _fast(energy: BlockEnergy, batch: Any, size: int, sigma: float, tiles: int = 1) -> Any:
    """Outputs by the fast path, with a z that is drawn for this: the second ones, which use what the first kept."""
    seed = derive_seed(energy.plan.request.seed, "self-check")
    generator = generator_of(energy.evaluation.device, seed)
    energy.start(batch, size, generator, tiles=tiles)
    if energy.shared is not None and not energy.common:
        energy.shared.draw(generator)
    for strength in (sigma / 2, sigma):
        seed_everything(seed)
        result = energy.outputs(batch, strength, [])
    return cloned(comparable(energy.evaluation, result, size))  # the network may answer in the same memory again


def _plain(energy: BlockEnergy, batch: Any, size: int) -> Any:
    """Outputs of the network as it is, with the weights that it has."""
    evaluation = energy.evaluation
    module, evaluation.module = evaluation.module, evaluation.model
    try:
        seed_everything(derive_seed(energy.plan.request.seed, "self-check"))
        return comparable(evaluation, evaluation.outputs(cloned(batch)), size)
    finally:
        evaluation.module = module
