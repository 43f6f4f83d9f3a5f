"""The fast path is held against the plain one, and what the plan did not foresee is noticed."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wideflat import local_energy
from wideflat.energy.block_energy import BlockEnergy
from wideflat.energy.request import Request, plan
from wideflat.energy.self_check import fast_path_differs
from wideflat.noise.uses import Unforeseen


def deviation(outputs, targets):
    d = (outputs - targets).square().mean(1)
    return d / (1 + d)


def differs(model, data, noise="batch", **options):
    defaults = {"metric": deviation, "batch_norm": "eval", "parameters": "all", "target_stderr": None}
    defaults |= {"max_passes": None, "seed": 0, "common_noise": True, "batch_size": None, "forward": None}
    settled = plan(Request(model, data, [0.4], noise, **{**defaults, "augment": None, "calibration": 64, **options}))
    energy = BlockEnergy(settled)
    with settled.evaluation.prepared():
        energy.prepare()
        return fast_path_differs(energy)


def data(*shape, outputs=3):
    g = torch.Generator().manual_seed(0)
    return torch.randn(24, *shape, generator=g), torch.randn(24, outputs, generator=g)


NETWORKS = {
    "linear": (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (6,)),
    "twice": (nn.Sequential(*[nn.Linear(6, 6)] * 2, nn.Linear(6, 3)), (6,)),
    "grouped": (nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)), (4, 6, 6)),
    "batch norm": (nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 3)), (2, 4)),
    "positions": (nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(25, 3)), (5, 4)),
    "embedding": (nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU(4), nn.Flatten(), nn.Linear(12, 3)), (4, 3)),
}


@pytest.mark.parametrize("common", [True, False], ids=["common noise", "noise of each sigma"])
@pytest.mark.parametrize("noise", ["batch", "example"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_right_passes(name, noise, common):
    """For noise of each example this is a test of its algebra: an example alone, with weights that have its noise."""
    torch.manual_seed(0)
    model, shape = NETWORKS[name]
    assert not differs(model, data(*shape), noise, common_noise=common)


def test_weights_that_are_read_behind_the_back_are_noticed():
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 3)
            self.view = self.a.weight.data.T

        def forward(self, x):
            return self.a(x) + x @ self.view

    model = Viewed()
    assert differs(model, data(6)) and differs(model, data(6), "example")
    profile = local_energy(model, data(6), [0.4], metric=deviation, progress=False)
    assert profile.conventions["noise"] == "batch"
    assert any(note.startswith("plain path") for note in profile.conventions["notes"])
    with pytest.raises(Unforeseen, match='use noise="batch"'):
        local_energy(model, data(6), [0.4], metric=deviation, noise="example", progress=False)


def test_a_folded_copy_that_is_not_one_is_noticed():
    side = nn.Conv1d(2, 4, 2)

    class Bypassed(nn.Module):
        """A function in it still calls a layer of the original, whatever its copy's weights are."""

        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.side, self.h = nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), side, nn.Linear(12, 3)
            self.function = lambda x: F.conv1d(x, side.weight.data, side.bias.data)

        def forward(self, x):
            return self.h((self.norm(self.conv(x)) + self.function(x)).flatten(1))

    assert differs(Bypassed().eval(), data(2, 4))


class Routed(nn.Module):
    """Examples below a threshold go to another expert; there is none in the first batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        low = x[:, 0] < -1
        out = x.new_zeros(len(x), 3)
        out[~low] = self.a(x[~low])
        if low.any():
            out[low] = self.b(x[low])
        return out


class Sometimes(nn.Module):
    """Writes into its input, but not into that of the first batch."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x.mul_(0.5) if (x[:, 0] < -1).any() else x)


