"""Closures and their gradients: what was there before, is forgotten or done twice is not taken for a gradient."""

import copy

import pytest
import torch
from sam_twins import RATE
from small_regression import loss_of, make_model, same, step
from torch import nn

import wideflat


def test_gradients_that_were_unscaled_too_early_are_refused():
    w = nn.Parameter(torch.ones(2))
    opt = wideflat.SAM([w], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(w.sum()).backward()
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"unscale_\(opt\) was called before"):
        opt.perturb(scaler)


def test_what_was_forgotten_is_said():
    torch.manual_seed(0)
    model = make_model()
    opt = wideflat.SAM(model.parameters(), lr=RATE)
    loss_of(model, 0).backward()
    opt.perturb()
    with pytest.raises(RuntimeError, match="found no second gradients"):
        opt.restore()
    loss_of(model, 0).backward()
    opt.perturb()
    loss_of(model, 0).backward()
    opt.restore()
    opt.step(lambda: None)  # as Lightning does in manual optimisation
    with pytest.raises(ValueError, match="two gradients a step"):
        opt.step()
    opt.zero_grad()
    loss_of(model, 0).backward()
    opt.perturb()
    loss_of(model, 0).backward()
    opt.restore()

    def closure():
        opt.zero_grad()
        loss_of(model, 0).backward()

    with pytest.raises(RuntimeError, match="made gradients once more"):
        opt.step(closure)


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


def test_sam_refuses_sparse_gradients_in_a_sentence():
    embedding = nn.Embedding(4, 2, sparse=True)
    opt = wideflat.SAM(embedding.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="SAM does not support sparse gradients"):
        opt.step(lambda: embedding(torch.tensor([1])).sum().backward())
