"""Lookahead against its peer."""

import copy

import pytorch_optimizer
import torch
from small_regression import make_model, same, step

import wideflat


def test_lookahead_equals_its_peer():
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    fast = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    opt = wideflat.Lookahead(ours.parameters(), lr=0.6, inner_lr=0.05, inner_steps=4, **fast)
    peer = pytorch_optimizer.Lookahead(
        torch.optim.SGD(theirs.parameters(), lr=0.05, **fast), k=4, alpha=0.6, pullback_momentum="reset"
    )
    for t in range(10):
        step(opt, ours, t)
        step(peer, theirs, t)
        same(ours, theirs)
