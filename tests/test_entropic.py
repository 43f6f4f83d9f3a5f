"""Entropic against a transcription of its box, around every optimizer of torch, and the ways it is used."""

import copy
import io
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import wideflat
from wideflat.kernels.library import kernel_is_there
from wideflat.kernels.noise import GaussianNoise

#: Every optimizer of torch.optim with state, with the settings that make all of it matter.
INNER = {
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.1),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": partial(torch.optim.ASGD, t0=2),
    "Adafactor": torch.optim.Adafactor,
}
#: torch 2.9 has it, and later ones.
HAS_MUON = hasattr(torch.optim, "Muon")
if HAS_MUON:
    INNER["Muon"] = torch.optim.Muon


class Naive:
    """The box of the docstring, parameter by parameter, around a copy of the inner optimizers.

    The inner optimizers work on copies w' of their own; restarted ones are made anew.
    """

    def __init__(self, params, make, outer, *, inner_steps, pull=0.0, gamma=0.0, alpha=0.0, epsilon=0.0, restart=False):
        self.w = [nn.Parameter(p.detach().clone()) for p in params]
        self.w_prime = [nn.Parameter(p.detach().clone()) for p in params]
        self.make, self.restart, self.noise = make, restart, GaussianNoise(0)
        self.inner, self.outer = make(self.w_prime), outer(self.w)
        self.L, self.pull, self.gamma, self.alpha, self.epsilon = inner_steps, pull, gamma, alpha, epsilon
        self.t = 0

    def step(self, gradients):
        if self.t % self.L == 0:
            self.mu = [w.detach().clone() for w in self.w]
            if self.restart:
                self.inner = self.make(self.w_prime)
        place = 0
        for w_prime, w, g in zip(self.w_prime, self.w, gradients, strict=True):
            if self.t % self.L:
                w_prime.data -= self.pull / self.L * (w_prime.data - w.data)
            w_prime.grad = g + self.gamma * (w_prime.data - w.data)
        self.inner.step()
        lr = self.inner.param_groups[0]["lr"]
        for i, w_prime in enumerate(self.w_prime):
            z = self.noise(self.t, place, w_prime.numel(), w_prime.dtype).view(w_prime.shape)
            place += w_prime.numel()
            w_prime.data += math.sqrt(lr) * self.epsilon * z
            self.mu[i] = self.alpha * self.mu[i] + (1 - self.alpha) * w_prime.data
        self.t += 1
        if self.t % self.L == 0:
            for w, mu in zip(self.w, self.mu, strict=True):
                w.grad = w.data - mu
            self.outer.step()
            for w_prime, w in zip(self.w_prime, self.w, strict=True):
                w_prime.data = w.data.clone()


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in [(5, 3), (4, 6)]]


def gradients(t, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + t)
    return [torch.randn(p.shape, dtype=dtype, generator=generator) for p in parameters()]


def nesterov(params, lr=0.67, momentum=0.67):
    return torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=momentum > 0)


def go(opt, params, steps, start=0):
    for t in range(start, start + steps):
        for p, g in zip(params, gradients(t, params[0].dtype), strict=True):
            p.grad = g.to(p.dtype)
        opt.step()


