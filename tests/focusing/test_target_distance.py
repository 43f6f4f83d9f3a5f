"""The controller of the distance between explorer and center: closed forms, quadratics, networks, refusals."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import wideflat

INNER = {"inner_lr": 0.05, "inner_steps": 6}


def hold_on(h, w, a, ratio, cycles, gain=1.0, lr=0.0, **settings):
    """Cycles on the loss sum h (w - a)^2 / 2; the ratio that each reached."""
    p = nn.Parameter(w.clone())
    opt = wideflat.EntropySGD([p], lr=lr, **({**INNER, "epsilon": 0.0, "gamma": 0.2, "momentum": 0.0} | settings))
    hold = wideflat.TargetDistance(opt, ratio, gain=gain)
    reached = []
    for _ in range(cycles):
        for _ in range(opt.param_groups[0]["inner_steps"]):
            opt.zero_grad()
            (h * (p - a) ** 2 / 2).sum().backward()
            opt.step()
            hold.step()
        reached.append(hold.reached)
    return reached, opt.param_groups[0]["gamma"]


SGD = [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.3, "momentum": 0.5}]


def free(h, settings):
    """What is reached without any pull."""
    w, a = torch.linspace(-1, 1, 7, dtype=torch.float64), torch.full((7,), 0.4, dtype=torch.float64)
    reached, _ = hold_on(h, w, a, 1.0, 1, **{"gamma": 0.0} | settings)
    return w, a, reached[0]


@pytest.mark.parametrize("settings", SGD)
def test_one_cycle_is_enough_where_all_curvatures_are_equal(settings):
    """Weight decay is a curvature and a gradient like the others."""
    h = torch.tensor(1.7, dtype=torch.float64)
    w, a, most = free(h, settings)
    for share in (0.9, 0.6, 0.4):
        reached, gamma = hold_on(h, w, a, share * most, 3, **settings)
        assert reached[1:] == pytest.approx([share * most] * 2, rel=1e-9)
        assert gamma > 0


def test_gamma_is_that_of_the_closed_form():
    """Without momentum |x_l| = |g| (1 - (1 - eta' s)^l) / s."""
    h = torch.tensor(2.0, dtype=torch.float64)
    w, a, most = free(h, {})
    _, gamma = hold_on(h, w, a, most / 2, 2)
    g, s = (h * (w - a)).norm().item(), 2.0 + gamma
    x = g * (1 - (1 - 0.05 * s) ** 5) / s
    assert x**2 / 2 / w.square().sum().item() == pytest.approx(most / 2, rel=1e-10)


@pytest.mark.parametrize("settings", SGD[:3])
def test_different_curvatures_take_a_few_cycles(settings):
    h = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0], dtype=torch.float64)
    w, a, most = free(h, settings)
    reached, _ = hold_on(h, w, a, 0.5 * most, 12, **settings)
    assert reached[-1] == pytest.approx(0.5 * most, rel=1e-6)
    assert abs(reached[2] / most - 0.5) < 0.1  # near after two corrections


def test_a_concave_loss_needs_a_pull_of_its_own():
    h = torch.tensor(-1.0, dtype=torch.float64)
    w, a, most = free(h, {})
    reached, gamma = hold_on(h, w, a, 0.7 * most, 2)
    assert reached[-1] == pytest.approx(0.7 * most, rel=1e-9) and gamma > 0


def test_the_noise_of_the_explorer_is_known():
    """The square of the noise is added to that of the way; its mean is known, and many weights have no other."""
    torch.manual_seed(0)
    w = torch.randn(100_000, dtype=torch.float64)
    a, h = w + 0.05 * torch.randn_like(w), torch.tensor(1.0, dtype=torch.float64)
    settings = {"epsilon": 0.05, "gamma": 0.5}
    (most,), _ = hold_on(h, w, a, 1.0, 1, **settings | {"gamma": 0.0})
    reached, gamma = hold_on(h, w, a, 0.7 * most, 4, **settings)
    assert reached[1:] == pytest.approx([0.7 * most] * 3, rel=0.02) and gamma > 1


