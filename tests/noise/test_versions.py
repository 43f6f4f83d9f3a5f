"""Weights that are moved behind torch's back have versions of their own, and their old ones afterwards."""

import pytest
import torch
from torch import nn

from wideflat.noise.versions import FIRST, Versions


class Merged(nn.Module):
    """Keeps twice its weight as long as the weight has its version."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.kept = None

    def forward(self):
        if self.kept is None or self.kept[0] != self.weight._version:
            self.kept = (self.weight._version, 2 * self.weight.detach())
        return self.kept[1]


def test_a_network_that_keeps_something_by_version_sees_every_point():
    model = Merged()
    model()
    kept = model.weight.data
    versions = Versions([model.weight])
    for value in (3.0, 5.0):
        model.weight.data = torch.full((2,), value)
        versions.advance()
        assert model().tolist() == [2 * value] * 2
    model.weight.data = kept
    versions.restore()
    assert model().tolist() == [2, 2]


def test_no_version_comes_twice_nor_is_one_that_training_reaches():
    a, b = torch.zeros(1), torch.zeros(1)
    first, second = Versions([a]), Versions([b])
    seen = []
    for versions, tensor in ((first, a), (second, b), (first, a), (second, b)):
        versions.advance()
        seen.append(tensor._version)
    assert len(set(seen)) == 4 and min(version % 2**32 for version in seen) >= FIRST


def test_a_graph_from_before_can_still_be_differentiated():
    w = nn.Parameter(torch.tensor([3.0]))
    loss = (w * w).sum()
    versions = Versions([w])
    versions.advance()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    versions.restore()
    loss.backward()
    assert w.grad.tolist() == [6]


def test_tensors_without_a_version_are_left_out():
    with torch.inference_mode():
        none = torch.zeros(1)
    w = torch.zeros(1)
    before = w._version
    versions = Versions([none, w])
    versions.advance()
    assert w._version != before
    versions.restore()
    assert w._version == before
