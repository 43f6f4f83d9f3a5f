"""What a measure asks of a device in its inner loops: how often the host waits for it, on a device that is played.

A result has to come to the host: once for all evaluations of a pass, of a block (`slices`) or of a trajectory of the
sampler. No evaluation waits by itself, for its value, its labels or a weight tensor.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wideflat
from tests.played_device import DEVICE, played
from wideflat.volume import walks

QUIET = {"progress": False}
MEASURES = {
    "local_energy": lambda model, data, **more: wideflat.local_energy(
        model, data, [0.1, 0.2], max_passes=4, **QUIET, **more
    ),
    "layer_profiles": lambda model, data, **more: wideflat.layer_profiles(
        model, data, [0.1], max_passes=2, **QUIET, **more
    ),
    "worst_case": lambda model, data, **more: wideflat.worst_case(model, data, [0.1], steps=3, **QUIET, **more),
    "curvature": lambda model, data, **more: wideflat.curvature(model, data, top=1, probes=8, **QUIET, **more),
    "spectrum": lambda model, data, **more: wideflat.spectrum(model, data, steps=4, probes=2, **QUIET, **more),
    "free_entropy": lambda model, data, **more: wideflat.free_entropy(
        model, data, [0.3], samples=4, burn=2, points=32, chains=1, seed=0, **QUIET, **more
    ),
    "shift_profile": lambda model, data, **more: wideflat.shift_profile(
        model, data, prune=[0.3], max_passes=2, **QUIET, **more
    ),
    "slices": lambda model, data, **more: wideflat.slices(
        model, data, positions=[-1, -0.5, 0, 0.5, 1], **QUIET, **more
    ),
}
#: Those whose results come once a pass, however many blocks there are; of the others the number of passes is known
#: when they are done.
ONCE_A_PASS = ["local_energy", "layer_profiles", "worst_case", "shift_profile"]
#: Waits before and after the passes: settings are looked at, plans compared, weights put back. A profile of two layers
#: is two measurements.
AROUND = 80


class Net(nn.Module):
    """Counts evaluations, for all networks: a count of its own would be put back before every one."""

    evaluations = 0

    def __init__(self, layers=2, last=None, outputs=3):
        super().__init__()
        self.last = last
        sizes = [6] + [8] * (layers - 1) + [outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x):
        Net.evaluations += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.last is None else self.last(x)


def example(targets=None, **net):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(256, 6, generator=generator), torch.randint(3, (256,), generator=generator)
    return Net(**net).eval(), (x, y if targets is None else targets(y))


def measured(measure, blocks, data_there=True, has_float64=True, **case):
    """Waits and evaluations on the played device."""
    model, data = example(**case)
    before = Net.evaluations
    with played(has_float64) as device:
        model.to(DEVICE)
        data = tuple(tensor.to(DEVICE) for tensor in data) if data_there else data
        measure(model, data, batch_size=256 // blocks)
    return device.waits, Net.evaluations - before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_float64", [True, False])
@pytest.mark.parametrize("name", ONCE_A_PASS)
def test_no_evaluation_waits(name, has_float64):
    few, many = (measured(MEASURES[name], blocks, has_float64=has_float64) for blocks in (2, 16))
    assert many[1] > few[1] and many[0].total() == few[0].total() < AROUND


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["curvature", "spectrum"])
def test_a_product_waits_once(name):
    """After a product with the Hessian, which is a pass over the data, it is looked at how large it is."""
    waits, evaluations = measured(MEASURES[name], 16)
    assert waits.total() <= evaluations / 16 + AROUND


@pytest.mark.filterwarnings("ignore")
def test_slices_wait_once_a_block():
    waits, evaluations = measured(MEASURES["slices"], 16)
    assert evaluations > 16 * 25 and waits.total() <= 16 + AROUND


@pytest.mark.filterwarnings("ignore")
def test_steps_of_an_ascent_do_not_wait_for_lengths():
    """A step more is one pass more, and one wait more for its value; without float64 as well."""

    def waits(steps, has_float64):
        def measure(model, data, **more):
            wideflat.worst_case(model, data, [0.1], steps=steps, **QUIET, **more)

        return measured(measure, 4, has_float64=has_float64)[0].total()

    assert waits(9, True) - waits(5, True) == waits(9, False) - waits(5, False) == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_float64", [True, False])
def test_the_sampler_waits_once_a_trajectory(monkeypatch, has_float64):
    """It accepts or not, and its step is adapted to what was found."""
    trajectories, advance = [], walks.advance

    def counted(chain, energy):
        trajectories.append(1)
        return advance(chain, energy)

    monkeypatch.setattr(walks, "advance", counted)
    waits, evaluations = measured(MEASURES["free_entropy"], 4, data_there=False, has_float64=has_float64)
    assert evaluations > 4 * len(trajectories) > 0
    assert waits.total() <= len(trajectories) + 32 / walks.POINTS_AT_ONCE + AROUND


LABELS = {
    "on the CPU": {"data_there": False},
    "some are left out, on the CPU": {
        "data_there": False,
        "targets": lambda y: torch.where(torch.arange(256) % 5 == 0, -100, y),
    },
    "some are left out": {"targets": lambda y: torch.where(torch.arange(256) % 5 == 0, -100, y)},
    "floating": {"targets": torch.Tensor.float},
    "one-hot": {"targets": lambda y: nn.functional.one_hot(y, 3)},
    "probabilities": {"last": nn.Softmax(1)},
    "one output": {"outputs": 1, "targets": lambda y: y.clamp_max(1)},
    "one probability": {"outputs": 1, "last": nn.Sigmoid(), "targets": lambda y: y.clamp_max(1)},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("metric", ["error", "loss"])
@pytest.mark.parametrize("case", LABELS)
def test_no_evaluation_waits_for_labels(case, metric):
    def measure(model, data, **more):
        wideflat.local_energy(model, data, [0.1, 0.2], noise="batch", metric=metric, max_passes=2, **QUIET, **more)

    few, many = (measured(measure, blocks, **LABELS[case]) for blocks in (2, 16))
    assert many[1] > few[1] and many[0].total() == few[0].total()


@pytest.mark.filterwarnings("ignore")
def test_nor_for_those_of_a_loader():
    waits = []
    for batch_size in (128, 16):
        model, data = example()
        with played() as device:
            loader = DataLoader(TensorDataset(*data), batch_size)
            wideflat.local_energy(model.to(DEVICE), loader, [0.1], metric="normalized loss", max_passes=2, **QUIET)
        waits.append(device.waits.total())
    assert waits[0] == waits[1]


@pytest.mark.filterwarnings("ignore")
def test_what_contradicts_the_first_batch_is_refused_there_too():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            probabilities = (self.weight * x).softmax(1)
            return torch.where(x[:, :1] > 0, 2 * probabilities, probabilities)

    x = torch.cat([-torch.rand(32, 3), torch.rand(32, 3)])
    batches = [(x[:32], torch.zeros(32).long()), (x[32:], torch.zeros(32).long())]
    with played(), pytest.raises(ValueError, match="were probabilities"):
        wideflat.curvature(Sometimes().to(DEVICE), batches, metric="loss", top=1, probes=0, **QUIET)


@pytest.mark.filterwarnings("ignore")
def test_the_host_does_not_wait_for_every_tensor():
    few, many = (measured(MEASURES["local_energy"], 2, layers=layers)[0].total() for layers in (2, 8))
    assert few == many


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_float64", [True, False])
@pytest.mark.parametrize("name", MEASURES)
def test_the_result_is_that_of_the_cpu(name, has_float64):
    """No more than rounding lies between them, or, where the noise of the device is another, their error bars."""
    model, data = example()
    more = {"batch_size": 64, **({"noise": False} if name == "shift_profile" else {})}
    here = MEASURES[name](model, data, **more)
    with played(has_float64):
        there = MEASURES[name](model.to(DEVICE), tuple(tensor.to(DEVICE) for tensor in data), **more)
    for (ours, bar), (theirs, _) in zip(numbers(here), numbers(there), strict=True):
        slack = 6 * bar if name in ("local_energy", "layer_profiles") else 0.0
        assert np.all(np.abs(theirs - ours) <= slack + 1e-3 * np.abs(ours) + 1e-4)


def numbers(result):
    """The results of a measure, with error bars where they have any."""
    if isinstance(result, dict):
        return [number for part in result.values() for number in numbers(part)]
    found = [(result.mean, result.stderr)] if hasattr(result, "mean") and hasattr(result, "stderr") else []
    names = ("eigenvalues", "nodes", "log_z", "baseline")
    return found + [(np.asarray(getattr(result, name)), 0.0) for name in names if hasattr(result, name)]