def test_what_cannot_be_reached_is_approached():
    h = torch.tensor(1.0, dtype=torch.float64)
    w, a, most = free(h, {})
    _, gamma = hold_on(h, w, a, 10 * most, 3)
    assert gamma == 0.0  # w' does not get so far even without a pull
    reached, gamma = hold_on(h, w, a, most / 1e6, 3)
    assert gamma == pytest.approx(1 / 0.05 - 1, rel=0.02)  # the pull takes back all but the first step
    assert reached[-1] < 0.1 * most


def test_the_distance_of_a_network_is_held_while_it_trains():
    def run(ratio, batch):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        opt = wideflat.EntropySGD(
            net.parameters(), lr=0.3, inner_lr=0.05, inner_steps=8, gamma=0.5, epsilon=0.0, momentum=0.0
        )
        hold = wideflat.TargetDistance(opt, ratio, gain=1.0 if batch == 256 else 0.2)
        x = torch.randn(256, 5)
        y = x[:, :1].sin() + 0.5 * torch.randn(256, 1)
        ratios = []
        for t in range(480 if batch == 256 else 1600):
            rows = torch.randperm(256)[:batch]
            opt.zero_grad()
            (net(x[rows]) - y[rows]).square().mean().backward()
            opt.step()
            hold.step()
            if opt.at_center and t > 300:
                ratios.append(hold.reached)
        return torch.tensor(ratios).mean().item()

    for ratio in (4e-5, 6e-5):  # more than a step, less than what the last gradients would do without a pull
        assert run(ratio, 256) == pytest.approx(ratio, rel=0.1)
    for ratio in (4e-5, 7e-5):  # mini-batches: the distance of a cycle is noisy, its mean is held
        assert run(ratio, 64) == pytest.approx(ratio, rel=0.2)
    assert 1e-5 < run(1e-5, 64) < 4e-5  # below their noise: as near as a pull can bring it


def test_saved_and_resumed():
    h, w = torch.tensor(1.0), torch.ones(3)

    def make():
        p = nn.Parameter(w.clone())
        opt = wideflat.EntropySGD([p], lr=0.1, momentum=0, **INNER)
        return p, opt, wideflat.TargetDistance(opt, 1e-3)

    def train(p, opt, hold, steps):
        for _ in range(steps):
            opt.zero_grad()
            (h * (p - 3) ** 2 / 2).sum().backward()
            opt.step()
            hold.step()

    whole = make()
    train(*whole, 9)
    again = make()
    again[0].data.copy_(whole[0].data)
    again[1].load_state_dict(copy.deepcopy(whole[1].state_dict()))
    again[2].load_state_dict(whole[2].state_dict())
    train(*whole, 9)
    train(*again, 9)
    assert torch.equal(whole[0], again[0]) and whole[2].reached == again[2].reached


def test_what_it_does_not_know_is_refused():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="must be an EntropySGD"):
        wideflat.TargetDistance(torch.optim.SGD([p]), 0.1)
    adam = partial(wideflat.EntropySGD, inner=torch.optim.AdamW, inner_steps=20)
    with pytest.raises(TypeError, match=r"around Adam use wideflat\.Entropic"):
        wideflat.TargetDistance(adam([p]), 0.1)
    with pytest.raises(ValueError, match="at least 3, got 2"):
        wideflat.TargetDistance(wideflat.EntropySGD([p], inner_steps=2), 0.1)
    with pytest.raises(ValueError, match="one gamma, for all param groups"):
        groups = [{"params": [p]}, {"params": [nn.Parameter(torch.ones(1))], "gamma": 3.0}]
        wideflat.TargetDistance(wideflat.EntropySGD(groups), 0.1)
    with pytest.raises(ValueError, match="ratio"):
        wideflat.TargetDistance(wideflat.EntropySGD([p]), 0.0)
