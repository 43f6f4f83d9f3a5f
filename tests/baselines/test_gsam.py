"""GSAM against its box, its peer and its limit; its radius."""

import copy
from functools import partial

import pytest
import pytorch_optimizer
import torch
from sam_twins import RATE, RHO, compare_with_box, compare_with_sam
from small_regression import loss_of, make_model, same, step
from torch import nn

import wideflat


def test_gsam_equals_its_peer():
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    opt = wideflat.GSAM(ours.parameters(), rho=RHO, alpha=0.4, lr=RATE, momentum=0.9)

    class Constant:
        def step(self):
            return RHO

    base = torch.optim.SGD(theirs.parameters(), lr=RATE, momentum=0.9)
    peer = pytorch_optimizer.GSAM(theirs.parameters(), base, theirs, Constant(), alpha=0.4)
    for t in range(8):
        step(opt, ours, t)

        def closure(t=t):
            base.zero_grad()
            with torch.enable_grad():
                loss = loss_of(theirs, t)
            loss.backward()
            return None, loss

        peer.step(closure)
        same(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_radius_of_gsam_follows_the_learning_rate():
    w = nn.Parameter(torch.tensor(1.0))
    opt = wideflat.GSAM([w], rho=0.4, rho_min=0.2, alpha=0.0, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 - t / 4)
    radii = []
    for _ in range(5):
        w.data.fill_(1.0)
        w.grad = torch.tensor(1.0)
        opt.perturb()
        radii.append(w.item() - 1)
        w.grad = torch.tensor(0.0)
        opt.restore()
        opt.step()
        scheduler.step()
    assert radii == pytest.approx([0.4, 0.35, 0.3, 0.25, 0.2])


def test_its_setting_is_that_of_the_box():
    compare_with_box("gsam", alpha=1.0)


def test_without_ascent_along_the_rest_it_is_sam():
    compare_with_sam(partial(wideflat.GSAM, alpha=0.0))


def test_a_negative_ascent_is_refused():
    with pytest.raises(ValueError, match="alpha must be"):
        wideflat.GSAM(nn.Linear(2, 2).parameters(), alpha=-1.0)
