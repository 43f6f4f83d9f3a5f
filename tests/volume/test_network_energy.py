"""V(xi) of a network: against torch's own derivatives, whatever the batches, and the network as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.functional import hvp
from torch.func import functional_call

from wideflat.volume.fixed_data import FixedData
from wideflat.volume.network_energy import Network, NetworkEnergy, margin

SIGMA = 0.3


@pytest.fixture
def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, (torch.randn(10, 3).double(), torch.randint(3, (10,)))


def flat_energy(model, data):
    """V(xi) with relative noise, by torch alone."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def energy(xi):
        parts = xi.split([w.numel() for w in weights.values()])
        moved = {
            name: w + SIGMA * w.abs() * part.view(w.shape)
            for (name, w), part in zip(weights.items(), parts, strict=True)
        }
        loss = nn.functional.cross_entropy
        at = loss(functional_call(model, moved, (data[0],)), data[1], reduction="sum")
        return at - loss(model(data[0]), data[1], reduction="sum").detach()

    return energy


@pytest.mark.parametrize("batch", [3, 10])
def test_value_gradient_and_curvature_are_torchs(net, batch):
    model, data = net
    before = copy.deepcopy(model.state_dict())
    energy, xi = flat_energy(model, data), torch.randn(31, dtype=torch.float64, requires_grad=True)
    expected, v = energy(xi), torch.randn(31, dtype=torch.float64)
    (slope,) = torch.autograd.grad(expected, xi)
    curvature = hvp(energy, torch.zeros(31, dtype=torch.float64), v)[1]
    network = Network(model, FixedData(data, batch))
    with network.prepared():
        found = NetworkEnergy(network, SIGMA)
        value, gradient = found.gradient(xi.detach())
        assert value == pytest.approx(expected.item()) and found.value(xi.detach()) == pytest.approx(value)
        torch.testing.assert_close(gradient, slope)
        assert found.value(torch.zeros(31, dtype=torch.float64)) == 0
        torch.testing.assert_close(network.hessian_product(v, SIGMA), curvature)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_violations_are_zero_where_the_answer_is_right_and_count_from_zero_on(net):
    network = Network(net[0], FixedData(net[1], 10), measure="error")
    kept = torch.tensor([True] * 4 + [False])
    energy = NetworkEnergy(network, SIGMA, kept, torch.full((5,), 2.0, dtype=torch.float64))
    found = energy.energies(torch.tensor([1.0, 0.0, -3.0, 0.5, -3.0], dtype=torch.float64))
    assert found[[0, 2, 3, 4]].tolist() == [0.0, 1.5, 0.0, 0.0] and 0 < found[1] < 1e-300


def test_the_margin_is_of_any_shape_of_outputs_that_answers():
    outputs = torch.tensor([[1.0, 3.0, 2.0], [3.0, 0.0, 1.0]])
    by_class = margin(outputs, torch.tensor([1, 1]))
    assert torch.equal(by_class, margin(outputs, torch.eye(3)[[1, 1]])) and by_class.tolist() == [1.0, -3.0]
    assert margin(torch.tensor([[0.5], [-2.0]]), torch.tensor([[1.0], [-1.0]])).tolist() == [0.5, 2.0]
    with pytest.raises(ValueError, match=r"needs outputs of shape .*, got \(2, 3, 4\)"):
        margin(torch.zeros(2, 3, 4), torch.zeros(2).long())