def compare(opt, params, naive, steps):
    for t in range(steps):
        go(opt, params, 1, start=t)
        naive.step(gradients(t))
        for p, w_prime, w in zip(params, naive.w_prime, naive.w, strict=True):
            torch.testing.assert_close(p.detach(), w_prime.detach(), rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(opt.state[p]["center"], w.detach(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("state", ["keep", "restart"])
@pytest.mark.parametrize("name", INNER)
def test_around_every_optimizer_it_equals_the_box(name, state):
    params = parameters()
    make = partial(INNER[name], lr=0.01)
    settings = {"inner_steps": 4, "pull": 0.8, "alpha": 0.3, "epsilon": 0.01}
    opt = wideflat.Entropic(make(params), **settings, inner_state=state)
    compare(opt, params, Naive(params, make, nesterov, **settings, restart=state == "restart"), 14)


@pytest.mark.filterwarnings("ignore:gamma > 0 in the gradient")
@pytest.mark.parametrize("state", ["keep", "restart"])
@pytest.mark.parametrize("name", INNER)
def test_inside_entropy_sgd_every_state_is_whole_or_restarted(name, state):
    params = parameters()
    settings = {"inner_steps": 4, "gamma": 0.4, "alpha": 0.3, "epsilon": 0.01}
    make = INNER[name]
    opt = wideflat.EntropySGD(params, lr=0.7, inner_lr=0.01, **settings, momentum=0.5, inner=make, inner_state=state)

    def outer(w):
        return torch.optim.SGD(w, lr=0.7, momentum=0.5)

    compare(opt, params, Naive(params, partial(make, lr=0.01), outer, **settings, restart=state == "restart"), 14)


def test_the_built_in_sgd_of_entropy_sgd_restarts_and_may_keep_its_velocity():
    for state in ("restart", "keep"):
        params = parameters()
        settings = {"inner_steps": 3, "gamma": 0.4, "alpha": 0.3, "epsilon": 0.0}
        chosen = {} if state == "restart" else {"inner_state": state}
        opt = wideflat.EntropySGD(params, lr=0.7, inner_lr=0.01, **settings, momentum=0.9, **chosen)
        assert opt.inner_state == state
        make = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
        outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9)
        compare(opt, params, Naive(params, make, outer, **settings, restart=state == "restart"), 10)
    assert wideflat.EntropySGD(parameters(), inner=torch.optim.Adam, inner_steps=10).inner_state == "keep"


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop", "Adafactor"])
def test_any_optimizer_may_be_the_outer_one(name):
    params = parameters()
    inner, outer = partial(torch.optim.AdamW, lr=0.01), partial(INNER[name], lr=0.05)
    opt = wideflat.Entropic(inner(params), inner_steps=3, pull=0.0, outer=outer)
    compare(opt, params, Naive(params, inner, outer, inner_steps=3), 10)
    assert type(opt.outer) is type(outer(params))


def test_without_pull_and_momentum_it_is_lookahead():
    ours, theirs = parameters(), parameters()
    sgd = torch.optim.SGD(ours, lr=0.1, momentum=0.9)
    opt = wideflat.Entropic(sgd, inner_steps=4, outer_lr=0.5, outer_momentum=0.0, pull=0.0, inner_state="restart")
    peer = wideflat.Lookahead(theirs, lr=0.5, inner_lr=0.1, inner_steps=4, momentum=0.9)
    go(opt, ours, 10)
    go(peer, theirs, 10)
    torch.testing.assert_close(ours, theirs)


def test_a_displacement_is_pulled_back_by_e_to_the_minus_pull_in_a_cycle():
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sgd = torch.optim.SGD([w], lr=1.0)
    opt = wideflat.Entropic(sgd, inner_steps=1001, pull=1.0)
    for t in range(1000):
        w.grad = torch.full((1,), -1.0 if t == 0 else 0.0, dtype=torch.float64)
        opt.step()
    assert w.item() == pytest.approx(math.exp(-1), rel=2e-3)


# ------------------------------------------------------------------------------------------- the groups, the schedules


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()


def decay_groups(net):
    matrices = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def train(net, opt, steps, start=0, scheduler=None):
    for t in range(start, start + steps):
        x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
        opt.zero_grad()
        (net(x) - x[:, :2]).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if scheduler is not None:
            scheduler.step()


def test_the_param_groups_are_those_of_the_inner_optimizer_and_schedulers_drive_it():
    net, twin = network(), network()
    adamw = torch.optim.AdamW(decay_groups(net), lr=4e-3, betas=(0.9, 0.99))
    opt = wideflat.Entropic(adamw, inner_steps=4, pull=0.0)
    assert all(a is b for a, b in zip(opt.param_groups, adamw.param_groups, strict=True))
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.01, total_steps=12)
    train(net, opt, 11, scheduler=scheduler)

    other = torch.optim.AdamW(decay_groups(twin), lr=4e-3, betas=(0.9, 0.99))  # SNOO by hand
    schedule = lr_scheduler.OneCycleLR(other, max_lr=0.01, total_steps=12)
    w = [p.detach().clone() for p in twin.parameters()]
    velocity = [torch.zeros_like(p) for p in w]
    for t in range(11):
        train(twin, other, 1, start=t, scheduler=schedule)
        if t % 4 == 3:
            for center, v, p in zip(w, velocity, twin.parameters(), strict=True):
                d = center - p.data
                v.mul_(0.67).add_(d)
                center -= 0.67 * (d + 0.67 * v)
                p.data.copy_(center)
    torch.testing.assert_close(list(net.parameters()), list(twin.parameters()), rtol=1e-10, atol=1e-11)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0]
    assert opt.param_groups[0]["betas"] == other.param_groups[0]["betas"]


