"""The steps of Entropy-SGD by torch's operations, one block of memory after the other.

A block fits the cache of a processor, so that main memory is read once a step, as by the kernel in C, and what a step
needs of memory is that of a block. Its tensors may be of another type or on another device than the parameters: they
are converted, or sent there and back, block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wideflat.kernels.counter import key_of, words
from wideflat.kernels.entropy_sgd import Rule
from wideflat.kernels.flat_blocks import Memory, flat, is_dense
from wideflat.kernels.foreach import add_noise
from wideflat.kernels.noise import GaussianNoise
from wideflat.kernels.rounding import join, part, round_by_chance
from wideflat.kernels.shards import Place, counted, stretch

__all__ = ["BlockLists"]

#: Elements of a block: on a processor what fits its cache, elsewhere what makes launches few.
CACHE, LARGE = 524288, 1 << 25

#: Tensors that are gathered into one, because an operation on a few numbers takes as long as on thousands.
SMALL, GATHERED = 4096, 32768


@dataclass
class _Block:
    """Parallel lists of flat views, of w', w, mu, the velocity, what rounding has lost; None where there are none."""

    lists: list[list[Tensor] | None]
    #: Where a gradient is cut: the number of the tensor, the first element, how many.
    cuts: list[tuple[int, int, int]] = field(default_factory=list)
    #: Of the first elements, in the noise; those that follow each other are one.
    places: list[Place] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    #: Elements of each view.
    sizes: list[int] = field(default_factory=list)
    gathered: bool = False

    def close(self, offsets: Sequence[Place]) -> None:
        """Join places that follow each other, where tensors are gathered."""
        for member, start, length in self.cuts:
            place = stretch(offsets[member], start, length)
            last = self.places[-1] if self.gathered and self.places else None
            if isinstance(last, int) and place == last + self.lengths[-1]:
                self.lengths[-1] += length
            else:
                self.places.append(place)
                self.lengths.append(length)

    def load(self, number: int) -> list[Tensor] | None:
        """The tensors of one of the lists, to be changed."""
        views = self.lists[number]
        return [torch.cat(views)] if self.gathered and views else views

    def store(self, number: int, tensors: list[Tensor]) -> None:
        """Write them back, where they are not the kept ones themselves."""
        views = self.lists[number]
        assert views is not None
        if self.gathered:
            (whole,) = tensors
            torch.split_with_sizes_copy(whole.to(views[0].device, views[0].dtype), self.sizes, out=views)
        elif tensors[0] is not views[0]:
            torch._foreach_copy_(views, tensors)


