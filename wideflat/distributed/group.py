"""Who the replicas are, and how their mean is found: the groups that a coupling works with.

One of them is here, `InProcess`: all replicas in this process. `wideflat.distributed.mesh` has one replica on each
rank, `wideflat.distributed.elastic` replicas that come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from wideflat.kernels.flat_blocks import cache_blocks
from wideflat.kernels.float64 import doubled
from wideflat.kernels.shards import local, sharding, total

if TYPE_CHECKING:
    from wideflat.replica_networks import Replicas

__all__ = ["Block", "InProcess", "ReplicaGroup", "detached", "mean", "set_to_mean", "square_distance"]

#: Of one block: the pieces of each replica in this process, those of the other lists, and those of the barycenter.
Block: TypeAlias = tuple[list[list[Tensor]], list[list[Tensor]], list[Tensor]]


class ReplicaGroup(Protocol):
    """Who the replicas are and how their mean is found: all that `ReplicaCoupling` needs to know of them.

    Here they live in one process. Replicas on other processes are other such groups (`wideflat.distributed.mesh`,
    `wideflat.distributed.elastic`): their ``members`` are those of this process, and their sums run over all replicas.
    """

    num_replicas: int

    @property
    def members(self) -> list[list[Tensor]]:
        """The parameters of each replica in this process."""

    def blocks(self, members: list[list[Tensor]], *others: list[Tensor]) -> Iterator[Block]:
        """Walk through the weights and their barycenter, block by block.

        Args:
            members: Tensors of each replica in this process, detached.
            *others: Further lists to be cut in the same way: gradients, a center.
        """

    def total(self, values: Tensor) -> Tensor:
        """The sum over all replicas of one number for each replica in this process."""

    def distances(self) -> Tensor:
        """d(w_a, w_bar) of each replica in this process."""

    def gather(self, values: Tensor) -> Tensor:
        """One number for each replica, given those of this process."""

    def buffers(self) -> Iterator[Tensor]:
        """The buffers of the networks in this process."""

    def barycenter(self, at_barycenter: Callable[[], AbstractContextManager[None]], buffers: str) -> nn.Module:
        """A copy of the network, taken within ``at_barycenter()``."""

    def prefetch(self, *members: list[Tensor]) -> bool:
        """Start on the means of these tensors, if that takes long; says whether it did."""

    def send(self, *members: list[Tensor]) -> bool:
        """The same for any tensors, which stay as they are until `blocks` is asked for them."""

    def check(self) -> None:
        """Called before each attraction: refuse to go on where the replicas are not what they should be."""


class InProcess:
    """The group of replicas in one process."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.num_replicas = len(replicas)
        # Collected once: walking through the modules costs more than the attraction of small networks.
        self.members: list[list[Tensor]] = [list(replicas.own(model)) for model in replicas]

    def blocks(self, members: list[list[Tensor]], *others: list[Tensor]) -> Iterator[Block]:
        """Weights, other lists and the barycenter, block by block."""
        y = len(members)
        lists = [[local(tensor) for tensor in tensors] for tensors in (*members, *others)]
        for pieces in cache_blocks(*lists):
            yield pieces[:y], pieces[y:], mean(pieces[:y])

    def total(self, values: Tensor) -> Tensor:
        """The sum over all replicas."""
        return values.sum()

    @torch.no_grad()
    def distances(self) -> Tensor:
        """d(w_a, w_bar) of each replica."""
        members = detached(self.members)
        squares = []
        alike: dict[Any, list[int]] = {}
        for number, p in enumerate(members[0]):
            alike.setdefault(sharding(p), []).append(number)
        for numbers in alike.values():
            found = torch.zeros(len(members), dtype=torch.float64)
            for pieces, _, w_bar in self.blocks([[w[number] for number in numbers] for w in members]):
                for index, w in enumerate(pieces):
                    found[index] += square_distance(w, w_bar)
            squares.append((members[0][numbers[0]], found))
        everywhere = total(squares)
        return torch.zeros(len(members), dtype=torch.float64) if everywhere is None else everywhere / 2

    def gather(self, values: Tensor) -> Tensor:
        """They are all here."""
        return values

    def buffers(self) -> Iterator[Tensor]:
        """The buffers of all networks."""
        return self.replicas.buffers()

    def barycenter(self, at_barycenter: Callable[[], AbstractContextManager[None]], buffers: str) -> nn.Module:
        """A network at the barycenter."""
        return self.replicas.barycenter(buffers)

    def prefetch(self, *members: list[Tensor]) -> bool:
        """Nothing: the mean is quick to find."""
        return False

    send = prefetch

    def check(self) -> None:
        """Nothing: whoever made them has looked."""


def detached(members: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The same tensors without their history."""
    return [[p.detach() for p in w] for w in members]


def mean(members: Sequence[list[Tensor]]) -> list[Tensor]:
    """The mean of parallel lists of tensors."""
    if len(members) == 1:
        return [tensor.clone() for tensor in members[0]]
    total = list(torch._foreach_add(members[0], members[1]))
    for tensors in members[2:]:
        torch._foreach_add_(total, tensors)
    torch._foreach_div_(total, len(members))
    return total


def set_to_mean(target: Sequence[Tensor], members: Sequence[Sequence[Tensor]]) -> None:
    """Write the mean of parallel lists of tensors into ``target``."""
    for out, *pieces in cache_blocks(target, *members):
        torch._foreach_copy_(out, mean(pieces))


def square_distance(w: list[Tensor], w_bar: list[Tensor]) -> Tensor:
    """The squared distance between two lists of tensors, in float64 on the CPU."""
    norms = torch._foreach_norm(torch._foreach_sub(w, w_bar))
    return doubled(torch.stack(list(norms))).square().sum().cpu()