def muon_and_adamw(net, **settings):
    matrices, others = (group["params"] for group in decay_groups(net))
    muon, adamw = torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)
    return wideflat.Entropic(muon, adamw, inner_steps=4, **({"pull": 1.0} | settings))


@pytest.mark.skipif(not HAS_MUON, reason="this torch has no Muon")
def test_muon_and_adamw_inside():
    net = network()
    opt = muon_and_adamw(net, alpha=0.5)
    before = [p.detach().clone() for p in net.parameters()]
    lr_scheduler.LambdaLR(opt, lambda _: 0.5)
    assert [group["lr"] for group in opt.param_groups] == [0.005, 0.005]
    train(net, opt, 9)
    assert not any(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert set(opt.state) == set(net.parameters())


def test_a_group_may_be_added_and_parameters_thawed():
    net = network()
    net[0].requires_grad_(False)
    opt = wideflat.Entropic(torch.optim.AdamW([*net[0].parameters(), *net[1].parameters()]), inner_steps=3)
    train(net, opt, 2)
    opt.add_param_group({"params": list(net[2].parameters()), "lr": 0.02})
    net[0].requires_grad_(True)
    assert opt.inner[0].param_groups[1]["lr"] == opt.param_groups[1]["lr"] == 0.02
    before = [p.detach().clone() for p in net.parameters()]
    train(net, opt, 4, start=2)
    assert opt.at_center
    assert not any(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    with pytest.raises(ValueError, match="add the group to one of them"):
        others = [group["params"] for group in decay_groups(network())]
        two = wideflat.Entropic(torch.optim.SGD(others[0], lr=0.01), torch.optim.AdamW(others[1], lr=0.01))
        two.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_focusing_drives_the_pull():
    params = parameters()
    opt = wideflat.Entropic(torch.optim.SGD(params), pull=0.3)
    focusing = wideflat.Focusing(opt, factor=10.0, total=2)
    focusing.step()
    focusing.step()
    assert opt.pull == pytest.approx(3.0)
    other = wideflat.Entropic(torch.optim.SGD(parameters()), pull=0.3)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert other.pull == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: wideflat.Entropic(), ValueError, "pass at least one"),
        (lambda: wideflat.Entropic(parameters()), TypeError, "got list; make one of the parameters first"),
        (lambda: wideflat.Entropic(wideflat.EntropySGD(parameters())), TypeError, "has a center already"),
        (lambda: wideflat.Entropic(torch.optim.SGD(parameters()), inner_steps=0), ValueError, "inner_steps must be"),
        (lambda: wideflat.Entropic(torch.optim.SGD(parameters()), pull=-1), ValueError, "pull must be a finite number"),
        (lambda: wideflat.Entropic(torch.optim.SGD(parameters()), alpha=2), ValueError, "alpha must be a finite"),
        (
            lambda: wideflat.Entropic(torch.optim.SGD(parameters()), outer_lr=-1),
            ValueError,
            "outer_lr must be a finite",
        ),
        (lambda: wideflat.Entropic(torch.optim.SGD(parameters()), inner_state="half"), ValueError, "'keep' or 'rest"),
        (lambda: wideflat.Entropic(torch.optim.SGD(parameters()), state_dtype=torch.int64), ValueError, "real numbers"),
        (lambda: wideflat.Entropic(*[torch.optim.SGD(parameters())] * 2), ValueError, "more than one parameter group"),
    ],
)
def test_refuses_what_cannot_be_meant(make, error, message):
    with pytest.raises(error, match=message):
        make()


