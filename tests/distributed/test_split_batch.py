"""A mini-batch divided over ranks has the gradient, the loss and the batch-norm statistics of the whole one."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from wideflat.distributed.split_batch import SplitBatch


def network():
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)]
    head = [nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3)]
    return nn.Sequential(*layers, *head).double()


def batches(size):
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        yield (
            torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (size,), generator=generator),
        )


def whole(size):
    model, losses = network(), []
    for x, y in batches(size):
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # the gradients of both batches add up
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters()], list(model.buffers())


def divided(size):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model, losses, parts = network(), [], []
    split = SplitBatch(model, mesh)
    for x, y in batches(size):
        x, y = split.share(x, y)
        loss = split.loss(split(x), y)
        loss.backward()
        losses.append(split.mean(loss))
        parts.append(len(y))
    model.eval()
    with torch.no_grad():
        split(next(batches(1))[0])  # evaluation uses the running statistics and asks nobody
    return losses, [p.grad for p in model.parameters()], list(model.buffers()), parts


@pytest.mark.parametrize(("ranks_", "size", "parts"), [(2, 8, [4, 4]), (4, 10, [2, 3, 2, 3]), (4, 3, [0, 1, 1, 1])])
def test_the_parts_make_up_the_whole(ranks, ranks_, size, parts):
    expected = whole(size)
    results = ranks(divided, ranks_, size)
    assert [result[3][0] for result in results] == parts
    for result in results:
        for own, right in zip(result[:3], expected, strict=True):
            for mine, theirs in zip(own, right, strict=True):
                np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-9, atol=1e-12)


def too_few():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    split = SplitBatch(nn.Sequential(nn.BatchNorm1d(2)), mesh)
    x, _ = split.share(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))
    split(x)


def test_batch_norm_of_one_value_is_refused(ranks):
    for kind, message in ranks(too_few, 2, errors=True):
        assert kind == "ValueError" and "more than one value a channel in training, got 1" in message
