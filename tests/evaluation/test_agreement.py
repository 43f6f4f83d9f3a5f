"""Equal to rounding: the bound from both sides, for each precision and for numbers that are none."""

import collections

import pytest
import torch

from wideflat.evaluation.agreement import SLACK, agree, tensors

PRECISIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("slack", [256.0, SLACK])
def test_the_bound_is_so_many_units_of_the_largest_number(dtype, slack):
    """Its fourth root in half precision. Powers of two, so that both sides of the bound are there exactly."""
    eps = torch.finfo(dtype).eps
    units = slack if eps < 1e-5 else slack**0.25
    a = torch.tensor([0.0, 2.0], dtype=dtype)
    for share, expected in ((0.9, True), (1.1, False)):
        b = torch.tensor([share * 2 * units * eps, 2.0], dtype=dtype)
        assert agree(a, b, slack=slack) is expected, share
        assert agree(b, a, slack=slack) is expected


def test_small_numbers_are_measured_by_the_largest_of_the_tree():
    small, large = torch.tensor([1e-6]), torch.tensor([1e3])
    assert not agree(small, 2 * small)
    assert agree((small, large), (2 * small, large))
    assert agree(small, 2 * small, scale=large)


def test_what_is_no_number_must_be_none_in_both():
    gap = torch.tensor([float("nan"), float("inf"), 1.0])
    assert agree(gap, gap.clone()) and not agree(gap, -gap) and not agree(gap, torch.tensor([0.0, float("inf"), 1.0]))
    assert not agree(gap, gap + torch.tensor([0, 0, 1e-2]))  # what is infinite does not widen the bound
    z = torch.tensor([1 + 1j, 2.0])
    assert agree(z, z + 1e-6j) and not agree(z, z + 1e-2j)


def test_whole_numbers_are_equal_or_not_and_kinds_are_told_apart():
    k = torch.tensor([10**9, 1])
    assert agree(k, k.clone()) and not agree(k, k + 1)
    one = torch.ones(3)
    assert not agree(one, one.double()) and not agree(one, one[:2]) and not agree([one], [one, one])
    assert agree(torch.empty(0), torch.empty(0))


def test_tensors_of_any_nesting():
    class Answer(collections.UserDict):
        pass

    a, b = torch.ones(1), torch.zeros(2)
    assert [id(t) for t in tensors({"x": a, "y": ["no tensor", (b, 3)]})] == [id(a), id(b)]
    assert [id(t) for t in tensors(Answer(logits=a))] == [id(a)]
    assert agree(Answer(logits=a), {"logits": a})


def test_agreement_is_to_rounding_and_knows_infinities():
    a = torch.tensor([1.0, float("nan"), float("inf"), 1e-3])
    assert agree(a, a + 1e-6) and not agree(a, a + 1e-3) and not agree(a, a[:3])
    assert not agree(a.double(), a.double() + 1e-9) and agree(a.bfloat16(), a.bfloat16() + 1e-2)
    assert agree({"x": a}, {"x": a}) and not agree({"x": a}, {"x": a, "y": a})


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_agreement_of_numbers_that_are_none_and_of_no_numbers(dtype):
    nothing, some = torch.zeros(0, dtype=dtype), torch.ones(3, dtype=dtype)
    assert agree(nothing, nothing) and agree(some, some.clone()) and not agree(some, 2 * some)
    if dtype != torch.int64:
        gap = torch.tensor([1.0, torch.nan, torch.inf], dtype=dtype)
        assert agree(gap, gap.clone()) and not agree(gap, some) and not agree(some, gap)
        assert agree(gap, gap + torch.tensor([1e-6, 0, 0], dtype=dtype))
        assert not agree(gap, gap + torch.tensor([1e-2, 0, 0], dtype=dtype))
