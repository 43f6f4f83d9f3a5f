"""A sharded network is measured as the whole one is, to rounding, whichever module of it is the root."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import wideflat
from wideflat.distributed.whole import whole_network, whole_tensors
from wideflat.kernels.shards import is_sharded

EXAMPLES = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
DATA = EXAMPLES, (EXAMPLES[:, 0] > 0).long()
SIGMAS = [0.2, 0.5]


class Body(nn.Module):
    """Keeps what it has seen, in a buffer and by a hook of the user."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.norm = nn.BatchNorm1d(7)
        self.again = [self.first]  # another way to the same module

    def forward(self, x):
        return self.second(self.norm(self.again[0](x)).tanh())


def double(module, inputs, outputs):
    return 2 * outputs


def make():
    torch.manual_seed(1)
    model = nn.Sequential(Body(), nn.Linear(3, 2))
    model[0].second.register_forward_hook(double)
    model(EXAMPLES)  # statistics
    return model


def sharded(form):
    model, world = make(), dist.get_world_size()
    if form == "tensor-parallel":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        whole = Replicate()
        plan = {"first": ColwiseParallel(output_layouts=whole), "second": RowwiseParallel(input_layouts=whole)}
        parallelize_module(model[0], mesh, plan)
        return model
    mesh = init_device_mesh("cpu", (world,))
    for module in {"root": [model], "parts": [model[0].first, model[0], model], "a part": [model[0]]}[form]:
        fully_shard(module, mesh=mesh)
    if form == "parts":
        model.eval()(EXAMPLES)  # its root holds whole weights from here on
    return model


def measures(model):
    """Numbers of every measure."""
    options = {"seed": 3, "progress": False}
    found = {"batch": wideflat.local_energy(model, DATA, SIGMAS, noise="batch", metric="loss", max_passes=2, **options)}
    found["example"] = wideflat.local_energy(model, DATA, SIGMAS, noise="example", metric="loss", **options)
    volume = wideflat.free_entropy(model, DATA, 0.05, chains=2, samples=4, burn=2, points=8, **options)
    layers = wideflat.layer_profiles(model, DATA, [0.3], metric="loss", **options)
    hessian = wideflat.spectrum(model, DATA, probes=2, steps=4, **options)
    blocks = wideflat.layer_spectra(model, DATA, probes=1, steps=3, matrix="ggn", **options)
    return {
        **{name: profile.mean for name, profile in found.items()},
        **{f"stderr {name}": profile.stderr for name, profile in found.items()},
        "free entropy": np.array(volume.log_z),
        "layers": np.array([profile.mean[0] for profile in layers.values()]),
        "spectrum": np.array([*hessian.eigenvalues, hessian.trace]),
        "layer spectra": np.concatenate([found.eigenvalues for found in blocks.values()]),
    }


def measure_sharded(forms):
    found = {}
    for form in forms:
        model = sharded(form)
        found[form] = measures(model)
        assert any(is_sharded(p) for p in model.parameters())
    return found


@pytest.mark.parametrize(("world", "forms"), [(2, ["root", "parts"]), (3, ["a part", "tensor-parallel"])])
def test_measures_of_a_sharded_network_are_those_of_the_whole(ranks, world, forms):
    expected = measures(make())
    for result in ranks(measure_sharded, world, forms):
        for form, found in result.items():
            for name, numbers in found.items():
                np.testing.assert_allclose(numbers, expected[name], rtol=1e-5, err_msg=f"{form}, {name}")


def doors():
    """A part of the network, something around it, weights by name, and an optimizer that holds w'."""
    model = sharded("parts")
    opt = wideflat.EntropySGD(model.parameters(), inner_steps=3, inner_lr=0.1)
    model(EXAMPLES).square().sum().backward()
    opt.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = whole_network(model)
    found = {"warned": [str(each.message) for each in caught]}
    with opt.center(model):
        center = whole_network(model)
    found["center"] = [p.detach() for p in center.parameters()]
    found["explorer"] = [p.detach() for p in whole.parameters()]
    found["part"] = whole_network(model[0]).eval()(EXAMPLES).detach()
    found["around"] = whole_network(nn.Sequential(model, nn.Tanh())).eval()(EXAMPLES).detach()
    with torch.no_grad():
        found["expected"] = whole.eval()(EXAMPLES), whole[0](EXAMPLES)
        found["itself"] = model.eval()(EXAMPLES)
    model.reshard()
    other = whole_tensors(model.state_dict())
    found["shift"] = wideflat.shift_profile(model, DATA, other=model, positions=[1.0], progress=False).mean
    found["names"] = list(other) == list(make().state_dict())
    found["classes"] = [type(module).__name__ for module in whole.modules()]
    found["tied"] = whole[0].again[0] is whole[0].first
    return found


def test_every_door_to_a_sharded_network(ranks):
    for found in ranks(doors, 2):
        assert len(found["warned"]) == 1
        assert "explorer" in found["warned"][0]
        for mine, theirs in zip(found["center"], make().parameters(), strict=True):
            np.testing.assert_array_equal(mine, theirs.detach())
        assert not all(np.array_equal(a, b) for a, b in zip(found["center"], found["explorer"], strict=True))
        outputs, part = found["expected"]
        np.testing.assert_allclose(found["part"], part, atol=1e-6)
        np.testing.assert_allclose(found["around"], np.tanh(outputs), atol=1e-6)
        np.testing.assert_allclose(found["itself"], outputs, atol=1e-6)
        assert found["shift"] == [0.0]
        assert found["names"]
        assert found["classes"] == ["Sequential", "Body", "Linear", "Linear", "BatchNorm1d", "Linear"]
        assert found["tied"]
