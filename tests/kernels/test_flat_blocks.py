"""Blocks cover every element of every tensor once, in views of the tensors themselves."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wideflat.kernels import flat_blocks as module
from wideflat.kernels.flat_blocks import FlatBlocks, cache_blocks


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6),
    size=st.integers(1, 12),
    doubles=st.sets(st.integers(0, 5)),
    turned=st.sets(st.integers(0, 5)),
)
def test_every_element_once(shapes, size, doubles, turned):
    def tensors():
        made = [
            torch.zeros(shape, dtype=torch.float64 if i in doubles else torch.float32) for i, shape in enumerate(shapes)
        ]
        return [t.transpose(0, -1) if i in turned and t.dim() > 1 else t for i, t in enumerate(made)]

    first, second = tensors(), tensors()
    for a, b in cache_blocks(first, second, size=size):
        assert len(a) == len(b)
        assert len({t.dtype for t in a}) == 1
        assert sum(t.numel() for t in a[:-1]) < size  # closed as soon as it is full
        for piece, other in zip(a, b, strict=True):
            assert piece.shape == other.shape
            piece += 1
            other += 2
    assert all((t == 1).all() for t in first)  # every element once
    assert all((t == 2).all() for t in second)


def test_tensors_that_lie_differently_in_memory_are_not_cut():
    a, b = torch.zeros(6, 4), torch.zeros(4, 6).t()
    assert [[t.shape for t in pieces] for pieces, _ in cache_blocks([a], [b], size=5)] == [[(6, 4)]]
    assert len(list(cache_blocks([b], [torch.zeros(4, 6).t()], size=5))) == 5
    assert list(cache_blocks([], [])) == []


@pytest.fixture
def few_elements(monkeypatch):
    """Pieces of a few elements, so that small tensors are cut and gathered."""
    for name, value in (("PIECE", 9), ("GATHERED", 8), ("SMALL", 5)):
        monkeypatch.setattr(module, name, value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6),
    doubles=st.sets(st.integers(0, 5)),
    turned=st.sets(st.integers(0, 5)),
    gaps=st.sets(st.integers(0, 5)),
    turned_gradients=st.sets(st.integers(0, 5)),
)
def test_flat_blocks_reach_every_element_once(few_elements, shapes, doubles, turned, gaps, turned_gradients):
    def tensors(turned, gaps=()):
        made = []
        for i, shape in enumerate(shapes):
            t = torch.zeros([*shape, 2] if i in gaps else shape, dtype=torch.float64 if i in doubles else torch.float32)
            t = t[..., 0] if i in gaps else t
            made.append(t.transpose(0, -1).contiguous().transpose(0, -1) if i in turned and t.dim() > 1 else t)
        return made

    first, second, gradients = tensors(turned, gaps), tensors(turned), tensors(turned_gradients)
    offsets, place = [], 0
    for i, gradient in enumerate(gradients):
        place += 3 * (i % 2)
        offsets.append(place)
        gradient.copy_(place + torch.arange(gradient.numel()).view(gradient.shape))
        place += gradient.numel()
    blocks = FlatBlocks(first, second, offsets=offsets)
    seen = []
    for _ in range(2):
        for block in blocks(gradients, changed=[0]):
            a, b, g = block.tensors
            assert len({t.dtype for t in a + b + g}) == 1
            for x, y, z in zip(a, b, g, strict=True):
                assert x.shape == y.shape == z.shape
                x += z + 1
            for part, place in zip(block.parts(0), block.places, strict=True):
                seen += range(place, place + part.numel())
    assert blocks.still_of(first, second, offsets=offsets)
    for x, y, z in zip(first, second, gradients, strict=True):
        assert torch.equal(x, 2 * (z + 1))
        assert not y.any()
    assert sorted(seen) == sorted(2 * [o + j for o, t in zip(offsets, first, strict=True) for j in range(t.numel())])


def test_flat_blocks_notice_other_memory():
    a, b = [torch.nn.Parameter(torch.zeros(3))], [torch.zeros(3)]
    blocks = FlatBlocks(a, b, offsets=[0])
    assert blocks.still_of(a, b, offsets=[0])
    assert not blocks.still_of(a, [torch.zeros(3)], offsets=[0])
    assert not blocks.still_of(a, b, offsets=[1])
    a[0].data = torch.zeros(3)
    assert not blocks.still_of(a, b, offsets=[0])
    assert list(FlatBlocks([], [], offsets=[])(changed=[0])) == []
