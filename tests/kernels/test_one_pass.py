"""Entropic in one pass over memory is Entropic by its general way, around every Adam; what is unknown goes that way."""

import copy

import pytest
import torch
from torch import nn

import wideflat

INNER = {
    "AdamW": lambda params, **more: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, **more),
    "Adam with decay": lambda params, **more: torch.optim.Adam(params, lr=0.01, weight_decay=0.1, **more),
    "maximize": lambda params, **more: torch.optim.AdamW(params, lr=0.01, maximize=True, **more),
    "groups": lambda params, **more: torch.optim.AdamW(
        [{"params": params[:2], "lr": 0.02}, {"params": params[2:], "betas": (0.5, 0.9)}], lr=0.01, **more
    ),
}
OUTER = {
    "Entropic": {"pull": 1.0},
    "mean, noise": {"pull": 1.0, "alpha": 0.4, "epsilon": 0.1},
    "late mean": {"alpha": 0.9, "pull": 0.3},
    "no pull": {"pull": 0.0, "alpha": 0.5},
    "all the way": {"pull": 50.0},
    "no outer momentum": {"pull": 1.0, "outer_momentum": 0.0},
    "restart": {"pull": 1.0, "inner_state": "restart"},
}


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((30, 50), (7,), (3, 2, 5, 5))
    ]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    return params


def train(params, opt, steps=9, first=0):
    for t in range(first, first + steps):
        for k, p in enumerate(params):
            generator = torch.Generator().manual_seed(100 * t + k)
            p.grad = 0.3 * p.detach() + torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()


def general(opt):
    """The oracle: the same with everything by torch's operations."""
    opt._one_pass.inner = lambda *_: False
    opt._one_pass.outer = lambda *_: False
    return opt


@pytest.mark.parametrize("setting", OUTER.values(), ids=OUTER.keys())
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER.keys())
def test_equals_the_general_way(inner, setting):
    ours, theirs = weights(torch.float64), weights(torch.float64)
    opt = wideflat.Entropic(inner(ours, fused=True), inner_steps=4, **setting)
    oracle = general(wideflat.Entropic(inner(theirs, fused=True), inner_steps=4, **setting))
    train(ours, opt)
    train(theirs, oracle)
    assert opt._one_pass._adam and opt._one_pass._sgd
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        assert opt.state[p].keys() == oracle.state[q].keys()
        for name, value in oracle.state[q].items():
            torch.testing.assert_close(opt.state[p][name], value, rtol=1e-11, atol=1e-12)


def test_a_file_in_mid_cycle_continues_bit_for_bit():
    params = weights()
    opt = wideflat.Entropic(INNER["AdamW"](params, fused=True), inner_steps=4, pull=1.0, epsilon=0.1, alpha=0.5)
    train(params, opt, 6)
    again = [nn.Parameter(p.detach().clone()) for p in params]
    other = wideflat.Entropic(INNER["AdamW"](again, fused=True), inner_steps=4, pull=1.0, epsilon=0.1, alpha=0.5)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(params, opt, 7, first=6)
    train(again, other, 7, first=6)
    assert all(torch.equal(p, q) for p, q in zip(params, again, strict=True))


def unknown(what, params):
    if what == "not fused":
        return torch.optim.AdamW(params, lr=0.01)
    if what == "amsgrad":
        return torch.optim.AdamW(params, lr=0.01, amsgrad=True, fused=True)
    if what == "a class of one's own":
        return type("Mine", (torch.optim.AdamW,), {})(params, lr=0.01, fused=True)
    inner = torch.optim.AdamW(params, lr=0.01, fused=True)
    if what == "a hook":
        inner.register_step_post_hook(lambda *_: calls.append(1))
    else:
        torch.optim.lr_scheduler.ConstantLR(inner)
    return inner


calls = []


@pytest.mark.parametrize("what", ["not fused", "amsgrad", "a class of one's own", "a hook", "a scheduler inside"])
def test_what_is_unknown_or_watched_takes_its_own_step(what):
    calls.clear()
    params = weights()
    opt = wideflat.Entropic(unknown(what, params), inner_steps=4, pull=1.0)
    train(params, opt, 6)
    assert not opt._one_pass._adam
    assert len(calls) == (6 if what == "a hook" else 0)


def test_a_parameter_with_its_first_gradient_in_mid_cycle():
    ours, theirs = weights(torch.float64), weights(torch.float64)
    opts = [wideflat.Entropic(INNER["AdamW"](params, fused=True), inner_steps=4, pull=1.0) for params in (ours, theirs)]
    general(opts[1])
    for params, opt in zip((ours, theirs), opts, strict=True):
        for t in range(6):
            for k, p in enumerate(params):
                p.grad = None if k == 1 and t < 2 else torch.full_like(p, 0.1 * (t + 1))
            opt.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_autograd_notices_the_step():
    (p, *_) = params = weights()
    opt = wideflat.Entropic(INNER["AdamW"](params, fused=True), inner_steps=4, pull=1.0)
    train(params, opt, 1)
    version = p._version
    train(params, opt, 1)
    assert opt._one_pass._adam and p._version > version
