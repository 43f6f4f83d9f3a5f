"""The automatic gamma_0 of Entropy-SGD."""

import pytest
import torch
from torch import nn

import wideflat


def test_automatic_gamma0_is_loss_over_distance_and_leaves_no_trace():
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    settings = {"inner_lr": 0.1, "inner_steps": 3, "epsilon": 0.01, "momentum": 0.9, "seed": 2}
    opt = wideflat.EntropySGD(net.parameters(), gamma=0.3, **settings)
    x = torch.randn(3, 8, 4)
    batches = iter([*x, *x])

    def closure():
        opt.zero_grad()
        loss = net(next(batches)).square().mean()
        loss.backward()
        return loss

    start = [p.detach().clone() for p in net.parameters()]
    loss = net(x[0]).square().mean().item()
    gamma0 = wideflat.automatic_gamma0(opt, closure)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), start, strict=True))
    group = opt.param_groups[0]
    assert (group["gamma"], group["inner_steps"], group["step"], group["position"]) == (0.3, 3, 0, 0)
    assert all(p.grad is None for p in net.parameters())
    # The same by hand, with a cycle too long to close.
    by_hand = wideflat.EntropySGD(net.parameters(), gamma=0.0, **{**settings, "inner_steps": 9})
    for _ in range(3):
        by_hand.step(closure)
    assert gamma0 == pytest.approx(loss / by_hand.distance().item())
    with pytest.raises(ValueError, match="at the start of a cycle"):
        wideflat.automatic_gamma0(by_hand, closure)


def test_automatic_gamma0_needs_movement_and_survives_errors():
    w = nn.Parameter(torch.ones(1))
    opt = wideflat.EntropySGD([w], inner_lr=0.0, gamma=0.3)

    def closure():
        w.grad = torch.ones(1)
        return 1.0

    with pytest.raises(ValueError, match="did not move in 5 steps"):
        wideflat.automatic_gamma0(opt, closure)
    assert opt.param_groups[0]["gamma"] == 0.3
    opt.param_groups[0]["inner_lr"] = 0.1
    assert wideflat.automatic_gamma0(opt, closure, loss=10.0) == pytest.approx(
        10 * wideflat.automatic_gamma0(opt, closure)
    )