class BlockLists:
    """The tensors of a param group cut into blocks, to be walked through in many steps.

    Args:
        w_prime: The parameters, which `fits` has accepted with the others.
        w: The centers.
        mu: The running means; None where they are w' itself, because alpha = 0.
        velocity: Of the momentum; None without.
        rest: What the rounding of w' has lost (`wideflat.kernels.rounding`); None for parameters that have the type of
            the centers.
        offsets: The place in the noise of the first element of each parameter, or those of its patch.
        restarts: Does a cycle begin at rest, or with the velocity that is there?
        chance: A seed: w' of 16 bits is rounded by chance.
    """

    def __init__(
        self,
        w_prime: list[Tensor],
        w: list[Tensor],
        mu: list[Tensor] | None = None,
        velocity: list[Tensor] | None = None,
        rest: list[Tensor] | None = None,
        *,
        offsets: Sequence[Place],
        restarts: bool = True,
        chance: int | None = None,
    ) -> None:
        lists = [w_prime, w, mu, velocity, rest]
        self._offsets, self._restarts, self._chance = offsets, restarts, chance
        self._kept = [None if tensors is None else [t.detach() for t in tensors] for tensors in lists]
        self._memory = Memory(self._kept)
        self._device, self._dtype = w_prime[0].device, w[0].dtype
        self._is_contiguous = all(map(Tensor.is_contiguous, w_prime))  # and so are gradients that lie like them
        self._is_plain = all(t[0].dtype == self._dtype and t[0].device == self._device for t in lists if t is not None)
        self._blocks = _cut(self._kept, LARGE if self._device.type != "cpu" else CACHE)
        self._scratch: Tensor | None = None
        for block in self._blocks:
            block.close(offsets)

    @staticmethod
    def fits(*lists: list[Tensor] | None) -> bool:
        """Can blocks be cut of these: plain tensors without gaps, lying alike, of one type and device in each list?"""
        there = [tensors for tensors in lists if tensors is not None]
        return bool(there[0]) and all(
            t.shape == tensors[0].shape
            and t.stride() == tensors[0].stride()
            and t.dtype == first.dtype
            and t.device == first.device
            and type(t) in (Tensor, nn.Parameter)
            and t.layout == torch.strided
            and is_dense(t)
            for tensors in zip(*there, strict=True)
            for t, first in zip(tensors, [column[0] for column in there], strict=True)
        )

    def matches(self, *lists: list[Tensor] | None, offsets: Sequence[object]) -> bool:
        """Are these the same lists, at the same memory and lying as they did?"""
        return self._offsets == offsets and self._memory.holds(lists)

    def inner_step(
        self, gradients: list[Tensor], rule: Rule, noise: GaussianNoise | None, step: int, taken: bool = False
    ) -> None:
        """One inner step: moves w', mu and the velocity; at the start of a cycle w is put on w' first.

        Args:
            gradients: Of w'.
            rule: What the step does.
            noise: What is added to w', if anything.
            step: The number of the step, for it.
            taken: Nobody has changed w' since w was put there: w need not be looked at.
        """
        gradients = self._memory.in_order(gradients, any_type=True)
        starting = bool(rule.starting)
        for block in self._blocks:
            held, mu, v, rest = (block.load(number) for number in (0, 2, 3, 4))
            assert held is not None
            x = self._take_up(block, held, rest) if starting and not taken else self._joined(held, rest)
            d = self._gradients(block, gradients)
            if rule.gamma and not starting:
                d = self._pulled(d, x, self._centers(block), rule.gamma)
            mu, v = None if mu is None else self._wide(mu), None if v is None else self._wide(v)
            before = mu if not starting else self._beginning(block, mu, x)
            _sgd(x, d, v, rule, resting=starting and self._restarts)
            if noise is not None:
                pieces = list(x[0].split(block.lengths)) if block.gathered else x
                add_noise(pieces, block.places, noise, step, rule.noise)
            if mu is not None and before is not None:
                _average(mu, before, x, 1 - rule.alpha)
                block.store(2, mu)
            if v is not None:
                block.store(3, v)
            if self._chance is not None:
                self._round(x, held, block, key_of(self._chance, step, stream=1))
                x = held
            self._store(block, x, held, rest)

    def outer_step(self, rule: Rule) -> None:
        """The outer step: moves w towards mu, and puts w' on it."""
        for block in self._blocks:
            held, w, mu, v, rest = (block.load(number) for number in range(5))
            assert held is not None and w is not None
            x = self._joined(held, rest)
            wide, wide_v = self._wide(w), None if v is None else self._wide(v)
            d = list(torch._foreach_sub(self._centers(block), x if mu is None else self._wide(mu)))
            _sgd(wide, d, wide_v, rule)
            block.store(1, wide)
            if wide_v is not None:
                block.store(3, wide_v)
            self._store(block, wide, held, rest)

    def _beginning(self, block: _Block, mu: list[Tensor] | None, x: list[Tensor]) -> list[Tensor] | None:
        """From where the mean sets out in the first step of a cycle, which is going to move x: w, where it is x now."""
        if self._is_plain and not block.gathered and self._device.type == "cpu":
            return block.lists[1]
        if mu is not None:
            torch._foreach_copy_(mu, x)
        return mu

    def _wide(self, tensors: list[Tensor] | None) -> list[Tensor]:
        """In the type of the centers, where w' is; themselves if they are so."""
        if self._is_plain:
            return tensors or []
        return [t.to(self._device, self._dtype, non_blocking=True) for t in tensors or []]

    def _joined(self, held: list[Tensor], rest: list[Tensor] | None) -> list[Tensor]:
        """The explorer w' in full, of which the model holds the rounded one."""
        if rest is None:
            return held if self._is_plain else [x.to(self._dtype) for x in held]
        return [join(x, lost) for x, lost in zip(held, rest, strict=True)]

    def _centers(self, block: _Block) -> list[Tensor]:
        """The centers from which w' has set out: rounded, if what is lost by that is not kept."""
        w = self._wide(block.load(1))
        if self._chance is None:
            return w
        assert block.lists[0] is not None
        held = block.lists[0][0].dtype
        return [center.to(held).to(self._dtype) for center in w]

    def _pulled(self, g: list[Tensor], x: list[Tensor], w: list[Tensor], gamma: float) -> list[Tensor]:
        """Compute g + gamma (x - w)."""
        if self._device.type != "cpu":
            d = list(torch._foreach_sub(x, w))
            torch._foreach_mul_(d, gamma)
            torch._foreach_add_(d, g)
            return d
        d = self._scratch_like(x)
        for out, gradient, explorer, center in zip(d, g, x, w, strict=True):
            torch.sub(explorer, center, out=out)
            torch.add(gradient, out, alpha=gamma, out=out)
        return d

    def _scratch_like(self, x: list[Tensor]) -> list[Tensor]:
        """Memory for a gradient, the same at every step: fresh one would cost more than what is done with it."""
        if self._scratch is None:
            most = max(sum(block.sizes) for block in self._blocks)
            self._scratch = torch.empty(most, dtype=self._dtype)
        if len(x) == 1:
            return [self._scratch[: x[0].numel()]]
        sizes = [t.numel() for t in x]
        return list(self._scratch[: sum(sizes)].split_with_sizes(sizes))

    @staticmethod
    def _round(x: list[Tensor], held: list[Tensor], block: _Block, key: int | Tensor) -> None:
        """Round w' by chance, which is a function of the place as the noise is."""
        pieces = list(zip(x, held, strict=True))
        if block.gathered:
            pieces = list(zip(x[0].split(block.lengths), held[0].split(block.lengths), strict=True))
        for (whole, rounded), place in zip(pieces, block.places, strict=True):
            round_by_chance(whole, rounded, words(counted(place, whole.numel(), whole.device), key))

    def _take_up(self, block: _Block, held: list[Tensor], rest: list[Tensor] | None) -> list[Tensor]:
        """Put w on w' where somebody has changed the weights of the model; return w' in full, which then is w."""
        wide = held if self._is_plain else [x.to(self._dtype) for x in held]
        if rest is None and self._chance is None:
            block.store(1, held)
            return wide
        taken = []
        for x, full, center in zip(held, wide, self._wide(block.load(1)), strict=True):
            rounded = torch.empty_like(x)
            if rest is None:
                rounded.copy_(center)
            else:
                part(center, rounded, torch.empty_like(x, dtype=rest[0].dtype))
            taken.append(torch.where(rounded == x, center, full))
        block.store(1, taken)
        return wide if rest is None else taken

    def _store(self, block: _Block, x: list[Tensor], held: list[Tensor], rest: list[Tensor] | None) -> None:
        """Put w' back into the model, and what is lost by that beside it."""
        if rest is None:
            block.store(0, x)
            return
        for whole, rounded, lost in zip(x, held, rest, strict=True):
            part(whole, rounded, lost)
        block.store(0, held)
        block.store(4, rest)

    def _gradients(self, block: _Block, gradients: list[Tensor]) -> list[Tensor]:
        if block.gathered:
            chosen = [gradients[member] for member, _, _ in block.cuts]
            if self._is_contiguous:
                pieces = [torch._utils._flatten_dense_tensors(chosen)]
            else:
                pieces = [torch.cat([flat(gradient) for gradient in chosen])]
        else:
            pieces = [flat(gradients[member])[start : start + length] for member, start, length in block.cuts]
        return [piece if piece.dtype is self._dtype else piece.to(self._dtype) for piece in pieces]


