"""SAM's family: step by step against twins from the papers' boxes; what all of it shares."""

import copy
import pickle
from functools import partial

import pytest
import torch
from sam_twins import FAMILY, RATE, RHO, Twin
from small_regression import loss_of, make_model, same, step
from torch import nn

import wideflat

every = pytest.mark.parametrize("name", FAMILY)


def by_hand(opt, model, t, scaler=None):
    """The step without a closure."""
    opt.zero_grad()
    loss_of(model, t).backward()
    if opt.perturb():
        loss_of(model, t).backward()
    opt.restore()
    opt.step()


@every
@pytest.mark.parametrize("stepped", [step, by_hand], ids=["closure", "by hand"])
def test_each_is_the_box_of_its_paper(name, stepped):
    torch.manual_seed(0)
    model = make_model()
    twin, opt = Twin(model), FAMILY[name](model.parameters(), lr=RATE)
    for t in range(8):
        stepped(opt, model, t)
        twin.step(name, t)
        torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), twin.w)


# ----------------------------------------------------------------------------------------------- what all of it shares


@every
def test_saved_copied_and_resumed_bit_for_bit(name):
    torch.manual_seed(0)
    model = make_model()
    adam = partial(torch.optim.Adam, lr=0.01)
    opt = FAMILY[name](model.parameters(), adam)
    for t in range(4):
        step(opt, model, t)
    third = copy.deepcopy(model)
    loaded = FAMILY[name](third.parameters(), adam)
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    again, other = pickle.loads(pickle.dumps((model, opt)))
    for m, o in ((model, opt), (again, other), (third, loaded)):
        for t in range(4, 9):
            step(o, m, t)
    same(model, again, rtol=0, atol=0)
    same(model, third, rtol=0, atol=0)


@every
def test_no_number_leaves_the_device_within_a_step(name, monkeypatch):
    torch.manual_seed(0)
    model = make_model()
    opt = FAMILY[name](model.parameters(), lr=RATE)

    def refuse(*_):
        raise AssertionError("the host waits for the device")

    for t in range(4):
        opt.zero_grad()
        loss_of(model, t).backward()
        with monkeypatch.context() as patched:
            for reading in ("item", "tolist", "__bool__", "__float__", "__int__"):
                patched.setattr(torch.Tensor, reading, refuse)
            again = opt.perturb()
        if again:
            loss_of(model, t).backward()
        with monkeypatch.context() as patched:
            for reading in ("item", "tolist", "__bool__", "__float__", "__int__"):
                patched.setattr(torch.Tensor, reading, refuse)
            opt.restore()
            opt.step()


@every
def test_accumulated_gradients_are_those_of_the_whole_mini_batch(name):
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    opt, other = (FAMILY[name](m.parameters(), lr=RATE) for m in (ours, theirs))
    for t in range(0, 8, 2):
        opt.zero_grad()
        for part in (t, t + 1):
            (loss_of(ours, part) / 2).backward()
        if opt.perturb():
            for part in (t, t + 1):
                (loss_of(ours, part) / 2).backward()
        opt.restore()
        opt.step()

        def closure(t=t):
            other.zero_grad()
            loss = (loss_of(theirs, t) + loss_of(theirs, t + 1)) / 2
            loss.backward()
            return loss

        other.step(closure)
        same(ours, theirs)


# --------------------------------------------------------------------------------------------------- mixed precision


@every
def test_a_scaler_changes_nothing(name):
    """Powers of two: bit for bit what happens without it; and the scale may change from step to step."""
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    opt, other = (FAMILY[name](m.parameters(), lr=RATE, momentum=0.9) for m in (ours, theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for t in range(8):
        opt.zero_grad()
        scaler.scale(loss_of(ours, t)).backward()
        if opt.perturb(scaler):
            scaler.scale(loss_of(ours, t)).backward()
        opt.restore()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(ours.parameters(), 1e9)
        scaler.step(opt)
        scaler.update()
        by_hand(other, theirs, t)
        same(ours, theirs, rtol=1e-9, atol=1e-12)
    assert scaler.get_scale() > 2.0**10


@every
def test_an_infinite_first_gradient_skips_both_halves(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    twin = copy.deepcopy(model)
    opt, other = (FAMILY[name](m.parameters(), lr=RATE, model=m) for m in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t in range(6):
        if t == 3:  # an overflow in the first pass alone, as of a scale that is too large
            state = copy.deepcopy(opt.state_dict())
            before = [p.detach().clone() for p in model.parameters()]
            opt.zero_grad()
            scaler.scale(loss_of(model.eval(), t)).backward()
            model.train()
            model[0].weight.grad[0, 0] = torch.inf
            opt.perturb(scaler)
            assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
            scaler.scale(loss_of(model.eval(), t)).backward()
            model.train()
            opt.restore()
            scaler.step(opt)
            scaler.update()
            assert scaler.get_scale() == 2.0
            assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
            assert all(torch.isfinite(b).all() for b in model.buffers())
            torch.testing.assert_close(opt.state_dict()["state"], state["state"])
        opt.zero_grad()
        scaler.scale(loss_of(model, t)).backward()
        if opt.perturb(scaler):
            scaler.scale(loss_of(model, t)).backward()
        opt.restore()
        scaler.step(opt)
        scaler.update()
        by_hand(other, twin, t)
        same(model, twin, rtol=1e-9, atol=1e-12)


def test_batch_norm_sees_each_mini_batch_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    opt = wideflat.SAM(model.parameters(), rho=RHO, lr=RATE, model=model)
    for t in range(3):
        twin = copy.deepcopy(model)
        loss_of(twin, t)
        (by_hand if t % 2 else step)(opt, model, t)
        for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(ours, theirs)
