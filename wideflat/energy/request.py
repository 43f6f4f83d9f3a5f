"""What is asked of a measurement of the local energy, checked once; and from it, how it will be measured.

A :class:`Request` is what the caller said. :func:`plan` looks at the network and the data
(:mod:`~wideflat.evaluation.probe`) and settles what was left open: the kind of noise, the size of the blocks, the
number of passes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from wideflat.checks import choice, flag, function, number, whole
from wideflat.energy.profile import architecture, check_sigmas, conventions
from wideflat.energy.ranks import gathered
from wideflat.evaluation.blocks import Block, Blocks, cloned, truncated
from wideflat.evaluation.carried import Carried
from wideflat.evaluation.evaluation import Evaluation, Forward, Metric
from wideflat.evaluation.probe import Behaviour, observe
from wideflat.evaluation.registered import require_same
from wideflat.evaluation.selection import Selection, select_parameters
from wideflat.noise.example_noise import ExampleNoise
from wideflat.noise.scales import Scale, Scales
from wideflat.noise.shared_noise import unwritten
from wideflat.seeds import as_seed

__all__ = ["SIGMAS", "BatchNorm", "Noise", "Plan", "Request", "plan", "whole_passes"]

Noise: TypeAlias = Literal["auto", "batch", "example", "pass"]
BatchNorm: TypeAlias = Literal["eval", "recalibrate", "batch"]

#: Passes where neither ``max_passes`` nor ``target_stderr`` says how many: the fewest whose error bar is free of the
#: variance between data, and the paper's 64 realisations (Sec. B.3) where the spread over perturbations is the result.
DEFAULT_PASSES = {"batch": 2, "example": 2, "pass": 64}
#: Small data are gone through until so many examples have been evaluated at a sigma (64 passes at most): the second
#: that this takes makes a number of what two passes leave as noise.
EVALUATIONS = 20_000
#: Strengths of the noise where none are given.
SIGMAS = tuple(k / 20 for k in range(11))
#: Passes after which a target that was not reached is given up.
MOST_PASSES = 1000
#: More are never meant.
LARGEST_PASSES = 1e6
#: Examples of a batch in which the network is looked at.
LOOK = 32
#: Examples of a second, smaller batch, by which the axis of the examples is told from others.
FEWER = 5
#: Most examples that are evaluated together because they influence each other, where nobody said how many.
TOGETHER = 1024
#: Bytes of data up to which all of them are tried together where a part of them is not accepted.
WHOLE_BYTES = 2**26


@dataclass
class Request:
    """The arguments of :func:`wideflat.local_energy`, which says what they mean; wrong ones are refused here."""

    model: nn.Module
    data: Any
    sigmas: Any
    noise: str
    metric: Metric
    batch_norm: str
    parameters: Selection
    target_stderr: float | None
    max_passes: float | None
    seed: int
    common_noise: bool
    batch_size: int | None
    forward: Forward | None
    augment: Callable[[Any], Any] | None
    calibration: int
    scale: Scale = "relative"
    antithetic: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.model = self.model.module
        self.sigmas = check_sigmas(self.sigmas)
        self.seed = as_seed(self.seed)
        choice("noise", self.noise, ("auto", *DEFAULT_PASSES))
        choice("batch_norm", self.batch_norm, ("eval", "recalibrate", "batch"))
        self.common_noise = flag("common_noise", self.common_noise)
        self.antithetic = flag("antithetic", self.antithetic)
        if self.antithetic and self.noise == "pass":
            raise ValueError(
                'antithetic=True averages z and -z, so the spread over perturbations, which noise="pass" is for, is '
                'lost: use noise="batch", or antithetic=False'
            )
        if self.augment is not None:
            function("augment", self.augment)
        if self.target_stderr is not None:
            self.target_stderr = number("target_stderr", self.target_stderr)
            if not self.target_stderr > 0:
                raise ValueError(f"target_stderr must be positive, got {self.target_stderr:g}")
        if self.batch_size is not None:
            self.batch_size = whole("batch_size", self.batch_size, 1, 2**63)
        if self.max_passes is not None:
            self.max_passes = number("max_passes", self.max_passes, most=LARGEST_PASSES, above=0)
        if self.noise == "example" and self.batch_norm != "eval":
            raise ValueError(
                f'batch_norm="{self.batch_norm}" needs examples that share their noise, since statistics are taken '
                'over examples: use noise="batch" or noise="pass", or batch_norm="eval"'
            )


@dataclass
class Plan:
    """How a request is measured.

    Attributes:
        request: What was asked for.
        evaluation: The network with its metric.
        names: The perturbed parameters.
        words: The same in words.
        scales: What the noise on them is proportional to.
        blocks: The data.
        first: A block of it, to look at.
        behaviour: What the network does with a batch.
        noise: ``"batch"``, ``"example"`` or ``"pass"``.
        batch_size: Examples a block where the blocks are made here.
        passes: Most passes over the data; with ``antithetic`` those there and back count once.
        example: The noise of each example, with what each parameter is used for.
        notes: What the reader of the result should know about how it came about.
        carried: What the network held before the first call.
    """

    request: Request
    evaluation: Evaluation
    names: list[str]
    words: str
    scales: Scales
    blocks: Blocks
    first: Block
    behaviour: Behaviour
    noise: str
    batch_size: int | None
    passes: float
    example: ExampleNoise | None
    notes: list[str]
    carried: Carried

    def conventions(self, examples: int, block_size: int) -> dict[str, Any]:
        """What the profile depends on."""
        request, evaluation = self.request, self.evaluation
        norms = bool(evaluation.norms)
        more: dict[str, Any] = {"notes": list(self.notes)} if self.notes else {}
        if request.antithetic:
            more["antithetic"] = True
        if self.example is not None:
            more["treatment"] = dict(self.example.treatment)
        return conventions(
            "local energy",
            metric=evaluation.metric_name,
            meaning=evaluation.meaning,
            noise=self.noise,
            batch_norm=request.batch_norm if norms else None,
            batch_size=self.batch_size if self._size_matters else None,
            parameters=self.words,
            perturbed=self.scales.size,
            scale=self.scales.name,
            unmoved=self.scales.unmoved,
            architecture=architecture(request.model),
            examples=examples,
            augmented=self.blocks.augmented,
            common_noise=bool(request.common_noise),
            block_size=block_size,
            seed=request.seed,
            **more,
        )

    @property
    def _size_matters(self) -> bool:
        """Whether the answer depends on how many examples are evaluated together."""
        statistics = bool(self.evaluation.norms) and self.evaluation.batch_norm == "batch"
        return statistics or _matters_together(self.behaviour, self.evaluation)


def plan(request: Request, careful: str = "") -> Plan:
    """Settle how a request is measured.

    Args:
        request: What is asked for.
        careful: Why a plan before this one did not hold, if so: examples then share their noise, and every evaluation
            has a copy of its batch.
    """
    evaluation = Evaluation(request.model, request.metric, request.batch_norm, request.forward)
    names, words = select_parameters(request.model, request.parameters)
    scales = Scales(request.model, names, request.scale)
    notes = [careful] if careful else []
    batch_size = request.batch_size
    carried = Carried(request.model)
    with unwritten(request.model), evaluation.prepared(), carried.afterwards():
        weights = dict(request.model.named_parameters())
        blocks, first, behaviour = _look(request, evaluation)
        require_same(weights, request.model)
        behaviour = _agreed(behaviour, bool(careful))
        if behaviour.carries:
            evaluation.reset = partial(carried.restore, behaviour.carries)
        noise, example = request.noise, None
        if noise == "example" or (noise == "auto" and not careful):
            noise, example = _noise_of_examples(request, evaluation, first, behaviour, scales)
        elif noise == "auto":
            noise = "batch"
        notes += _notes(behaviour, evaluation, bool(careful))
        together = _matters_together(behaviour, evaluation)
        if batch_size is None and blocks.examples is not None:
            if together:
                batch_size = max(first.size, min(blocks.examples, TOGETHER))
            else:
                batch_size = automatic_batch_size(evaluation, first.batch, noise, blocks.examples)
        if not blocks.one_pass:
            blocks = Blocks(request.data, batch_size or LOOK, request.seed, request.augment, in_order=together)
    passes = _passes(request, noise, blocks)
    return Plan(
        request,
        evaluation,
        names,
        words,
        scales,
        blocks,
        first,
        behaviour,
        noise,
        batch_size,
        passes,
        example,
        notes,
        carried,
    )


def _look(request: Request, evaluation: Evaluation) -> tuple[Blocks, Block, Behaviour]:
    """The data in blocks, the first of them, and what the network does with it.

    Where a network cannot take a part of data that are in memory (a graph of just these nodes), it gets all of them.
    """
    size = request.batch_size if request.batch_size and request.batch_size > 1 else LOOK
    blocks = Blocks(request.data, size, request.seed, request.augment)
    first = blocks.first()
    try:
        return blocks, first, observe(evaluation, first, request.seed)
    except (RuntimeError, IndexError):
        if request.batch_size or not blocks.in_memory or blocks.count == 1 or blocks.bytes > WHOLE_BYTES:
            with evaluation.explained():
                raise
        whole = Blocks(request.data, blocks.examples or size, request.seed, request.augment, in_order=True)
        with contextlib.suppress(RuntimeError, IndexError):
            return whole, whole.first(), observe(evaluation, whole.first(), request.seed)
        with evaluation.explained():
            raise


def _agreed(behaviour: Behaviour, copies: bool) -> Behaviour:
    """The behaviour that all processes go by: the worst that one of them has seen."""
    everywhere = gathered(behaviour)
    examples = {found.examples for found in everywhere}
    worst = next(word for word in ("mixed", "unknown", "independent") if word in examples)
    return replace(
        behaviour,
        writes=copies or any(found.writes for found in everywhere),
        random=any(found.random for found in everywhere),
        carries=tuple(dict.fromkeys(place for found in everywhere for place in found.carries)),
        examples=worst,  # type: ignore[arg-type]
    )


def _matters_together(behaviour: Behaviour, evaluation: Evaluation) -> bool:
    """Whether examples influence each other by more than the batch-norm statistics that were asked for."""
    return behaviour.examples == "mixed" and not (evaluation.norms and evaluation.batch_norm != "eval")


def _notes(behaviour: Behaviour, evaluation: Evaluation, copies: bool) -> list[str]:
    notes = []
    if behaviour.writes and not copies:
        notes.append("the network writes into its input: every evaluation had a copy")
    if behaviour.random:
        notes.append("the network draws random numbers in eval mode: they are part of the average")
    if behaviour.carries:
        few = ", ".join(behaviour.carries[:3]) + (", ..." if len(behaviour.carries) > 3 else "")
        notes.append(f"the network keeps something from call to call ({few}): each evaluation began as the first did")
    if _matters_together(behaviour, evaluation):
        notes.append("the examples of a batch influence each other: the answer is that for batches of this size")
    return notes


def _noise_of_examples(
    request: Request, evaluation: Evaluation, first: Block, behaviour: Behaviour, scales: Scales
) -> tuple[str, ExampleNoise | None]:
    """The kind of noise, and the noise of each example where it is that."""
    reason = {
        "mixed": "the output of an example depends on the others of its batch",
        "unknown": "the first batch (one example, random outputs, or outputs without an axis of examples) does not "
        "show whether examples influence each other",
        "independent": "",
    }[behaviour.examples]
    if request.noise == "example" and reason:
        raise ValueError(
            f'noise="example" needs examples that do not influence each other, but {reason}: use noise="batch" or '
            'noise="pass", with batches as the network is used with'
        )
    statistics = bool(evaluation.norms) and evaluation.batch_norm != "eval"
    if reason or statistics or (request.noise == "auto" and not behaviour.per_example):
        return "batch", None
    batch, size = evaluation.load(first.batch), first.size
    noise = ExampleNoise(evaluation.model, list(scales.values), scales.factors)
    fewer = min(size - 1, FEWER)
    for part, count in ((truncated(batch, fewer), fewer), (batch, size)):  # the cheap one may settle it
        noise.probe(lambda one: evaluation.outputs(cloned(one)), [(part, count)])
        if request.noise == "auto" and not all(gathered(noise.independent)):
            return "batch", None
    return "example", noise


def automatic_batch_size(evaluation: Evaluation, block: Any, noise: str, examples: int) -> int:
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
        one = cloned(truncated(block, 1))
        flops = 0
        with contextlib.suppress(Exception), FlopCounterMode(display=False) as counter:
            evaluation.outputs(evaluation.load(one))
            flops = counter.get_total_flops()
        parameters = sum(p.numel() for p in evaluation.model.parameters())
        size = 7 * math.sqrt(800 * parameters / flops) if flops else 128.0
        if noise == "example":
            size = 2 * size
    size = min(max(size, 16), 512)
    size = 2 ** round(math.log2(size))
    return max(1, min(int(size), -(-examples // 16)) if noise != "pass" else min(int(size), examples))


def whole_passes(evaluation: Evaluation, data: Any, batch_size: int | None, seed: int) -> tuple[Blocks, int | None]:
    """The data in blocks for a measure that goes through all of them several times, and the size of the blocks."""
    with evaluation.prepared():
        blocks = Blocks(data, 128 if batch_size is None else batch_size, seed)
        if blocks.one_pass:
            raise ValueError("data is an iterator, which can be gone through only once; give a list or a DataLoader")
        if batch_size is None and blocks.examples is not None:
            first = blocks.first().batch
            batch_size = automatic_batch_size(evaluation, first, "pass", blocks.examples)
            blocks = Blocks(data, batch_size, seed)
    return blocks, batch_size


def _passes(request: Request, noise: str, blocks: Blocks) -> float:
    """Most passes over the data, if that many can be made; of those there and back half as many."""
    default = MOST_PASSES if request.target_stderr is not None else DEFAULT_PASSES[noise]
    if request.target_stderr is None and blocks.examples and not blocks.one_pass:
        default = max(default, min(DEFAULT_PASSES["pass"], math.ceil(EVALUATIONS / blocks.examples)))
    if request.target_stderr is None and noise == "batch" and blocks.count == 1:
        default = DEFAULT_PASSES["pass"]  # one z for one batch of all data is one z for a pass
    passes = request.max_passes or default
    if blocks.one_pass:
        if noise == "pass" or (request.max_passes or 1) > 1:
            raise ValueError(
                "data is an iterator, which can be gone through only once; give a list, a data set or a DataLoader "
                f'for more than one pass (noise="{noise}", max_passes={passes})'
            )
        passes = 1
    if passes % 1 and (not blocks.indexed or noise == "pass"):
        raise ValueError(
            f"max_passes={passes}: part of a pass needs data that can be indexed (tensors, a data set, a "
            'list of batches) and noise "batch" or "example"'
        )
    if noise == "pass" and passes < 2:
        raise ValueError('noise="pass" needs at least max_passes=2: one perturbation has no error bar')
    return _pairs(passes, request, blocks) if request.antithetic and not blocks.one_pass else passes


def _pairs(passes: float, request: Request, blocks: Blocks) -> float:
    """So many passes in pairs, one with z and one with -z; two at least where nobody said how many: an error bar."""
    if request.max_passes is None:
        return max(2, passes // 2)
    if passes % 2 and not blocks.indexed:
        raise ValueError(
            f"antithetic=True takes passes in pairs, of z and of -z: max_passes must be even, got {passes:g}"
        )
    return passes / 2
