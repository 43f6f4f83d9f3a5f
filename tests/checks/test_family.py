"""Settings of the entropic family: at the door, and where a group was changed since."""

import warnings

import pytest
import torch
from torch import nn

import wideflat


def params():
    return [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"inner_steps": 2.0}, TypeError, "inner_steps must be a whole number >= 1, got 2.0"),
        ({"inner_steps": 0}, ValueError, "inner_steps must be a whole number >= 1"),
        ({"epsilon": -1.0}, ValueError, "epsilon must be"),
        ({"alpha": 1.5}, ValueError, "alpha must be"),
        ({"seed": 0.5}, ValueError, "seed must be a whole number, got 0.5"),
        ({"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
        ({"outer_momentum": -0.1}, ValueError, "outer_momentum, unless it is None, must be"),
        ({"momentum": 0.0, "nesterov": True}, ValueError, "nesterov needs a momentum > 0"),
        ({"outer_momentum": 0.0, "outer_nesterov": True}, ValueError, "outer_nesterov needs a outer_momentum > 0"),
        ({"differentiable": True}, ValueError, "differentiable=True is not supported"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_door(changes, error, message):
    with pytest.raises(error, match=message):
        wideflat.EntropySGD(params(), **{"lr": 0.5, "inner_lr": 0.1, **changes})


def test_groups_that_were_moved_apart_are_said():
    first, second = params()
    opt = wideflat.EntropySGD([{"params": [first]}, {"params": [second]}], lr=0.5, inner_lr=0.1, inner_steps=3)
    assert opt.at_center
    opt.param_groups[1]["position"] = 2
    with pytest.raises(ValueError, match=r"their positions are \[0, 2\] and their inner_steps \[3\]; make them equal"):
        _ = opt.at_center
    opt.param_groups[1]["position"] = "two"
    with pytest.raises(TypeError, match="position must be"):
        _ = opt.at_center


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({"inner_steps": 5}, True), ({"inner_steps": 10}, False), ({"inner_steps": 5, "gamma": 0.0}, False)],
)
def test_a_pull_through_the_gradient_of_adam_is_warned_of_in_short_cycles(settings, warned):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wideflat.EntropySGD(params(), lr=0.5, inner_lr=1e-3, inner=torch.optim.Adam, **{"gamma": 0.5, **settings})
    assert [str(each.message).startswith("gamma > 0 in the gradient of Adam") for each in said] == [True] * warned
