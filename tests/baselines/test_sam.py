"""SAM against its definition and its peer."""

import contextlib
import copy
import pickle

import pytest
import pytorch_optimizer
import torch
from small_regression import loss_of, make_model, same, step
from torch import nn

import wideflat


def test_sam_equals_its_peer():
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    opt = wideflat.SAM(ours.parameters(), rho=0.1, **settings)
    peer = pytorch_optimizer.SAM(theirs.parameters(), torch.optim.SGD, rho=0.1, **settings)
    for t in range(6):
        step(opt, ours, t)
        peer.zero_grad()
        loss_of(theirs, t).backward()
        peer.first_step(zero_grad=True)
        loss_of(theirs, t).backward()
        peer.second_step(zero_grad=True)
        same(ours, theirs, rtol=1e-6, atol=1e-7)  # the peer takes the norm in single precision


def test_sam_without_a_radius_is_its_base_and_schedulers_reach_it():
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    opt = wideflat.SAM(ours.parameters(), torch.optim.Adam, rho=0.0, lr=0.01)
    base = torch.optim.Adam(theirs.parameters(), lr=0.01)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2) for o in (opt, base)]
    for t in range(5):
        step(opt, ours, t)
        step(base, theirs, t)
        for scheduler in schedulers:
            scheduler.step()
        same(ours, theirs, rtol=0, atol=0)
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_sam_is_saved_copied_and_refuses_to_step_blindly():
    torch.manual_seed(0)
    model = make_model()
    opt = wideflat.SAM(model.parameters(), lr=0.1, momentum=0.9)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]})
    assert opt.base.param_groups is opt.param_groups
    step(opt, model, 0)
    again, other = pickle.loads(pickle.dumps((model, opt)))
    third = copy.deepcopy(model)
    loaded = wideflat.SAM(third.parameters(), lr=9.0, momentum=0.9)
    loaded.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]})
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    for m, o in ((model, opt), (again, other), (third, loaded)):
        for t in range(1, 4):
            step(o, m, t)
    same(model, again, rtol=0, atol=0)
    same(model, third, rtol=0, atol=0)
    with pytest.raises(ValueError, match="two gradients a step"):
        opt.step()
    with pytest.raises(ValueError, match="rho must be a finite number >= 0"):
        wideflat.SAM(model.parameters(), rho=-1.0)


def test_sam_restores_the_weights_when_the_second_gradient_fails():
    w = nn.Parameter(torch.tensor(1.0))
    opt = wideflat.SAM([w], rho=0.5, lr=0.1)
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        opt.zero_grad()
        (w**2).backward()

    with pytest.raises(ZeroDivisionError):
        opt.step(closure)
    assert w.item() == 1.0


# ------------------------------------------------------------------------------------------------- SAM and its clients


def test_a_closure_that_does_not_clear_gradients():
    """Without gradients before the step there is nothing to add to: the second gradients are alone, too."""
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    opt, other = (wideflat.SAM(model.parameters(), rho=0.1, lr=0.1) for model in (ours, theirs))
    for t in range(3):

        def closure(t=t):
            loss = loss_of(ours, t)
            loss.backward()
            return loss

        opt.zero_grad()
        opt.step(closure)
        step(other, theirs, t)
        same(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("style", ["backward first", "accumulation"])
def test_gradients_from_before_that_the_closure_adds_to_are_refused_in_the_first_step(style):
    torch.manual_seed(0)
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    opt = wideflat.SAM(model.parameters(), lr=0.1)
    loss_of(model, 0 if style == "backward first" else 1).backward()
    with pytest.raises(RuntimeError, match="adds to gradients that were there before"):
        opt.step(lambda: loss_of(model, 0).backward())
    torch.testing.assert_close([p.detach() for p in model.parameters()], before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_from_before_that_the_closure_clears_do_not_matter(set_to_none):
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    opt, other = (wideflat.SAM(model.parameters(), rho=0.1, lr=0.1) for model in (ours, theirs))
    loss_of(ours, 7).backward()

    def closure():
        opt.zero_grad(set_to_none=set_to_none)
        loss_of(ours, 0).backward()

    opt.step(closure)
    step(other, theirs, 0)
    same(ours, theirs)


def test_a_closure_that_makes_no_gradients_leaves_them():
    w = nn.Parameter(torch.tensor([1.0, 2.0]))
    w.grad = torch.tensor([1.0, 1.0])
    wideflat.SAM([w], rho=0.5, lr=0.1).step(lambda: None)
    torch.testing.assert_close(w.detach(), torch.tensor([0.9, 1.9]))


def test_perturb_and_restore_are_the_step_without_a_closure():
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    opt, other = (wideflat.SAM(model.parameters(), rho=0.1, lr=0.1, momentum=0.9) for model in (ours, theirs))
    for t in range(4):
        opt.zero_grad()
        loss_of(ours, t).backward()
        opt.perturb()
        with pytest.raises(RuntimeError, match=r"call restore\(\) first"):
            opt.step()
        with pytest.raises(RuntimeError, match="called twice"):
            opt.perturb()
        loss_of(ours, t).backward()
        opt.restore()
        opt.step()
        step(other, theirs, t)
        same(ours, theirs, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="without perturb"):
        opt.restore()
    with pytest.raises(ValueError, match="two gradients a step"):
        opt.step()


def test_sam_refuses_sparse_gradients_in_a_sentence():
    embedding = nn.Embedding(4, 2, sparse=True)
    opt = wideflat.SAM(embedding.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="SAM does not support sparse gradients"):
        opt.step(lambda: embedding(torch.tensor([1])).sum().backward())


def test_the_radius_in_half_precision_is_measured_in_single():
    w = nn.Parameter(torch.full((10_000,), 1.0, dtype=torch.float16))
    w.grad = torch.full_like(w, 1000.0)  # its norm, 1e5, is no number in float16
    opt = wideflat.SAM([w], rho=100.0, lr=0.1)
    with pytest.warns(UserWarning, match="16-bit weights"):
        opt.perturb()
    torch.testing.assert_close(w.detach(), torch.full_like(w, 2.0))


def test_a_step_inside_of_autocast_sees_the_perturbed_weights():
    """Autocast keeps weights that it has cast until its end: the second gradients were those of the first place."""
    x, y = torch.randn(32, 10), torch.randint(3, (32,))
    found = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(10, 3)
        opt = wideflat.SAM(model.parameters(), rho=1.0, lr=0.1)

        def closure(opt=opt, model=model):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
            opt.step(closure)
        found.append(model.weight.detach())
    assert torch.equal(*found)
