"""Checkpoints of replicas on ranks: bit for bit on as many replicas, from the barycenter on another number if asked."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import wideflat
from wideflat.distributed.checkpoint import load_replicas, save_replicas
from wideflat.training.state_files import DamagedState


def make(form, replicas, seed):
    ranks = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replica", "dp"))
    torch.manual_seed(seed + mesh["replica"].get_local_rank())
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3)).double()
    if form == "ddp":
        model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    elif form == "fsdp":
        fully_shard(model, mesh=mesh["dp"])
    if form in ("entropy", "fsdp"):
        optimizer = wideflat.EntropySGD(model.parameters(), lr=0.5, inner_lr=0.1, inner_steps=3, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kind = wideflat.EASGD if form == "fsdp" else wideflat.ReplicaCoupling  # which keeps tensors of its own
    coupling = kind(model, mesh=mesh["replica"], period=2, gamma=0.1)
    return model, optimizer, coupling


def train(model, optimizer, coupling, first, last):
    for t in range(first, last):
        generator = torch.Generator().manual_seed(100 * t + coupling.group.index)
        x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(8) % 3).backward()
        coupling.couple()
        optimizer.step()


def flat(model):
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([tensor.detach().double().flatten() for tensor in [*whole, *model.buffers()]])


def save_and_go_on(path, form, replicas):
    parts = make(form, replicas, seed=0)
    train(*parts, 0, 5)
    save_replicas(path, *parts, extra={"epoch": 5})
    saved = flat(parts[0])
    train(*parts, 5, 9)
    expected = flat(parts[0])
    others = make(form, replicas, seed=50)
    extra = load_replicas(path, *others)
    assert extra == {"epoch": 5}
    assert others[2].calls == 5
    assert torch.equal(flat(others[0]), saved)
    train(*others, 5, 9)
    assert torch.equal(flat(others[0]), expected)  # bit for bit
    save_replicas(path, *others, extra={"epoch": 9})  # in place of the old one
    return parts[2].group.index, expected


@pytest.mark.parametrize(
    ("form", "replicas", "world"), [("bare", 2, 2), ("entropy", 2, 2), ("ddp", 2, 4), ("fsdp", 2, 4)]
)
def test_the_same_number_of_replicas_goes_on_bit_for_bit(ranks, tmp_path, form, replicas, world):
    results = ranks(save_and_go_on, world, str(tmp_path / "checkpoint"), form, replicas)
    if form != "bare":
        return
    by_replica = dict(results)
    mean = np.mean([by_replica[a] for a in range(2)], axis=0)
    for message, weights, calls in ranks(load_on_three, 3, str(tmp_path / "checkpoint")):
        assert "holds 2 replicas and there are 3 here" in message[0] and "from_barycenter=True" in message[0]
        assert "all 3 here start from their barycenter" in message[1]
        np.testing.assert_allclose(weights[:-1], mean[:-1], rtol=1e-12)  # the last is a counter of batch norm
        assert calls == 9
    file = next((tmp_path / "checkpoint").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert all(f"{file.name} is damaged" in message for message in ranks(load_damaged, 2, str(tmp_path / "checkpoint")))


def load_on_three(path):
    parts = make("bare", 3, seed=50)
    messages = []
    try:
        load_replicas(path, *parts)
    except ValueError as error:
        messages.append(str(error))
    load_replicas(path, *parts, from_barycenter=True, say=messages.append)
    weights = flat(parts[0])
    train(*parts, 9, 11)
    return messages, weights, 9


def load_damaged(path):
    try:
        load_replicas(path, *make("bare", 2, seed=50))
    except DamagedState as error:
        return str(error)
