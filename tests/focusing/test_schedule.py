"""Schedules of gamma."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import wideflat


def optimizer(**settings):
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    groups = [{"params": params[:1], "gamma": 0.1}, {"params": params[1:], "gamma": 0.2}]
    return wideflat.EntropySGD(groups, **settings)


@given(gamma0=st.floats(1e-6, 10), factor=st.floats(1e-3, 1e5), total=st.integers(1, 1000), tau=st.integers(0, 1500))
def test_closed_forms(gamma0, factor, total, tau):
    part = min(tau / total, 1)
    expected = {
        "exponential": gamma0 * factor**part,
        "cosine": 0.5 * 3.0 * (1 - math.cos(math.pi * part)),
        "constant": gamma0,
    }
    for kind, value in expected.items():
        target = SimpleNamespace(gamma=gamma0)
        focusing = wideflat.Focusing(target, factor, total, kind=kind, gamma_max=3.0)
        focusing.load_state_dict({**focusing.state_dict(), "tau": tau})
        assert target.gamma == pytest.approx(value, rel=1e-12)
        assert focusing.gamma == target.gamma


def test_every_group_of_an_optimizer_is_focused_from_its_own_gamma():
    opt = optimizer()
    focusing = wideflat.Focusing(opt, factor=100.0, total=4)
    for _ in range(2):
        focusing.step()
    assert [group["gamma"] for group in opt.param_groups] == pytest.approx([1.0, 2.0])
    for _ in range(5):
        focusing.step()
    assert [group["gamma"] for group in opt.param_groups] == pytest.approx([10.0, 20.0])  # stays at the end
    again = optimizer()
    wideflat.Focusing(again, factor=2.0, total=9, gamma0=7.0).load_state_dict(focusing.state_dict())
    assert [group["gamma"] for group in again.param_groups] == [group["gamma"] for group in opt.param_groups]


def test_a_function_and_a_cosine_up_to_factor_times_gamma0():
    target = SimpleNamespace(gamma=0.5)
    focusing = wideflat.Focusing(target, kind=lambda tau: 3.0 * tau)
    focusing.step()
    assert target.gamma == 3.0
    target.gamma = 0.5
    focusing = wideflat.Focusing(target, factor=4.0, total=1, kind="cosine")
    assert target.gamma == 0.0
    focusing.step()
    assert target.gamma == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        (SimpleNamespace(gamma=0.0), {"total": 1}, "starts from a gamma0 > 0"),
        (SimpleNamespace(gamma=1.0), {}, "total must be > 0.*got None"),
        (SimpleNamespace(gamma=1.0), {"total": 0}, "total must be > 0"),
        (SimpleNamespace(gamma=1.0), {"total": 1, "factor": 0}, "factor must be > 0"),
        (SimpleNamespace(gamma=1.0), {"kind": "linear"}, "kind must be"),
        (SimpleNamespace(), {"total": 1}, "a SimpleNamespace has no gamma to focus"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))]), {"total": 1}, "param groups of SGD have no gamma"),
    ],
)
def test_refuses_bad_input(target, arguments, message):
    with pytest.raises(ValueError, match=message):
        wideflat.Focusing(target, **arguments)


def test_refuses_the_state_of_another_schedule():
    focusing = wideflat.Focusing(SimpleNamespace(gamma=1.0), total=2)
    with pytest.raises(ValueError, match="saved focusing is of kind 'constant'"):
        focusing.load_state_dict({**focusing.state_dict(), "kind": "constant"})
    with pytest.raises(ValueError, match="for 2 param groups, the target has 1"):
        focusing.load_state_dict({**focusing.state_dict(), "gamma0": [1.0, 2.0]})


def test_gamma_is_held_between_the_ticks_of_a_slower_clock():
    target = SimpleNamespace(gamma=1.0)
    focusing = wideflat.Focusing(target, factor=16.0, total=12, every=3)
    seen = []
    for _ in range(12):
        seen.append(target.gamma)
        focusing.step()
    assert seen == pytest.approx([1] * 3 + [2] * 3 + [4] * 3 + [8] * 3) and target.gamma == pytest.approx(16)
    other = wideflat.Focusing(SimpleNamespace(gamma=1.0), factor=16.0, total=12)
    other.load_state_dict({**focusing.state_dict(), "tau": 5})
    assert other.gamma == pytest.approx(2)
    before = {name: value for name, value in other.state_dict().items() if name != "every"}
    other.load_state_dict(before)  # as earlier versions saved it: a clock in steps
    assert other.gamma == pytest.approx(16 ** (5 / 12))
    with pytest.raises(ValueError, match="every must be a whole number >= 1, got 0"):
        wideflat.Focusing(target, factor=2.0, total=1, every=0)


def test_from_epochs_counts_steps_and_holds_gamma_within_an_epoch_if_asked():
    by_step = wideflat.Focusing.from_epochs(SimpleNamespace(gamma=1.0), 2, range(5), factor=100.0)
    by_epoch = wideflat.Focusing.from_epochs(SimpleNamespace(gamma=1.0), 2, 5, factor=100.0, by="epoch", gamma0=2.0)
    seen = []
    for _ in range(10):
        seen.append(by_epoch.target.gamma)
        by_step.step()
        by_epoch.step()
    assert by_step.total == by_epoch.total == 10
    assert by_step.target.gamma == pytest.approx(100.0)
    assert seen == pytest.approx([2.0] * 5 + [20.0] * 5)
    with pytest.raises(ValueError, match="by must be"):
        wideflat.Focusing.from_epochs(SimpleNamespace(gamma=1.0), 2, 5, by="hour")
    with pytest.raises(ValueError, match="at least one step"):
        wideflat.Focusing.from_epochs(SimpleNamespace(gamma=1.0), 2, [])
