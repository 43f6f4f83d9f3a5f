"""What a measure asks of a device in its inner loops: how often the host waits for it.

A result has to come to the host, so that the host waits for every evaluation of a batch: to look at its labels and to
take its value. It must not wait more often than that, nor for every weight tensor.
"""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import wideflat
from wideflat.kernels.float64 import doubled

#: Operations whose answer the host waits for.
WAITING = {"aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.item", "aten.nonzero"}

MEASURES = {
    "local_energy": lambda model, data: wideflat.local_energy(model, data, [0.1, 0.2], max_passes=4, batch_size=32),
    "layer_profiles": lambda model, data: wideflat.layer_profiles(model, data, [0.1], max_passes=2, batch_size=32),
    "worst_case": lambda model, data: wideflat.worst_case(model, data, [0.1]),
    "curvature": lambda model, data: wideflat.curvature(model, data),
    "spectrum": lambda model, data: wideflat.spectrum(model, data),
    "free_entropy": lambda model, data: wideflat.free_entropy(model, data, [0.1], seed=0),
    "shift_profile": lambda model, data: wideflat.shift_profile(model, data, prune=[0.3]),
    "slices": lambda model, data: wideflat.slices(model, data),
}
#: Waits for one evaluation of a batch: smallest and largest label, and the value. The sampler of the free entropy
#: accepts or not, and takes more: the energy, two changes of it, and the answer.
MOST = {"free_entropy": 7}


class Watch(TorchDispatchMode):
    """Counts what the host waits for."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.replace("::", ".")
        self.waits[name] += name in WAITING
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Counts its evaluations."""

    def __init__(self, layers):
        super().__init__()
        self.evaluations = 0
        sizes = [6] + [8] * (layers - 1) + [3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x):
        self.evaluations += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def measured(name, examples, layers=2):
    torch.manual_seed(0)
    model, generator = Net(layers).eval(), torch.Generator().manual_seed(1)
    data = torch.randn(examples, 6, generator=generator), torch.randint(3, (examples,), generator=generator)
    with Watch() as watch:
        MEASURES[name](model, data)
    return watch.waits.total(), model.evaluations


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MEASURES)
def test_the_host_waits_for_evaluations_alone(name, capsys):
    """More data are more evaluations; each adds no more waits than it has results."""
    (few, some), (many, more) = measured(name, 64), measured(name, 512)
    assert many - few <= MOST.get(name, 3) * max(more - some, 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["local_energy", "slices", "worst_case", "shift_profile"])
def test_the_host_does_not_wait_for_every_tensor_at_every_evaluation(name):
    """Once for a tensor and a measurement it does: what was measured is put back and looked at."""
    (few, some), (many, more) = measured(name, 256), measured(name, 256, layers=8)
    assert many - few <= 3 * max(more - some, 0) + 12 * 2 * 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float64_where_the_device_has_it(dtype):
    x = torch.randn(3).to(dtype)
    assert torch.equal(doubled(x), x.double())
