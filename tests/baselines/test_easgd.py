"""EASGD against its definition."""

import copy

import pytest
import torch
from family_twins import easgd, made, vector
from small_regression import loss_of, make_model
from torch import nn

import wideflat


def naive_easgd(w, gradients, center, lr, strength, rate):
    y = len(w)
    new = [a - lr * (g + strength * (a - center)) for a, g in zip(w, gradients, strict=True)]
    return new, center + rate * (sum(w) / y - center)


def test_easgd_equals_its_definition():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(lambda: nn.Linear(3, 1, bias=False).double(), 3)
    opt = torch.optim.SGD(replicas.parameters(), lr=0.1)
    coupling = wideflat.EASGD(replicas, rate=0.7, period=2, gamma=0.4)
    w = [model.weight.detach().clone() for model in replicas]
    center = sum(w) / 3
    for t in range(6):
        opt.zero_grad()
        sum(loss_of(model, t) for model in replicas).backward()
        gradients = [model.weight.grad.clone() for model in replicas]
        coupling.couple()
        opt.step()
        if (t + 1) % 2 == 0:
            w, center = naive_easgd(w, gradients, center, 0.1, 0.8, 0.7)
        else:
            w = [a - 0.1 * g for a, g in zip(w, gradients, strict=True)]
        torch.testing.assert_close([model.weight.detach() for model in replicas], w)
        torch.testing.assert_close(coupling.center[0], center)
    again = wideflat.EASGD(replicas, rate=0.1, period=5)
    again.load_state_dict(copy.deepcopy(coupling.state_dict()))
    assert torch.equal(again.center[0], coupling.center[0])
    assert (again.rate, again.period, again.calls, again.gamma) == (0.7, 2, 6, 0.4)
    with pytest.raises(ValueError, match="rate must be above 0"):
        wideflat.EASGD(replicas, rate=0.0)


def test_easgd_with_a_center_without_inertia_is_replicated_sgd_with_one_step_delay():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(make_model, 2)
    other = copy.deepcopy(replicas)
    wideflat.EASGD(replicas, rate=1.0, period=1, gamma=0.5).couple()  # the center starts at the barycenter
    wideflat.ReplicaCoupling(other, period=1, gamma=0.5).couple()
    torch.testing.assert_close([p.grad for p in replicas.parameters()], [p.grad for p in other.parameters()])


def test_easgd():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(make_model, 3)
    twin = easgd(made(), [vector(model) for model in replicas], 9, 2, lr=0.05, rho=0.4, beta=0.7)
    opt = torch.optim.SGD(replicas.parameters(), lr=0.05)
    coupling = wideflat.EASGD(replicas, rate=0.7, period=2, gamma=0.2)  # K gamma is the paper's rho
    for t, held in enumerate(twin):
        opt.zero_grad()
        sum(loss_of(model, t) for model in replicas).backward()
        coupling.couple()
        opt.step()
        for model, w in zip(replicas, held, strict=True):
            torch.testing.assert_close(vector(model), w)
