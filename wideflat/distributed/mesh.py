"""Replicas on many processes: one on each rank of a device mesh, or on each group of ranks that share its data.

.. code-block:: python

    mesh = init_device_mesh("cuda", (num_replicas, ranks_per_replica), mesh_dim_names=("replica", "dp"))
    seed_replica(mesh["replica"], seed)                          # every replica its own weights, order of data, noise
    model = DistributedDataParallel(make_model(), device_mesh=mesh["dp"])        # or fully_shard(..., mesh=mesh["dp"])
    coupling = wideflat.ReplicaCoupling(model, mesh=mesh["replica"], period=10)
    with ending_together():                                      # an error on one rank ends all of them, with it
        for batch in loader:
            coupling.prefetch()                                  # optional: communicate while computing
            loss(model(batch)).backward()
            coupling.couple()                                    # on every rank, at every iteration
            opt.step()

What is sent: at every K-th call of `couple` one all-reduce of the trainable weights over the ranks that hold the same
part of them, in flat buckets; a rank with 1/n of the weights (``fully_shard``) sends 1/n. Nothing else is ever sent,
and nothing inside ``optimizer.step()``, which mixed precision may skip on one rank and not on another.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from wideflat.distributed.group import Block, square_distance
from wideflat.distributed.threads import leave_in_peace
from wideflat.kernels.flat_blocks import cache_blocks, is_dense
from wideflat.kernels.float64 import doubled, has_float64
from wideflat.kernels.shards import local, norm, sharding, total
from wideflat.seeds import derive_seed

__all__ = ["FlatBuckets", "MeshReplicas", "seed_replica"]

#: Bytes in a bucket, as in DistributedDataParallel. Smaller ones pipeline better, larger ones have less overhead.
BUCKET = 25 * 2**20


def seed_replica(mesh: DeviceMesh, seed: int) -> int:
    """Seed torch's generator for this rank's replica: different between replicas, equal within one.

    Args:
        mesh: ``mesh["replica"]``.
        seed: Of the whole run.

    Returns:
        The seed of this replica, for everything else that is random: order of data, augmentation, Langevin noise.
    """
    own = derive_seed(seed, "replica", mesh.get_local_rank())
    torch.manual_seed(own)
    return own


class FlatBuckets:
    """Contiguous buffers that a list of tensors is copied into, so that a collective is called once a bucket.

    Args:
        like: The tensors: shapes, strides, dtypes and devices. A bucket holds tensors of one dtype and device.
        size: Bytes in a bucket; a larger tensor has one of its own.

    Attributes:
        flat: The buffers.
        indices: For each buffer, which of the tensors it holds.
        views: For each buffer, those tensors, as views into it of the same shape and strides.

    Example:
        >>> w = [torch.ones(2, 2), torch.zeros(3)]
        >>> buckets = FlatBuckets(w)
        >>> buckets.fill(0, w)
        >>> buckets.flat[0].tolist(), buckets.views[0][1].shape
        ([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], torch.Size([3]))
    """

    def __init__(self, like: list[Tensor], size: int = BUCKET) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(like):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        self.indices: list[list[int]] = []
        for members in kinds.values():
            filled = size
            for index in members:
                if filled >= size:
                    self.indices.append([])
                    filled = 0
                self.indices[-1].append(index)
                filled += like[index].nbytes
        self.flat: list[Tensor] = []
        self.views: list[list[Tensor]] = []
        for indices in self.indices:
            total = sum(like[i].numel() for i in indices)
            flat = torch.empty(total, dtype=like[indices[0]].dtype, device=like[indices[0]].device)
            views, start = [], 0
            for i in indices:
                tensor = like[i]
                strides = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
                views.append(flat.as_strided(tensor.shape, strides, start))
                start += tensor.numel()
            self.flat.append(flat)
            self.views.append(views)

    def __len__(self) -> int:
        return len(self.flat)

    @property
    def nbytes(self) -> int:
        """Bytes in all of them."""
        return sum(flat.nbytes for flat in self.flat)

    def fill(self, bucket: int, tensors: list[Tensor]) -> None:
        """Copy the tensors of one bucket into it."""
        torch._foreach_copy_(self.views[bucket], [tensors[i] for i in self.indices[bucket]])


class MeshReplicas:
    """One replica on each rank of a mesh: the `wideflat.replicas.ReplicaGroup` behind ``ReplicaCoupling(..., mesh=)``.

    Args:
        model: The network of this rank; wrapped in ``DistributedDataParallel`` or sharded with ``fully_shard`` over
            other ranks than those of ``mesh``, or neither.
        mesh: One-dimensional; its ranks hold one replica each.
        bucket: Bytes in a flat bucket.

    Raises:
        ValueError: If the model is tied to other replicas already: wrapped in ``DistributedDataParallel`` or sharded
            over a mesh that contains them, which would average their gradients and make them equal; or if the replicas
            are not of one architecture.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, bucket: int = BUCKET) -> None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise ValueError(
                'mesh must be a one-dimensional DeviceMesh with one replica on each of its ranks, mesh["replica"]; got '
                + (f"one with the dimensions {mesh.mesh_dim_names}" if isinstance(mesh, DeviceMesh) else f"{mesh!r}")
            )
        leave_in_peace()
        self.mesh = mesh
        self.group = mesh.get_group()
        self.num_replicas = mesh.size()
        self.index = mesh.get_local_rank()
        _refuse_ties(model, mesh)
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.bucket = bucket
        self._layouts: dict[tuple[Any, ...], FlatBuckets] = {}
        self._prefetched: tuple[list[Tensor], list[int], FlatBuckets, list[dist.Work]] | None = None
        self._moved_together: float | None = None
        self._known_apart = False
        self._refuse_other_architectures()

    # ---------------------------------------------------------------------------------------------- the replica here

    @property
    def members(self) -> list[list[Tensor]]:
        """The parameters of the replica of this rank, or its part of them."""
        return [list(self.model.parameters())]

    def buffers(self) -> Iterator[Tensor]:
        """The buffers of the network of this rank."""
        return self.model.buffers()

    # --------------------------------------------------------------------------------------------------- collectives

    def blocks(self, members: list[list[Tensor]], *others: list[Tensor]) -> Iterator[Block]:
        """Weights, other lists and the barycenter, block by block; one bucket is used while the next ones travel."""
        w = [local(tensor) for tensor in members[0]]
        rest = [[local(tensor) for tensor in tensors] for tensors in others]
        buckets, works = self._take_prefetched(w) or self._start(w)
        for indices, flat, views, work in zip(buckets.indices, buckets.flat, buckets.views, works, strict=True):
            work.wait()
            flat.div_(self.num_replicas)
            lists = [[tensors[i] for i in indices] for tensors in (w, *rest)]
            for mine, *pieces in cache_blocks(*lists, views):
                yield [mine], pieces[:-1], pieces[-1]

    def _start(self, w: list[Tensor]) -> tuple[FlatBuckets, list[dist.Work]]:
        """Copy the weights into buckets and start summing each over the replicas."""
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in w)
        if key not in self._layouts:
            self._layouts[key] = FlatBuckets(w, self.bucket)
        buckets = self._layouts[key]
        works = []
        for number, flat in enumerate(buckets.flat):
            buckets.fill(number, w)
            works.append(dist.all_reduce(flat, group=self.group, async_op=True))
        return buckets, works

    def prefetch(self, *members: list[Tensor]) -> bool:
        """Start the all-reduce of the weights of this rank; `blocks` will wait for it."""
        return self._known_apart and self.send(*members)  # the first attraction looks at the replicas before

    @torch.no_grad()
    def send(self, *members: list[Tensor]) -> bool:
        """Start the all-reduce of any tensors of this rank; `blocks` will wait for it."""
        if self._prefetched is not None:
            return False
        w = [local(tensor) for tensor in members[0]]
        self._prefetched = (w, [tensor._version for tensor in w], *self._start(w))
        return True

    def _take_prefetched(self, w: list[Tensor]) -> tuple[FlatBuckets, list[dist.Work]] | None:
        if self._prefetched is None:
            return None
        (before, versions, buckets, works), self._prefetched = self._prefetched, None
        same = len(w) == len(before) and all(a.data_ptr() == b.data_ptr() for a, b in zip(w, before, strict=True))
        if not same or [tensor._version for tensor in before] != versions:
            for work in works:
                work.wait()
            raise RuntimeError(
                "the weights changed, or something else asked for the barycenter, between prefetch() and couple(), so "
                "what was sent is no longer right; call prefetch() right before the forward pass, after opt.step()"
            )
        return buckets, works

    def total(self, values: Tensor) -> Tensor:
        """The sum over all replicas, the same on every rank."""
        return self.gather(values).sum()

    def gather(self, values: Tensor) -> Tensor:
        """The values of all replicas, in the order of the mesh."""
        own = doubled(values).reshape(-1)
        if not has_float64(self._device):  # as the bits that they are
            own = own.view(torch.int64)
        own = own.to(self._device)
        all_values = [torch.empty_like(own) for _ in range(self.num_replicas)]
        dist.all_gather(all_values, own, group=self.group)
        return torch.cat(all_values).cpu().view(torch.float64)

    @property
    def _device(self) -> torch.device:
        return next((local(p).device for p in self.model.parameters()), torch.device("cpu"))

    @torch.no_grad()
    def distances(self) -> Tensor:
        """d(w_a, w_bar) of the replica of this rank."""
        alike: dict[Any, list[Tensor]] = {}
        for p in self.members[0]:
            alike.setdefault(sharding(p), []).append(p.detach())
        squares = []
        for w in alike.values():
            square = torch.zeros((), dtype=torch.float64)
            for (mine,), _, w_bar in self.blocks([w]):
                square += square_distance(mine, w_bar)
            squares.append((w[0], square))
        found = total(squares)
        return (torch.zeros(()) if found is None else found).double().reshape(1) / 2

    def barycenter(self, at_barycenter: Callable[[], AbstractContextManager[None]], buffers: str) -> nn.Module:
        """A copy of the network at the barycenter, on every rank."""
        if any(isinstance(p, DTensor) for p in self.members[0]):
            raise ValueError(
                "the network is sharded, so there is no copy of it on one rank: evaluate or save it within "
                "`with coupling.at_barycenter():`"
            )
        with at_barycenter():
            center = copy.deepcopy(self.model)
        center.zero_grad(set_to_none=True)
        with torch.no_grad():
            if buffers == "average":
                real = [buffer for buffer in center.buffers() if buffer.is_floating_point()]
                for (mine,), _, mean in self.blocks([real]) if real else ():
                    torch._foreach_copy_(mine, mean)
            else:
                for buffer in center.buffers():
                    dist.broadcast(buffer, group_src=0, group=self.group)
        return center

    # -------------------------------------------------------------------------------------------------------- checks

    @torch.no_grad()
    def check(self) -> None:
        """Refuse to go on if all replicas have moved, and moved alike: nothing is replicated then."""
        if self._known_apart:
            return
        distance = self.total(self.distances()).item()
        place = self.total(norm([p for p in self.members[0] if p.requires_grad]).cpu()).item()
        if distance > 0:
            self._known_apart = True
        elif self._moved_together is not None and place != self._moved_together:
            raise RuntimeError(
                "all replicas have trained and are still equal to the last bit, so the attraction between them is "
                "nothing. Either their gradients are averaged (DistributedDataParallel or fully_shard over all ranks: "
                'give it device_mesh=mesh["dp"], or nothing if every rank has a replica of its own), or they have the '
                'same weights and the same data (see wideflat.distributed.mesh.seed_replica(mesh["replica"], seed))'
            )
        else:
            self._moved_together = place

    def _refuse_other_architectures(self) -> None:
        layout = [(tuple(local(p).shape), local(p).stride(), str(p.dtype)) for p in self.model.parameters()]
        digest = hashlib.blake2b(repr(layout).encode(), digest_size=6).digest()
        numbers = self.gather(torch.tensor([int.from_bytes(digest, "little")], dtype=torch.float64))
        if not (numbers == numbers[0]).all():
            other = int((numbers != numbers[0]).nonzero()[0])
            raise ValueError(
                f"the replicas must be of one architecture, dtype and memory format; replica {other} differs from "
                "replica 0 in the shapes, strides or dtypes of its parameters"
            )


def _refuse_ties(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise if gradients would be averaged between replicas."""
    others = set(dist.get_process_group_ranks(mesh.get_group())) - {dist.get_rank()}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            shared = others & set(dist.get_process_group_ranks(module.process_group))
            if shared:
                raise ValueError(
                    "the model is wrapped in DistributedDataParallel together with other replicas (ranks "
                    f"{sorted(shared)}): it would average their gradients at every step and make the replicas equal. "
                    'Wrap it over the ranks of one replica, DistributedDataParallel(model, device_mesh=mesh["dp"]), or '
                    "not at all if every rank has a replica of its own"
                )
    for name, p in model.named_parameters():
        shared = others & set(p.device_mesh.mesh.flatten().tolist()) if isinstance(p, DTensor) else set()
        if shared:
            raise ValueError(
                f"{name} is distributed over ranks of other replicas ({sorted(shared)}), which would average their "
                'gradients and make the replicas equal. Use fully_shard(model, mesh=mesh["dp"]), with the ranks of one '
                "replica only"
            )
