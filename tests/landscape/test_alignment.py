"""Networks aligned by permutation: a permuted copy is found exactly, what is not known is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import shift_profile
from wideflat.landscape.alignment import aligned
from wideflat.landscape.hidden_units import hidden_units


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.conv2, self.norm2 = nn.Conv2d(5, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class Residual(nn.Module):
    """A stem, two residual blocks, pooling, flattened maps, two linear layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.Sequential(Block(6), Block(6))
        self.pool, self.hidden, self.out = nn.MaxPool2d(2), nn.Linear(6 * 4, 7), nn.Linear(7, 3)

    def forward(self, x):
        x = self.pool(self.blocks(self.stem(x)))
        return self.out(torch.relu(self.hidden(x.reshape(x.size(0), -1))))


class ResidualMLP(nn.Module):
    """A weight whose rows and columns are the same units."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.inner, self.out = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x.view(-1, 4))
        return self.out(x + torch.tanh(self.inner(self.norm(x))))


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), (4,), 2),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
        (2, 4, 4),
        1,
    ),
    "residual": (Residual, (2, 4, 4), 4),  # the stem with all sums, one inside of each block, the hidden layer
    "layer norm": (ResidualMLP, (4,), 1),
}


def build(name, seed=0):
    torch.manual_seed(seed)
    make, shape, count = NETWORKS[name]
    model = make().eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            module.weight.data.uniform_(0.5, 2.0)
            module.bias.data.normal_()
    return model, torch.randn(30, *shape), count


def shuffled(model, seed=0):
    """A copy that computes the same, its units in another order."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for units in hidden_units(model):
        p = torch.randperm(units.size, generator=generator)
        for axis in units.axes:
            tensor = state[axis.name]
            block = tensor.shape[axis.axis] // units.size
            index = (p[:, None] * block + torch.arange(block)).flatten()
            state[axis.name] = tensor.index_select(axis.axis, index)
    return state


@pytest.mark.parametrize("name", NETWORKS)
def test_a_permuted_copy_is_the_same_function_and_is_found(name):
    model, x, count = build(name)
    assert len(hidden_units(model)) == count
    for seed in range(3):
        state = shuffled(model, seed)
        assert any(not torch.equal(state[key], value) for key, value in model.state_dict().items())
        torch.testing.assert_close(torch.func.functional_call(model, state, (x,)), model(x), rtol=1e-4, atol=1e-4)
        found = aligned(model, state)
        assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_permuted_copy_has_no_barrier(name):
    model, x, _ = build(name)
    y = torch.randint(3, (30,), generator=torch.Generator().manual_seed(0))
    options = {"metric": "loss", "noise": False, "progress": False}
    plain = shift_profile(model, (x, y), shuffled(model), **options)
    found = shift_profile(model, (x, y), shuffled(model), align=True, **options)
    assert found.barrier == 0 and found.barrier_interval == (0.0, 0.0) and (found.lengths == 0).all()
    assert plain.lengths[-1] > 0 and np.abs(plain.mean).max() > 1e-3 and plain.mean[-1] == pytest.approx(0, abs=1e-4)
    assert "hidden units aligned" in found.about() and "aligned" not in plain.about()


@pytest.mark.parametrize("name", NETWORKS)
def test_another_network_comes_nearer_and_computes_the_same(name):
    (model, x, _), (other, _, _) = build(name), build(name, seed=1)
    state = aligned(model, other.state_dict())
    torch.testing.assert_close(torch.func.functional_call(model, state, (x,)), other(x), rtol=1e-4, atol=1e-4)

    def distance(theirs):
        return sum(float((p - theirs[name]).square().sum()) for name, p in model.named_parameters())

    assert distance(state) < distance(other.state_dict())


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


class Halves(nn.Module):
    """Flattens two halves of the channels apart."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 4, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.conv(x).reshape(4, -1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 2)), "Softmax .* may not treat all units alike"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2)), "Conv2d"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(2, 3)), "Linear"),
        (Halves(), "reshape"),
        (nn.TransformerEncoderLayer(4, 2), "cannot be aligned"),
        (Branching(), "torch.fx cannot trace it"),
        (tied(), "2.weight is tied to another parameter"),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2)),
            "0.weight is computed from other parameters",
        ),
        (nn.Sequential(nn.Linear(3, 6), nn.Flatten(), nn.Linear(9, 2)), "length 9, which 6 units do not divide"),
    ],
)
def test_what_is_not_known_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        aligned(model, model.state_dict())


def hooked():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    model[1].register_forward_hook(lambda _, inputs, output: output * torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]))
    return model


UNSEEN = {  # what a graph does not show
    "positions before units": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 2)),
        (4, 3),
    ),
    "normalised positions": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 2)),
        (4, 3),
    ),
    "hook": (hooked, (3,)),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_units_that_are_not_treated_alike_are_refused_though_the_graph_does_not_show_it(name):
    make, shape = UNSEEN[name]
    torch.manual_seed(0)
    model, other, x = make(), make(), torch.randn(12, *shape)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    options = {"metric": "loss", "noise": False, "progress": False}
    with pytest.raises(ValueError, match="it answers differently when its hidden units are permuted"):
        shift_profile(model, (x, torch.zeros(12, dtype=torch.long)), other, align=True, **options)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_half_precision_may_round():
    model, x, _ = build("mlp")
    other, _, _ = build("mlp", seed=1)
    model, other, x = model.bfloat16(), other.bfloat16(), x.bfloat16()
    options = {"metric": "loss", "noise": False, "progress": False}
    y = torch.randint(3, (30,), generator=torch.Generator().manual_seed(0))
    assert np.isfinite(shift_profile(model, (x, y), other, align=True, **options).mean).all()


def test_bad_input():
    model, x, _ = build("mlp")
    with pytest.raises(ValueError, match=r"no 0.weight of shape \(8, 4\)"):
        aligned(model, {**model.state_dict(), "0.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="align is for other weights"):
        shift_profile(model, (x, torch.zeros(30).long()), prune=[0.5], align=True, progress=False)
    with pytest.raises(TypeError, match="state dictionary or a network"):
        shift_profile(model, (x, torch.zeros(30).long()), 3, align=True, progress=False)
