"""Measures on a device without float64 (MPS) put none there.

There is no such device here. One is played on the CPU: the weights and the data are on it, and so is whatever is
computed from what is on it, until it is fetched by `.cpu()`.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.energy.test_no_surprises import MEASURES, Net
from wideflat.kernels import float64


class Played(TorchDispatchMode):
    """Knows which memory is on the device, and remembers what makes float64 there."""

    def __init__(self, *tensors):
        super().__init__()
        self.memory, self.forbidden = {}, []
        for tensor in tensors:
            self.put(tensor)

    def put(self, tensor):
        storage = tensor.untyped_storage()
        self.memory[storage._cdata] = storage  # held, so that no other memory gets its number

    def has(self, tensor):
        return tensor.untyped_storage()._cdata in self.memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        if any(self.has(tensor) for tensor in given):
            for made in tree_leaves(result):
                if isinstance(made, torch.Tensor):
                    self.put(made)
                    if made.dtype == torch.float64:
                        self.forbidden.append(func.overloadpacket._qualified_op_name)
        return result


def fetched(tensor):
    """A copy that is not on the device, with its graph."""

    class Fetch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.detach().numpy().copy())  # torch's own copy would be seen as made there

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Fetch.apply(tensor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MEASURES)
def test_no_measure_puts_float64_on_a_device_that_has_none(name, monkeypatch):
    monkeypatch.setattr(float64, "has_float64", lambda device: False)
    monkeypatch.setattr("wideflat.entropy.gaussian_hmc.has_float64", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "cpu", fetched)
    torch.manual_seed(0)
    model, x, y = Net(2).eval(), torch.randn(64, 6), torch.randint(3, (64,))
    with Played(x, y, *model.parameters()) as played:
        MEASURES[name](model, (x, y))
    assert played.forbidden == []


def test_the_played_device_sees_float64():
    x = torch.ones(3)
    with Played(x) as played:
        (x * 2).double()
        (x * 2).sum(dtype=torch.float64)
        torch.ones(3).double()
    assert played.forbidden == ["aten::_to_copy", "aten::sum"]
