"""Parle against Entropy-SGD and a pull by hand."""

import copy
from functools import partial

import pytest
import torch
from family_twins import made, parle, vector
from small_regression import loss_of, make_model, same, step

import wideflat


def test_parle_is_entropy_sgd_with_a_pull_at_the_outer_steps():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(make_model, 2)
    naive = copy.deepcopy(replicas)
    settings = {"lr": 0.8, "inner_lr": 0.05, "inner_steps": 3, "gamma": 0.2, "epsilon": 0.0, "momentum": 0.9}
    opt = wideflat.EntropySGD(replicas.parameters(), **settings)
    coupling = wideflat.Parle(replicas, opt, gamma=0.5)
    separate = [wideflat.EntropySGD(model.parameters(), **settings) for model in naive]
    for t in range(7):
        opt.zero_grad()
        sum(loss_of(model, t) for model in replicas).backward()
        opt.step()
        coupling.couple()
        for model, alone in zip(naive, separate, strict=True):
            step(alone, model, t)
        if (t + 1) % 3 == 0:
            s = 0.8 * 0.5
            for p, q in zip(*(list(model.parameters()) for model in naive), strict=True):
                center = (p + q).detach() / 2
                p.data = (p.data + s * center) / (1 + s)
                q.data = (q.data + s * center) / (1 + s)
        same(replicas, naive)
    with pytest.raises(TypeError, match="that EntropySGD trains, got SGD"):
        wideflat.Parle(replicas, torch.optim.SGD(replicas.parameters()))


def test_replicas_that_are_shown_at_their_centers_are_not_coupled():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(make_model, 2)
    opt = wideflat.EntropySGD(replicas.parameters(), inner_steps=3)
    coupling = wideflat.Parle(replicas, opt, gamma=0.5)
    sum(loss_of(model, 0) for model in replicas).backward()
    opt.step()
    before = copy.deepcopy(replicas)
    opt.eval()
    assert not coupling.couple()
    opt.train()
    same(replicas, before, rtol=0, atol=0)


def test_parle():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(make_model, 2)
    settings = {"lr": 0.8, "inner_lr": 0.05, "gamma": 0.2, "alpha": 0.6}
    twin = parle(made(), [vector(model) for model in replicas], 9, 3, attraction=0.5, **settings)
    opt = wideflat.EntropySGD(replicas.parameters(), inner_steps=3, epsilon=0.0, momentum=0.0, **settings)
    coupling = wideflat.Parle(replicas, opt, gamma=0.5)
    for t, held in enumerate(twin):
        opt.zero_grad()
        sum(loss_of(model, t) for model in replicas).backward()
        opt.step()
        coupling.couple()
        for model, w in zip(replicas, held, strict=True):
            torch.testing.assert_close(vector(model), w)


def test_parle_without_attraction_is_entropy_sgd_in_each_replica():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(make_model, 2)
    alone = copy.deepcopy(replicas[1])
    make = partial(wideflat.EntropySGD, inner_steps=3, epsilon=0.0, momentum=0.9)
    opt, other = make(replicas.parameters()), make(alone.parameters())
    coupling = wideflat.Parle(replicas, opt, gamma=0.0)
    for t in range(7):
        opt.zero_grad()
        sum(loss_of(model, t) for model in replicas).backward()
        opt.step()
        coupling.couple()
        step(other, alone, t)
    same(replicas[1], alone)