def _cut(lists: list[list[Tensor] | None], size: int) -> list[_Block]:
    """Blocks of about ``size`` elements: large tensors are cut, others come together, small ones are gathered."""
    blocks: list[_Block] = []
    open_blocks: dict[bool, _Block] = {}
    filled = {True: 0, False: 0}
    assert lists[0] is not None
    for member, tensor in enumerate(lists[0]):
        gathered = tensor.numel() <= SMALL and size == CACHE
        limit = GATHERED if gathered else size
        for start in range(0, tensor.numel(), size):
            length = min(size, tensor.numel() - start)
            if gathered not in open_blocks or filled[gathered] + length > limit:
                open_blocks[gathered] = _Block([None if each is None else [] for each in lists], gathered=gathered)
                blocks.append(open_blocks[gathered])
                filled[gathered] = 0
            block = open_blocks[gathered]
            for views, tensors in zip(block.lists, lists, strict=True):
                if views is not None and tensors is not None:
                    views.append(flat(tensors[member])[start : start + length])
            block.cuts.append((member, start, length))
            block.sizes.append(length)
            filled[gathered] += length
    return blocks


def _average(mu: list[Tensor], before: list[Tensor], x: list[Tensor], share: float) -> None:
    """Compute mu <- before + share (x - before)."""
    if before is mu:
        torch._foreach_lerp_(mu, x, share)
        return
    for mean, start, end in zip(mu, before, x, strict=True):
        torch.lerp(start, end, share, out=mean)


def _sgd(x: list[Tensor], d: list[Tensor], v: list[Tensor] | None, rule: Rule, resting: bool = False) -> None:
    """A step of SGD on x along d; ``resting`` takes the velocity for zero, without reading it."""
    if x[0].device.type == "cpu":
        torch._fused_sgd_(
            x,
            d,
            [] if v is None else v,
            weight_decay=rule.weight_decay,
            momentum=rule.momentum,
            lr=rule.lr,
            dampening=0.0,
            nesterov=bool(rule.nesterov),
            maximize=False,
            is_first_step=resting,
        )
        return
    if rule.weight_decay:
        d = list(torch._foreach_add(d, x, alpha=rule.weight_decay))
    if v is not None:
        if resting:
            torch._foreach_copy_(v, d)
        else:
            torch._foreach_mul_(v, rule.momentum)
            torch._foreach_add_(v, d)
        d = list(torch._foreach_add(d, v, alpha=rule.momentum)) if rule.nesterov else v
    torch._foreach_add_(x, d, alpha=-rule.lr)
