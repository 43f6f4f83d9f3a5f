"""Blocks cover every element of every tensor once, in views of the tensors themselves."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wideflat.cache_blocks import cache_blocks


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
    offsets = [1000 * i for i in range(len(first))]
    seen = []
    for (a, b), places in cache_blocks(first, second, offsets=offsets, size=size):
        assert len(a) == len(b) == len(places)
        assert len({t.dtype for t in a}) == 1
        assert sum(t.numel() for t in a[:-1]) < size  # closed as soon as it is full
        for piece, other, place in zip(a, b, places, strict=True):
            assert piece.shape == other.shape
            piece += 1
            other += 2
            seen += range(place, place + piece.numel())
    assert all((t == 1).all() for t in first)
    assert all((t == 2).all() for t in second)
    assert sorted(seen) == [1000 * i + j for i, t in enumerate(first) for j in range(t.numel())]


def test_tensors_that_lie_differently_in_memory_are_not_cut():
    a, b = torch.zeros(6, 4), torch.zeros(4, 6).t()
    assert [[t.shape for t in pieces] for (pieces, _), _ in cache_blocks([a], [b], size=5)] == [[(6, 4)]]
    assert len(list(cache_blocks([b], [torch.zeros(4, 6).t()], size=5))) == 5
    assert list(cache_blocks([], [])) == []