@pytest.mark.parametrize("make", [Routed, Sometimes])
def test_what_only_later_batches_show_is_noticed_and_measured_with_care(make):
    torch.manual_seed(0)
    model = make()
    x = torch.randn(48, 6).clamp(min=-1)
    x[24::2, 0] = -2.0
    with torch.no_grad():
        y = model(x[:24].clone()), model(x[24:].clone())
    batches = [(x[:24], y[0]), (x[24:], y[1])]

    def fresh():
        return [(inputs.clone(), targets) for inputs, targets in batches]

    profile = local_energy(model, fresh(), [0.4], metric=deviation, max_passes=200, progress=False)
    assert profile.conventions["noise"] == "batch" and ("again with care" in str(profile)) == (make is Sometimes)
    g, found = torch.Generator().manual_seed(1), []
    with torch.no_grad():
        for _ in range(400):
            w = {name: p + 0.4 * torch.randn(p.shape, generator=g) * p for name, p in model.named_parameters()}
            parts = [deviation(torch.func.functional_call(model, w, (inputs,)), t).mean() for inputs, t in fresh()]
            found.append(float(sum(parts)) / 2)
    error = np.hypot(profile.stderr[0], np.std(found) / 20)
    assert abs(profile.mean[0] - np.mean(found)) < 4 * error < 0.2 * np.mean(found)
    with pytest.raises(Unforeseen):
        local_energy(model, fresh(), [0.4], metric=deviation, noise="example", progress=False)


def test_a_layer_that_sees_a_sequence_only_later_is_noticed():
    """Noise of each position would be wrong: positions share the weights."""
    model = nn.Linear(4, 3)
    batches = [(torch.randn(8, 4), torch.zeros(8, 3)), (torch.randn(8, 5, 4), torch.zeros(8, 3))]

    def forward(net, batch):
        out = net(batch[0])
        return (out.mean(1) if out.dim() == 3 else out), batch[1]

    assert "again with care" in str(
        local_energy(model, batches, [0.4], metric=deviation, forward=forward, progress=False)
    )
    with pytest.raises(Unforeseen, match="in a way in which it was not"):
        local_energy(model, batches, [0.4], metric=deviation, forward=forward, noise="example", progress=False)


def test_computed_first_layers_with_noise_of_each_example():
    """Temporary weights have ids that come again: nothing may be kept under them."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3))
    x, y = data(6)
    options = {"metric": deviation, "max_passes": 60, "progress": False}
    ours = local_energy(model, (x, y), [0.1, 0.5, 2.0], noise="example", **options)
    theirs = local_energy(model, (x, y), [0.1, 0.5, 2.0], noise="batch", **options)
    assert (np.abs(ours.mean - theirs.mean) < 4 * np.hypot(ours.stderr, theirs.stderr)).all()
    assert F.linear(x, layer.weight, layer.bias).shape == (24, 8)


def test_examples_that_influence_each_other_from_some_number_on_are_noticed():
    """Several passes over blocks of 6 are evaluated at once: 6 examples are independent here, 12 are not."""

    class Crowded(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            h = self.a(x).tanh()
            return self.b(h if len(x) <= 8 else h - 3 * h.mean(0))

    torch.manual_seed(0)
    model, (x, y) = Crowded(), data(6)
    with pytest.raises(Unforeseen, match="alone"):
        local_energy(model, (x, y), [0.4], noise="example", metric=deviation, batch_size=6, progress=False)
    options = {"metric": deviation, "batch_size": 6, "max_passes": 200, "progress": False}
    found, plain = (local_energy(model, (x, y), [0.4], noise=noise, **options) for noise in ("auto", "batch"))
    assert found.conventions["noise"] == "batch"
    assert abs(found.mean[0] - plain.mean[0]) <= 4 * np.hypot(found.stderr[0], plain.stderr[0])


def test_the_version_of_a_weight_is_another_at_every_point_and_the_old_one_at_the_end():
    seen = []

    class Asking(nn.Linear):
        def forward(self, x):
            seen.append(self.weight._version)
            return super().forward(x)

    model, (x, y) = Asking(6, 3), data(6)
    before = model.weight._version
    pending = model(x).square().sum()
    local_energy(model, (x, y), [0.2, 0.4], noise="pass", max_passes=3, metric=deviation, batch_size=24, progress=False)
    assert len(set(seen[-6:])) == 6 and model.weight._version == before
    pending.backward()  # a graph from before can still be differentiated


def test_a_cache_out_of_sight_that_outlives_the_weights_is_noticed():
    """Merged weights kept for a place in memory, where no attribute shows them."""
    a, known = nn.Linear(6, 3), {}

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = a

        def forward(self, x):
            key = a.weight.data_ptr()
            if key not in known:
                known.clear()
                known[key] = 2 * a.weight.detach()
            return x @ known[key].T + a.bias

    with pytest.raises(ValueError, match="evaluated at other weights"):
        local_energy(Hidden(), data(6), [0.4], noise="batch", metric=deviation, progress=False)
