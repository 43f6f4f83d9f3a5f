"""The means by which a step is taken, as Entropy-SGD asks for them."""

import pytest
import torch

import wideflat
from wideflat.kernels.blocks import BlockLists
from wideflat.kernels.entropy_sgd import KernelLists
from wideflat.kernels.library import kernel_is_there


def means(dtype=torch.float32, **settings):
    w = torch.nn.Parameter(torch.randn(40).to(dtype))
    opt = wideflat.EntropySGD([w], lr=0.5, **settings)
    w.grad = torch.ones_like(w)
    opt.step()
    return {type(lists) for lists in opt._kernels.values()}


def test_the_kernel_where_it_fits_blocks_where_it_does_not_and_neither_if_refused():
    assert means() == ({KernelLists} if kernel_is_there(torch.zeros(1)) else {BlockLists})
    assert means(torch.bfloat16) == {BlockLists}
    assert means(fused=False) == set()


def test_a_kernel_that_is_asked_for_and_does_not_fit_is_refused():
    with pytest.raises(RuntimeError, match="fused=True"):
        means(inner_state="keep", fused=True)
