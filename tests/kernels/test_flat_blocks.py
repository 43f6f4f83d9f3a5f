"""Blocks cover every element of every tensor once, in views of the tensors themselves."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wideflat.kernels.flat_blocks import alike, cache_blocks, laid_out_like


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


def test_what_lies_alike_has_one_type_one_shape_and_one_order():
    dense = torch.zeros(2, 3, 4, 5)
    assert alike(dense, torch.ones(2, 3, 4, 5))
    last = dense.to(memory_format=torch.channels_last)
    assert alike(last, torch.ones_like(last))
    others = [last, dense.double(), dense[:1], torch.zeros(2, 3, 4, 6)[..., :5], torch.zeros(1).expand(2, 3, 4, 5)]
    assert not any(alike(dense, other) for other in others)
    assert not alike(torch.zeros(6)[::2], torch.zeros(6)[::2])  # gaps


def test_laid_out_like_copies_only_what_lies_otherwise():
    a = torch.randn(2, 3)
    assert laid_out_like(a, (3, 1)) is a
    other = laid_out_like(a, (1, 2))
    assert other.stride() == (1, 2)
    assert torch.equal(other, a)