# ------------------------------------------------------------------------------------------------ saved, copied, cast

MAKERS = {
    "AdamW": lambda net: wideflat.Entropic(
        torch.optim.AdamW(decay_groups(net)), inner_steps=4, pull=1.0, alpha=0.5, epsilon=0.1
    ),
    "restarted": lambda net: wideflat.Entropic(
        torch.optim.Adagrad(net.parameters()), inner_steps=4, pull=1.0, inner_state="restart"
    ),
    "Adam outside": lambda net: wideflat.Entropic(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), outer=partial(torch.optim.Adam, lr=0.1)
    ),
}
if HAS_MUON:
    MAKERS["Muon and AdamW"] = muon_and_adamw


@pytest.mark.parametrize("steps", [3, 4, 6])
@pytest.mark.parametrize("name", MAKERS)
def test_a_file_in_mid_cycle_continues_bit_for_bit(name, steps):
    net = network()
    opt = MAKERS[name](net)
    scheduler = lr_scheduler.CosineAnnealingLR(opt, 20)
    opt.outer.param_groups[0]["lr"] *= 0.9
    opt.pull = 0.7
    train(net, opt, steps, scheduler=scheduler)
    buffer = io.BytesIO()
    torch.save([net.state_dict(), opt.state_dict(), scheduler.state_dict()], buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    again = network()
    other = MAKERS[name](again)
    schedule = lr_scheduler.CosineAnnealingLR(other, 20)
    for part, state in zip((again, other, schedule), saved, strict=True):
        part.load_state_dict(state)
    assert other.pull == 0.7
    assert other.outer.param_groups[0]["lr"] == opt.outer.param_groups[0]["lr"]
    inner = [group for optimizer in other.inner for group in optimizer.param_groups]
    assert all(a is b for a, b in zip(other.param_groups, inner, strict=True))
    third, another = pickle.loads(pickle.dumps((net, opt)))
    fourth, copied = copy.deepcopy((net, opt))
    for model, optimizer in ((net, opt), (again, other), (third, another), (fourth, copied)):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        train(model, optimizer, 7, start=steps)
    for model in (again, third, fourth):
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), model.parameters(), strict=True))


def test_a_state_dict_does_not_change_with_the_steps_after_it():
    net = network()
    opt = MAKERS["AdamW"](net)
    train(net, opt, 3)
    saved = opt.state_dict()
    train(net, opt, 2, start=3)
    assert {group["entropic"]["position"] for group in saved["param_groups"]} == {3}


def test_a_file_of_another_optimizer_is_refused():
    opt = wideflat.Entropic(torch.optim.SGD(parameters()))
    with pytest.raises(ValueError, match="not that of an Entropic"):
        opt.load_state_dict(torch.optim.SGD(parameters()).state_dict())


# ------------------------------------------------------------------------------------------------------- eval and train


def both(net):
    return {
        "Entropic": lambda: wideflat.Entropic(torch.optim.AdamW(net.parameters()), inner_steps=4, pull=1.0, alpha=0.5),
        "EntropySGD": lambda: wideflat.EntropySGD(net.parameters(), inner_steps=4, momentum=0.9),
        "Lookahead": lambda: wideflat.Lookahead(net.parameters(), inner_steps=4, momentum=0.9),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["Entropic", "EntropySGD", "Lookahead"])
