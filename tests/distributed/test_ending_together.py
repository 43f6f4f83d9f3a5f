"""An error on one rank ends all of them, with that error; an error of one's own stays one's own."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import wideflat
from wideflat.distributed.ending_together import _connection, ending_together
from wideflat.training import Diverged


def raise_on_one_rank(where, together):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replica",))
    torch.manual_seed(mesh.get_local_rank())
    coupling = wideflat.ReplicaCoupling(nn.Linear(5, 3), mesh=mesh, period=2, gamma=0.1)
    with ending_together() if together else contextlib.nullcontext():
        for t in range(20):
            coupling.prefetch()
            if t == 7 and dist.get_rank() == where:
                raise ValueError("the data of day 7 is missing")
            coupling.couple()


@pytest.mark.parametrize("where", [0, 2])
def test_an_error_on_one_rank_ends_all_with_it(ranks, where):
    results = ranks(raise_on_one_rank, 3, where, True, errors=True)  # ends before the time-out
    for rank, (kind, message) in enumerate(results):
        assert kind == ("ValueError" if rank == where else "ReplicaFailed"), (kind, message)
        assert "the data of day 7 is missing" in message
        assert rank == where or f"rank {where} raised ValueError" in message


def raise_on_both_ranks():
    with ending_together():
        if dist.get_rank() == 1:
            raise ValueError("the first error")
        store = _connection(dist.distributed_c10d._get_default_store())
        store.wait(["wideflat/failure"])  # the other has reported
        raise Diverged("the loop has diverged")


def test_errors_are_told_apart_by_their_class_and_not_by_their_text(ranks):
    """ "loop" has the letters of gloo in it; it is no broken connection for that."""
    results = ranks(raise_on_both_ranks, 2, errors=True)
    assert results == [("Diverged", "the loop has diverged"), ("ValueError", "the first error")]
