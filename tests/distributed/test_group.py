"""Replicas in one process: their mean, written and measured block by block, as it is defined."""

import pytest
import torch
from torch import nn

import wideflat
from wideflat.distributed.group import InProcess, mean, set_to_mean, square_distance


@pytest.fixture
def replicas():
    torch.manual_seed(0)
    return wideflat.Replicas(lambda: nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double(), 3)


def stacked(replicas):
    return torch.stack([nn.utils.parameters_to_vector(model.parameters()).detach() for model in replicas])


def test_distances_are_half_the_squares_to_the_barycenter(replicas):
    w = stacked(replicas)
    expected = (w - w.mean(0)).square().sum(1) / 2
    torch.testing.assert_close(InProcess(replicas).distances(), expected)
    assert InProcess(replicas).total(expected) == expected.sum()


def test_blocks_hold_every_weight_once_with_its_mean(replicas):
    group = InProcess(replicas)
    gradients = [torch.full_like(p, 3.0) for p in group.members[0]]
    seen, others, centers = [[], [], []], [], []
    for pieces, (g,), w_bar in group.blocks([[p.detach() for p in w] for w in group.members], gradients):
        for a, w in enumerate(pieces):
            seen[a] += [piece.flatten() for piece in w]
        others += [piece.flatten() for piece in g]
        centers += [piece.flatten() for piece in w_bar]
    w = stacked(replicas)
    assert torch.equal(torch.stack([torch.cat(each).sort().values for each in seen]), w.sort(1).values)
    torch.testing.assert_close(torch.cat(centers).sort().values, w.mean(0).sort().values)
    assert torch.cat(others).tolist() == [3.0] * w.shape[1]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_mean_of_lists(count):
    torch.manual_seed(count)
    lists = [[torch.randn(3, 4), torch.randn(())] for _ in range(count)]
    target = [torch.empty(3, 4), torch.empty(())]
    before = [tensor.clone() for tensor in lists[0]]
    set_to_mean(target, lists)
    for out, *pieces in zip(target, *lists, strict=True):
        torch.testing.assert_close(out, torch.stack(pieces).mean(0))
    assert all(map(torch.equal, lists[0], before)) and mean(lists)[0] is not lists[0][0]


def test_distances_are_summed_in_double_precision():
    """4,000 tensors of one element each: their squares, 1 + 2^-20 and so on, are not rounded while they are summed."""
    w = [torch.full((1,), 1.0 + 2**-10) for _ in range(4000)]
    found = square_distance(w, [torch.zeros(1) for _ in w])
    assert found.dtype == torch.float64 and found.item() == pytest.approx(4000 * (1 + 2**-10) ** 2, rel=1e-7)
