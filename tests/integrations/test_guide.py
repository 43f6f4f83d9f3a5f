"""What the callbacks of all trainers share."""

import pytest
import torch
from torch import nn

import wideflat
from wideflat.integrations.guide import Guide, with_center


def net_and_optimizer(**settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return net, wideflat.EntropySGD(net.parameters(), inner_steps=4, gamma=0.5, **settings)


def step(net, opt):
    opt.zero_grad()
    net(torch.randn(8, 2)).square().mean().backward()
    opt.step()


def test_only_optimizers_with_a_center_are_guided():
    _, opt = net_and_optimizer()

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    assert with_center([Wrapper(Wrapper(opt)), torch.optim.SGD(opt.param_groups[0]["params"])]) == [opt]
    with pytest.raises(TypeError, match="the trainer has SGD"):
        Guide().start([torch.optim.SGD(opt.param_groups[0]["params"])], 10, [])


def test_it_goes_on_from_what_was_saved_with_the_first_gamma0():
    _, opt = net_and_optimizer()
    guide = Guide(factor=100.0)
    guide.start([opt], 4, [])
    guide.move_to(3)
    again = Guide(factor=100.0)
    again.start([opt], 4, guide.gamma0)  # the optimizer holds the gamma of now, not the first one
    again.move_to(4)
    assert opt.param_groups[0]["gamma"] == pytest.approx(50.0)


def test_a_length_that_is_not_known_must_be_said():
    _, opt = net_and_optimizer()
    with pytest.raises(ValueError, match="pass total="):
        Guide().start([opt], float("inf"), [])
    guide = Guide(total=10)
    guide.start([opt], float("inf"), [])
    assert guide.focusings[0].total == 10


def test_settings_that_cannot_be_meant():
    with pytest.raises(ValueError, match="by must be"):
        Guide(by="hour")
    with pytest.raises(TypeError, match="kind must be a name"):
        Guide(kind=lambda tau: tau)


def test_readings_and_the_end():
    net, opt = net_and_optimizer()
    guide = Guide()
    guide.start([opt], 10, [])
    for _ in range(3):
        step(net, opt)
    readings = guide.readings()
    assert readings == {"gamma": 0.5, "distance": opt.distance().item(), "at_center": 0.0}
    batches = [torch.randn(16, 2), torch.randn(16, 2)]
    guide.show_center()
    assert guide.readings()["at_center"] == 1.0
    guide.finish(net, batches)
    assert opt.at_center and opt.distance() == 0
    hidden = [net[0](x) for x in batches]
    torch.testing.assert_close(net[1].running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))


@pytest.mark.parametrize("shown", [False, True])
def test_recenter_starts_at_what_the_model_holds(shown):
    net, opt = net_and_optimizer(epsilon=0.0)
    for _ in range(2):
        step(net, opt)
    if shown:
        opt.eval()
    best = [torch.randn_like(p) for p in net.parameters()]
    with torch.no_grad():
        for p, value in zip(net.parameters(), best, strict=True):
            p.copy_(value)
    opt.recenter()
    opt.eval()
    assert all(torch.equal(p, value) for p, value in zip(net.parameters(), best, strict=True))
    opt.train()
    step(net, opt)
    opt.eval()
    assert all(torch.equal(p, value) for p, value in zip(net.parameters(), best, strict=True))
    opt.train()
    with opt.center(), pytest.raises(RuntimeError, match="recenter"):
        opt.recenter()
