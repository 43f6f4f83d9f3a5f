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


def test_on_a_quadratic_the_gradient_is_that_of_the_point_on_the_sphere():
    """Loss h w^2 / 2 in two directions: grad at w + rho H w / |H w|."""
    h = torch.tensor([1.0, 4.0], dtype=torch.float64)
    w = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    opt = wideflat.SAM([w], rho=0.5, lr=0.1)
    expected = w.detach().clone()
    for _ in range(10):
        opt.zero_grad()
        (h * w**2 / 2).sum().backward()
        opt.perturb()
        (h * w**2 / 2).sum().backward()
        opt.restore()
        opt.step()
        g = h * expected
        expected = expected - 0.1 * h * (expected + 0.5 * g / g.norm())
        torch.testing.assert_close(w.detach(), expected)


def test_each_group_has_a_radius_and_a_measure_of_its_own():
    torch.manual_seed(0)
    a, b, c = (nn.Parameter(torch.full((1,), value, dtype=torch.float64)) for value in (1.0, 2.0, 3.0))
    groups = [{"params": [a]}, {"params": [b], "rho": 0.3}, {"params": [c], "adaptive": True}]
    opt = wideflat.SAM(groups, rho=0.1, eta=0.5, lr=0.1)
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    opt.perturb()
    norm = (1 + 1 + 3.5**2) ** 0.5
    moved = [a.item() - 1, b.item() - 2, c.item() - 3]
    assert moved == pytest.approx([0.1 / norm, 0.3 / norm, 0.1 * 3.5**2 / norm])


def test_sixteen_bit_weights_are_perturbed_in_float32_if_asked_for():
    torch.manual_seed(0)
    half = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).bfloat16()
    x = torch.randn(32, 64)
    changed = {}
    for wanted in (None, torch.float32):
        model = copy.deepcopy(half)
        opt = wideflat.SAM(model.parameters(), rho=0.05, lr=0.1, perturb_dtype=wanted)
        before = [p.detach().clone() for p in model.parameters()]
        places = [p.data_ptr() for p in model.parameters()]
        model(x.bfloat16()).square().mean().backward()
        if wanted is None:
            with pytest.warns(UserWarning, match="perturb_dtype=torch.float32"):
                opt.perturb()
        else:
            opt.perturb()
        moved = [(p.float() - w.float()).flatten() for p, w in zip(model.parameters(), before, strict=True)]
        moved = torch.cat(moved)
        changed[wanted] = (moved != 0).double().mean().item()
        if wanted is not None:
            assert moved.norm().item() == pytest.approx(0.05, rel=1e-3)
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        opt.restore()
        assert [p.data_ptr() for p in model.parameters()] == places
        assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
        assert all(p.grad.dtype == p.dtype == torch.bfloat16 for p in model.parameters())
        opt.step()
    assert changed[None] < 0.9 < 0.99 < changed[torch.float32]


class Kept(nn.Module):
    """A product of weights that is made once for each version of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4, 3))
        self.kept = None, None

    def forward(self, x):
        version = self.a._version, self.b._version
        if self.kept[0] != version:
            self.kept = version, self.a.detach() @ self.b.detach()
        return x @ self.kept[1].T + 0 * (self.a.sum() + self.b.sum())


@pytest.mark.parametrize("wanted", [None, torch.float64], ids=["in place", "in another type"])
def test_what_a_network_keeps_of_its_weights_is_not_taken_for_another_point(wanted):
    torch.manual_seed(0)
    model, x = Kept(), torch.randn(5, 3)
    opt = wideflat.SAM(model.parameters(), rho=0.5, lr=0.0, perturb_dtype=wanted)

    def right():
        product = (model.a @ model.b).detach()
        assert torch.allclose(model(x.to(model.a.dtype)), x.to(model.a.dtype) @ product.T)

    right()
    (model.a.square().sum() + model.b.square().sum()).backward()
    opt.perturb()
    right()
    (model.a.square().sum() + model.b.square().sum()).backward()
    opt.restore()
    right()


def test_a_parameter_without_a_second_gradient_has_none_in_the_step():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = wideflat.SAM([a, b], lr=0.1)
    (a + b).sum().backward()
    opt.perturb()
    a.sum().backward()
    opt.restore()
    opt.step()
    assert (a.item(), b.item()) == (pytest.approx(0.9), 1.0)


def test_a_negative_radius_is_refused_in_a_group_too():
    with pytest.raises(ValueError, match="rho must be"):
        wideflat.SAM([{"params": nn.Linear(2, 2).parameters(), "rho": -1.0}])
