"""SAM's family: step by step against twins from the papers' boxes, peers and closed forms; what all of it shares."""

import copy
import pickle
from functools import partial

import pytest
import pytorch_optimizer
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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("asam", {"eta": 0.3}),
        ("gsam", {"alpha": 1.0}),
        ("friendly", {"sigma": 0.6, "decay": 0.7}),
        ("look", {"period": 2, "alpha": 0.3}),
    ],
)
def test_their_settings_are_those_of_the_boxes(name, settings):
    torch.manual_seed(0)
    model = make_model()
    twin, opt = Twin(model), type(FAMILY[name](model.parameters()))(model.parameters(), rho=RHO, lr=RATE, **settings)
    for t in range(6):
        step(opt, model, t)
        twin.step(name, t, **settings)
        torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), twin.w)


# ------------------------------------------------------------------------------------------------------------- peers


def peer_step(peer, model, t):
    peer.zero_grad()
    loss_of(model, t).backward()
    peer.first_step(zero_grad=True)
    loss_of(model, t).backward()
    peer.second_step(zero_grad=True)


PEERS = {
    "asam": (partial(wideflat.ASAM, eta=0.0), partial(pytorch_optimizer.SAM, adaptive=True)),
    "friendly": (wideflat.FriendlySAM, pytorch_optimizer.FriendlySAM),
}


@pytest.mark.parametrize("name", PEERS)
def test_those_that_have_a_peer_equal_it(name):
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    settings = {"rho": RHO, "lr": RATE, "momentum": 0.9, "weight_decay": 0.01}
    opt = PEERS[name][0](ours.parameters(), **settings)
    peer = PEERS[name][1](theirs.parameters(), torch.optim.SGD, **settings)
    for t in range(8):
        step(opt, ours, t)
        peer_step(peer, theirs, t)
        same(ours, theirs, rtol=1e-5, atol=1e-6)  # the peer takes the norm in single precision


def test_looksam_equals_its_peer_where_there_is_one_parameter():
    """The peer takes lengths and angles within each parameter, the paper those of the whole gradient."""
    torch.manual_seed(0)
    ours = nn.Linear(3, 1, bias=False).double()
    theirs = copy.deepcopy(ours)
    opt = wideflat.LookSAM(ours.parameters(), rho=RHO, period=3, lr=RATE, momentum=0.9)
    peer = pytorch_optimizer.LookSAM(theirs.parameters(), torch.optim.SGD, rho=RHO, k=3, lr=RATE, momentum=0.9)
    for t in range(8):
        step(opt, ours, t)
        peer_step(peer, theirs, t)
        same(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gsam_equals_its_peer():
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    opt = wideflat.GSAM(ours.parameters(), rho=RHO, alpha=0.4, lr=RATE, momentum=0.9)

    class Constant:
        def step(self):
            return RHO

    base = torch.optim.SGD(theirs.parameters(), lr=RATE, momentum=0.9)
    peer = pytorch_optimizer.GSAM(theirs.parameters(), base, theirs, Constant(), alpha=0.4)
    for t in range(8):
        step(opt, ours, t)

        def closure(t=t):
            base.zero_grad()
            with torch.enable_grad():
                loss = loss_of(theirs, t)
            loss.backward()
            return None, loss

        peer.step(closure)
        same(ours, theirs, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------------- closed forms and limits


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


@pytest.mark.parametrize(
    "variant",
    [
        partial(wideflat.SAM, adaptive=True, eta=1e9),  # the sizes of all weights are alike
        partial(wideflat.GSAM, alpha=0.0),
        partial(wideflat.FriendlySAM, sigma=0.0),
        partial(wideflat.LookSAM, period=1),
    ],
)
def test_each_has_sam_as_a_limit(variant):
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    rho = RHO / 1e9 if variant.keywords.get("adaptive") else RHO
    opt, other = variant(ours.parameters(), rho=rho, lr=RATE), wideflat.SAM(theirs.parameters(), rho=RHO, lr=RATE)
    for t in range(5):
        step(opt, ours, t)
        step(other, theirs, t)
        same(ours, theirs, rtol=1e-7, atol=1e-8)


def test_the_radius_of_gsam_follows_the_learning_rate():
    w = nn.Parameter(torch.tensor(1.0))
    opt = wideflat.GSAM([w], rho=0.4, rho_min=0.2, alpha=0.0, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 - t / 4)
    radii = []
    for _ in range(5):
        w.data.fill_(1.0)
        w.grad = torch.tensor(1.0)
        opt.perturb()
        radii.append(w.item() - 1)
        w.grad = torch.tensor(0.0)
        opt.restore()
        opt.step()
        scheduler.step()
    assert radii == pytest.approx([0.4, 0.35, 0.3, 0.25, 0.2])


# ----------------------------------------------------------------------------------------------- what all of it shares


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


def test_gradients_that_were_unscaled_too_early_are_refused():
    w = nn.Parameter(torch.ones(2))
    opt = wideflat.SAM([w], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(w.sum()).backward()
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"unscale_\(opt\) was called before"):
        opt.perturb(scaler)


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


# ----------------------------------------------------------------------------------------------------- misuse by hand


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
    for wrong in (
        lambda: wideflat.GSAM(model.parameters(), alpha=-1.0),
        lambda: wideflat.LookSAM(model.parameters(), period=0),
        lambda: wideflat.FriendlySAM(model.parameters(), decay=2.0),
        lambda: wideflat.SAM([{"params": model.parameters(), "rho": -1.0}]),
    ):
        with pytest.raises(ValueError, match="must be"):
            wrong()


def test_a_parameter_without_a_second_gradient_has_none_in_the_step():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = wideflat.SAM([a, b], lr=0.1)
    (a + b).sum().backward()
    opt.perturb()
    a.sum().backward()
    opt.restore()
    opt.step()
    assert (a.item(), b.item()) == (pytest.approx(0.9), 1.0)
