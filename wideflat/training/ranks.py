"""A training on the ranks of ``torchrun``: one or several for each replica.

It is the training of one process, step by step: weights, data and noise of replica ``a`` are functions of the seed and
of ``a``, wherever it is computed. With more ranks than replicas, those of a replica divide its mini-batches
(:mod:`wideflat.distributed.split_batch`): they hold the same weights and compute the gradient together, batch norm
included; only dropout and other noise inside the network is drawn for each rank, so it is not that of one process. The
run on disk is the same too, written by the first rank, so a run can be started in one process and be continued on
several, or the other way round.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from wideflat.distributed.ending_together import ending_together
from wideflat.distributed.mesh import MeshReplicas
from wideflat.distributed.split_batch import SplitBatch
from wideflat.distributed.threads import leave_in_peace
from wideflat.presets import Preset
from wideflat.replicas import Replicas
from wideflat.training.company import Alone, WholeBatch

__all__ = ["Ranks"]

#: Iterations between two moments at which the ranks agree on whether to save or to stop.
AGREE_EVERY = 10


class Ranks(Alone):
    """The ranks of a process group, among which the replicas are divided; all ask and answer at the same time.

    With float16 they agree at every iteration on whether a gradient has overflown, in one number, so that all leave out
    the same steps.

    Args:
        mesh: With the dimensions ("replica", "dp"): as many replicas as the preset has, and ranks for each.
        device: Where this rank computes.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device | str = "cpu") -> None:
        self.mesh, self._device = mesh, torch.device(device)
        self.ranks_per_replica, part = mesh["dp"].size(), mesh["dp"].get_local_rank()
        self.place, self.size = dist.get_rank(), mesh.size()
        self.writes = self.place == 0
        self.own_noise = (part,) if part else ()
        self.about = {"ranks": mesh.size()}
        self.words = f" on {mesh.size()} ranks"

    @classmethod
    @contextlib.contextmanager
    def of_torchrun(cls, num_replicas: int, device: torch.device, timeout: float = 600.0) -> Iterator[Ranks]:
        """The ranks that ``torchrun`` has started; an error on one of them ends all.

        Args:
            num_replicas: y; the number of ranks must be a multiple of it.
            device: ``cpu`` (gloo) or ``cuda`` (NCCL, the GPU numbered like the rank on its machine).
            timeout: Seconds after which a rank that does not answer is given up.
        """
        ranks = int(os.environ["WORLD_SIZE"])
        if ranks % num_replicas:
            raise ValueError(
                f"this training has {num_replicas} replicas and torchrun has started {ranks} ranks, which cannot be "
                f"divided among them equally: give --nproc-per-node {num_replicas} or {2 * num_replicas} or ... (times "
                f"--nnodes, where there are several machines), or --num-replicas {ranks}"
            )
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        leave_in_peace()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
        try:
            shape = num_replicas, ranks // num_replicas
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "dp"))
            with ending_together():
                yield cls(mesh, device)
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    def check(self, preset: Preset) -> None:
        """The mesh must be for as many replicas as there are."""
        if self.mesh["replica"].size() != preset.num_replicas:
            raise ValueError(f"the mesh is for {self.mesh['replica'].size()} replicas, not for {preset.num_replicas}")

    # ---- who has what

    def local_replicas(self, num_replicas: int) -> list[int]:
        """The one of this rank."""
        return [self.mesh["replica"].get_local_rank()]

    def group(self, replicas: Replicas) -> MeshReplicas:
        """One replica on each rank, or on each group of ranks."""
        return MeshReplicas(replicas[0], self.mesh["replica"])

    def share(self, network: nn.Module) -> WholeBatch | SplitBatch:
        """Mini-batches are divided where a replica has several ranks."""
        return WholeBatch(network) if self.ranks_per_replica == 1 else SplitBatch(network, self.mesh["dp"])

    def device(self, device: torch.device | str) -> torch.device:
        """The one that belongs to this rank."""
        return self._device

    # ---- what all know

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank, on all of them; any Python object. Ranks of one replica are neighbours."""
        values: list[Any] = [None] * self.mesh.size()
        dist.all_gather_object(values, tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value))
        return values

    def of_replicas(self, value: Any) -> list[Any]:
        """The value of each replica, which is that of its first rank, on all ranks."""
        return self.gather(None if self.own_noise else value)[:: self.ranks_per_replica]

    def all(self, here: bool) -> bool:
        """Whether something is true on all ranks."""
        number = torch.tensor(float(here), device=self._device)
        dist.all_reduce(number, op=dist.ReduceOp.MIN)
        return bool(number)

    def votes(self, probabilities: Tensor) -> Tensor:
        """The sum over all replicas."""
        dist.all_reduce(probabilities, group=self.mesh["replica"].get_group())
        return probabilities

    def agree(self, step: int, urgent: bool, stop: str | None, save: bool) -> tuple[str | None, bool]:
        """Stop if any rank was asked to, save if it is time for the first one."""
        if not urgent and step % AGREE_EVERY:
            return None, False
        wishes = self.gather((stop, save))
        return next((asked for asked, _ in wishes if asked), None), wishes[0][1]
