"""Operations that serve every phase of the cycle; the steps made of them are in tests/test_captured.py."""

import pytest
import torch

from wideflat.kernels.branchless import choose_, memory_order, phase_of, scattered


def test_phases_of_a_cycle():
    phases = [[int(mask) for mask in phase_of(torch.tensor(position), 3)] for position in range(3)]
    assert phases == [[1, 0], [0, 0], [0, 1]]
    assert [int(mask) for mask in phase_of(torch.tensor(0), 1)] == [1, 1]


@pytest.mark.parametrize("mask", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_choice_is_exact(mask, dtype):
    old, new = ([torch.randn(100, dtype=torch.float64).to(dtype)] for _ in range(2))
    expected = (new if mask else old)[0].clone()
    choose_(old, new, torch.tensor(mask))
    assert torch.equal(old[0], expected)


@pytest.mark.parametrize(
    "tensor", [torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.empty(3, 4).t()]
)
def test_numbers_in_the_order_of_memory(tensor):
    numbers = torch.arange(tensor.numel())
    found = torch.empty(tensor.numel(), dtype=torch.int64).as_strided(tensor.shape, tensor.stride())
    found.copy_(memory_order(numbers, tensor))
    assert torch.equal(found.as_strided((tensor.numel(),), (1,)), numbers)


def test_numbers_for_tensors_that_follow_each_other():
    first, second = scattered(torch.arange(5), [torch.empty(2), torch.empty(3, 1)])
    assert (first.tolist(), second.tolist()) == ([0, 1], [[2], [3], [4]])
