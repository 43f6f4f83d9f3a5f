"""Max pooling by maxima of views against torch's own, number by number, or left to it."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wideflat.landscape.pooling import FastPooling, max_pool2d


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_every_window_and_step_is_that_of_torch(order):
    torch.manual_seed(0)
    for kernel, stride, (h, w) in itertools.product(
        [2, 3, (2, 3), (1, 2), [2]], [None, 1, 2, 3, (3, 1), []], [(7, 8), (3, 3), (6, 5)]
    ):
        x = torch.randn(2, 3, h, w).contiguous(memory_format=order)
        x[0, 0, 0, 0], x[1, 2, 1, 1], x[0, 1] = float("nan"), float("inf"), -float("inf")
        found, expected = max_pool2d(x, kernel, stride), F.max_pool2d(x, kernel, stride)
        assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))
        assert found.is_contiguous(memory_format=order)
        assert torch.equal(max_pool2d(x[1], kernel, stride), F.max_pool2d(x[1], kernel, stride))


def test_what_it_does_not_do_is_left_to_torch():
    x = torch.randn(2, 3, 8, 8)
    options = [{"padding": 1}, {"dilation": 2}, {"ceil_mode": True}, {"return_indices": True}, {"kernel_size": 4}]
    with torch.no_grad(), FastPooling() as mode:
        for more in options:
            arguments = {"kernel_size": 2, **more}
            assert max_pool2d(x, **arguments) is None
            assert len(F.max_pool2d(x, **arguments)) == 2
        with pytest.raises(RuntimeError):
            F.max_pool2d(x[..., :2, :2], 3)
        assert max_pool2d((20 * x).int(), 2) is None and not mode.seen
        assert torch.equal(nn.MaxPool2d(2)(x), torch.max_pool2d(x, 2)) and mode.seen


def test_ties_that_are_differentiated_have_the_gradient_of_torch():
    x = torch.zeros(1, 1, 2, 2, requires_grad=True)
    with FastPooling() as mode:
        F.max_pool2d(x, 2).sum().backward()
        assert torch.func.grad(lambda y: F.max_pool2d(y, 2).sum())(x.detach()).tolist() == x.grad.tolist()
    assert x.grad.tolist() == [[[[1.0, 0.0], [0.0, 0.0]]]] and not mode.seen
