"""The lists of a step are kept only while nothing but the gradients changes."""

import copy

import pytest
import torch
from torch import nn

import wideflat


def make(**changes):
    params = [nn.Parameter(torch.full((3,), 1.0 + k)) for k in range(3)]
    return params, wideflat.EntropySGD(params, **({"inner_steps": 4, "epsilon": 0.01, "momentum": 0.9} | changes))


def step(params, opt, without=()):
    for k, p in enumerate(params):
        p.grad = None if k in without else p.detach() * (k + 1)
    opt.step()


def forgetful(opt):
    """The oracle: an optimizer that gathers its lists anew at every step, and its outer step by looking at weights."""
    opt._parts_of_step = lambda: opt._parts(opt._has_gradient)
    opt._parts_that_moved = lambda: opt._parts(opt._has_moved)
    return opt


@pytest.mark.parametrize("fused", [None, False])
def test_what_is_kept_is_as_good_as_what_is_gathered_anew(fused):
    (params, opt), (others, oracle) = make(fused=fused), make(fused=fused)
    forgetful(oracle)
    absent = [(), (), (1,), (), (), (), (), (), (2,), (2,), (2,), (2,), (), (0,), (1,), (2,), ()]
    for without in absent:
        step(params, opt, without)
        step(others, oracle, without)
        for p, q in zip(params, others, strict=True):
            assert torch.equal(p, q)
            assert all(torch.equal(opt.state[p][name], oracle.state[q][name]) for name in oracle.state[q])


def test_lists_are_gathered_once_for_many_steps():
    params, opt = make()
    step(params, opt)
    first = opt._last
    for _ in range(9):
        step(params, opt)
    assert opt._last is first


def change(what, params, opt):
    if what == "state emptied":
        opt.state.clear()
    elif what == "state of one replaced":
        opt.state[params[1]] = {name: value.clone() for name, value in opt.state[params[1]].items()}
    elif what == "a tensor replaced":
        opt.state[params[1]]["center"] = opt.state[params[1]]["center"].clone()
    elif what == "no gradient":
        params[1].grad = None
    else:
        params.append(nn.Parameter(torch.ones(2)))
        params[-1].grad = torch.ones(2)
        opt.add_param_group({"params": [params[-1]]})


@pytest.mark.parametrize(
    "what", ["state emptied", "state of one replaced", "a tensor replaced", "no gradient", "a group added"]
)
def test_a_change_is_noticed(what):
    params, opt = make()
    step(params, opt)
    first = opt._last
    change(what, params, opt)
    opt.step()
    assert opt._last is not first
    assert sum(len(part.params) for part in opt._last) == sum(p.grad is not None for p in params)


def test_a_group_added_just_before_a_flush_has_not_moved():
    params, opt = make()
    step(params, opt)
    new = nn.Parameter(torch.ones(2))
    opt.add_param_group({"params": [new]})
    opt.flush()
    assert torch.equal(new, torch.ones(2)) and opt.at_center


def test_gradients_are_not_kept_beyond_the_step():
    params, opt = make()
    step(params, opt)
    assert not any(part.gradients for part in opt._last)


def test_a_copy_in_mid_cycle_finds_out_what_has_moved():
    params, opt = make()
    step(params, opt)
    step(params, opt, without=(1,))
    twin = copy.deepcopy(opt)
    others = twin.param_groups[0]["params"]
    for p, q in zip(params, others, strict=True):
        p.grad = q.grad = None
    opt.flush()
    twin.flush()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