def test_eval_puts_w_into_the_model_and_train_goes_on_bit_for_bit(name, dtype):
    nets = [network().to(dtype) for _ in range(3)]
    opts = [both(net)[name]() for net in nets]

    def one(net, opt, t):
        for i, p in enumerate(net.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(20 * t + i)).to(dtype)
        opt.step()

    for t in range(10):
        for net, opt in zip(nets[:2], opts[:2], strict=True):
            one(net, opt, t)
        opts[1].eval()
        opts[1].eval()  # once is enough
        assert opts[1].at_center
        assert opts[0].distance() == opts[1].distance()
        with opts[0].center(), opts[1].center():
            assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
        for call in (opts[1].step, opts[1].flush):
            with pytest.raises(RuntimeError, match=r"call opt.train\(\) first"):
                call()
        # A file that is written in this state is read into another optimizer, which is in this state then.
        nets[2].load_state_dict(nets[1].state_dict())
        opts[2].load_state_dict(copy.deepcopy(opts[1].state_dict()))
        assert opts[2].at_center
        for opt in opts[1:]:
            opt.train()
            opt.train()
        for net in nets[1:]:
            assert all(torch.equal(p, q) for p, q in zip(net.parameters(), nets[0].parameters(), strict=True))
        nets[1], opts[1], nets[2], opts[2] = nets[2], opts[2], nets[1], opts[1]


def test_eval_within_the_center_is_refused():
    net = network()
    opt = both(net)["Entropic"]()
    with opt.center():
        for call in (opt.eval, opt.train):
            with pytest.raises(RuntimeError, match="call it after the block"):
                call()


# ------------------------------------------------------------------------------------------------------------- memory


def peak_of(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


@pytest.mark.skipif(not kernel_is_there(torch.zeros(1)), reason="no C compiler here: torch needs memory for blocks")
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_two_copies_without_a_mean_and_nothing_within_a_step(alpha):
    w = nn.Parameter(torch.zeros(100_000))
    w.grad = torch.ones_like(w)
    adamw = torch.optim.AdamW([w], fused=True)
    opt = wideflat.Entropic(adamw, inner_steps=2, pull=1.0, alpha=alpha)
    for _ in range(4):
        opt.step()
    mine = {name: value for name, value in opt.state[w].items() if not name.startswith("inner_")}
    assert sum(value.numel() for value in mine.values()) == (2 if alpha == 0 else 3) * w.numel()
    for _ in range(2):
        assert peak_of(opt.step) < 0.01 * w.numel() * w.element_size()


def test_the_state_may_be_kept_elsewhere_and_in_another_type():
    params, twin = parameters(torch.float32), parameters(torch.float32)
    opt = wideflat.Entropic(torch.optim.AdamW(params), inner_steps=3, pull=1.0, alpha=0.5, state_device="cpu")
    other = wideflat.Entropic(torch.optim.AdamW(twin), inner_steps=3, pull=1.0, alpha=0.5, state_dtype=torch.float64)
    go(opt, params, 7)
    go(other, twin, 7)
    assert other.state[twin[0]]["center"].dtype == other.state[twin[0]]["mean"].dtype == torch.float64
    assert opt.state[params[0]]["center"].dtype == torch.float32
    torch.testing.assert_close(params, twin)


def test_two_optimizers_of_one_parameter_are_refused():
    params = parameters()
    with pytest.raises(ValueError, match="more than one parameter group"):
        wideflat.Entropic(torch.optim.SGD(params), torch.optim.AdamW(params))


def test_it_says_its_settings_and_those_of_what_it_is_around():
    net = network()
    opt = wideflat.Entropic(torch.optim.AdamW(net.parameters(), lr=0.003), inner_steps=7, pull=0.5, outer_lr=0.6)
    text = repr(opt)
    assert text.startswith("Entropic around AdamW, at its center, after 0 steps: inner_steps=7, pull=0.5")
    assert "inside: AdamW, lr=0.003, betas=(0.9, 0.999)" in text and "outside: SGD, lr=0.6, momentum=0.67" in text
    train(net, opt, 2)
    assert "within a cycle, after 2 steps" in repr(opt) and "params" not in repr(opt)
