"""A small regression that the tests of this folder train on."""

import torch
from torch import nn


def make_model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(model, t):
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def step(opt, model, t):
    def closure():
        opt.zero_grad()
        loss = loss_of(model, t)
        loss.backward()
        return loss

    return opt.step(closure)


def same(ours, theirs, **tolerance):
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), **tolerance)
