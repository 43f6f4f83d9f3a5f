"""Lists of tensors as one: equal to what is done tensor by tensor, whatever their layouts, types and devices."""

import pytest
import torch

from wideflat.kernels.together import chosen, clones, inner_product, multiply_, put_, times


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator) for shape in ((3, 4), (), (0,), (2, 3, 4, 5))]
    found[3] = found[3].to(memory_format=torch.channels_last)
    return [*found, torch.randn(6, 2, generator=generator)[::2], torch.randn(5, generator=generator).double()]


@pytest.mark.parametrize("condition", [True, False])
def test_a_choice_of_lists_in_other_layouts(condition):
    new, old = tensors(0), [tensor.contiguous() for tensor in tensors(1)]
    found = chosen(torch.tensor(condition), new, old)
    for a, b in zip(found, new if condition else old, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


def test_what_is_not_chosen_may_be_infinite():
    (found,) = chosen(torch.tensor(False), [torch.full((2,), torch.nan)], None)
    assert torch.equal(found, torch.zeros(2))


def test_sums_of_products_are_those_of_the_tensors():
    params, x, y = tensors(2), tensors(3), tensors(4)
    found = inner_product(dict(zip(params, x, strict=True)), dict(zip(params, y, strict=True)))
    assert found.item() == pytest.approx(sum((a * b).sum().item() for a, b in zip(x, y, strict=True)), rel=1e-5)


def test_copies_products_and_values():
    x = tensors(5)
    kept = clones(x)
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(kept, x, strict=True) if a.numel())
    two = torch.tensor(2.0)
    for a, b in zip(times(x, [two] * len(x)), x, strict=True):
        assert torch.equal(a, 2 * b) and a.dtype == b.dtype
    multiply_(x, two)
    assert all(torch.equal(a, 2 * b) for a, b in zip(x, kept, strict=True))
    put_(x, kept)
    assert all(torch.equal(a, b) for a, b in zip(x, kept, strict=True))
