"""Entropy-SGD against a transcription of Algorithm 1, its limits, and the ways it is used."""

import copy
import io
import math
import pickle
from functools import partial

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wideflat
from wideflat.kernels.library import kernel_is_there
from wideflat.kernels.noise import GaussianNoise


class NaiveEntropySGD:
    """Algorithm 1, transcribed tensor by tensor; the oracle of the fast one."""

    def __init__(self, params, seed, **h):
        self.w = [p.detach().clone() for p in params]
        self.h = h
        self.noise = GaussianNoise(seed)
        self.steps = 0
        self.outer_velocity = [torch.zeros_like(w) for w in self.w]
        self.restart()

    def restart(self):
        self.w_prime = [w.clone() for w in self.w]
        self.mu = [w.clone() for w in self.w]
        self.velocity = [torch.zeros_like(w) for w in self.w]
        self.l = 0

    def inner(self, gradients):
        h = self.h
        place = 0
        for i, g in enumerate(gradients):
            z = self.noise(self.steps, place, g.numel(), g.dtype).view(g.shape)
            place += g.numel()
            dw = g + h["gamma"] * (self.w_prime[i] - self.w[i]) + h["weight_decay"] * self.w_prime[i]
            self.velocity[i] = h["momentum"] * self.velocity[i] + dw
            step = dw + h["momentum"] * self.velocity[i] if h["nesterov"] else self.velocity[i]
            self.w_prime[i] = self.w_prime[i] - h["inner_lr"] * step + math.sqrt(h["inner_lr"]) * h["epsilon"] * z
            self.mu[i] = h["alpha"] * self.mu[i] + (1 - h["alpha"]) * self.w_prime[i]
        self.steps += 1
        self.l += 1
        if self.l == h["inner_steps"]:
            for i, w in enumerate(self.w):
                dw = (w - self.mu[i]) + h["outer_weight_decay"] * w
                self.outer_velocity[i] = h["outer_momentum"] * self.outer_velocity[i] + dw
                step = dw + h["outer_momentum"] * self.outer_velocity[i] if h["nesterov"] else self.outer_velocity[i]
                self.w[i] = w - h["lr"] * step
            self.restart()


def parameters(dtype=torch.float64, seed=0):
    """Small tensors, a scalar, and one larger than a block."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, 3), (7,), (), (2, 3, 3), (300_001,)]
    return [nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in shapes]


def loss_of(params, target):
    return sum(((p - t) ** 2 * (1 + torch.cos(p.detach()))).sum() for p, t in zip(params, target, strict=True))


def run(opt, params, steps, seed=5, start=0):
    """Gradient steps on mini-batches that depend on the iteration alone."""
    for t in range(start, start + steps):
        generator = torch.Generator().manual_seed(seed + t)
        target = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in params]
        opt.zero_grad()
        loss_of(params, target).backward()
        opt.step()


SETTINGS = {
    "plain": {"momentum": 0.0},
    "noise": {"epsilon": 0.3, "momentum": 0.0},
    "the paper's momentum": {"weight_decay": 0.05},
    "momentum": {"momentum": 0.9, "weight_decay": 0.05},
    "all": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05, "epsilon": 0.3},
    "other outer loop": {"momentum": 0.5, "outer_momentum": 0.8, "weight_decay": 0.05, "outer_weight_decay": 0.01},
    "no running mean": {"alpha": 0.0, "epsilon": 0.1, "momentum": 0.0},
    "no pull": {"gamma": 0.0, "momentum": 0.9},
    "one step": {"inner_steps": 1, "momentum": 0.9},
}


@pytest.mark.parametrize("kind", ["kernel", "torch's operations"])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_equals_algorithm_1_step_by_step(setting, kind):
    settings = {"lr": 0.7, "inner_lr": 0.03, "inner_steps": 3, "gamma": 0.4, "epsilon": 0.0, "alpha": 0.75} | setting
    params = parameters()
    opt = wideflat.EntropySGD(params, **settings, seed=3, fused=None if kind == "kernel" else False)
    h = {"momentum": 0.9, "nesterov": "momentum" not in settings, "weight_decay": 0.0} | settings
    naive = NaiveEntropySGD(
        params, 3, **({"outer_momentum": h["momentum"], "outer_weight_decay": h["weight_decay"]} | h)
    )
    for t in range(8):
        run(opt, params, 1, start=t)
        naive.inner([p.grad for p in params])
        for p, w_prime, w in zip(params, naive.w_prime, naive.w, strict=True):
            torch.testing.assert_close(p.detach(), w_prime, rtol=1e-11, atol=1e-12)
            if not opt.at_center:  # at the start of a cycle w is the parameter itself
                torch.testing.assert_close(opt.state[p]["center"], w, rtol=1e-11, atol=1e-12)


def test_hyper_parameters_are_read_from_each_group_at_every_step():
    params = parameters()
    groups = [{"params": params[:2], "gamma": 0.1, "inner_lr": 0.02}, {"params": params[2:], "weight_decay": 0.1}]
    opt = wideflat.EntropySGD(groups, lr=0.9, inner_lr=0.05, inner_steps=2, gamma=0.7, epsilon=0.0, momentum=0)
    base = {"inner_steps": 2, "epsilon": 0.0, "alpha": 0.75, "momentum": 0.0, "nesterov": False, "outer_momentum": 0.0}
    one = {"lr": 0.9, "gamma": 0.1, "inner_lr": 0.02, "weight_decay": 0.0, "outer_weight_decay": 0.0}
    two = {"lr": 0.9, "gamma": 0.7, "inner_lr": 0.05, "weight_decay": 0.1, "outer_weight_decay": 0.1}
    naive = [NaiveEntropySGD(params[:2], 0, **base, **one), NaiveEntropySGD(params[2:], 0, **base, **two)]
    for t in range(7):
        for group, twin in zip(opt.param_groups, naive, strict=True):
            group["lr"] = twin.h["lr"] = 0.9 / (1 + t)
            group["gamma"] = twin.h["gamma"] = 0.3 * (1 + t)
        run(opt, params, 1, start=t)
        naive[0].inner([p.grad for p in params[:2]])
        naive[1].inner([p.grad for p in params[2:]])
        for p, w_prime in zip(params, naive[0].w_prime + naive[1].w_prime, strict=True):
            torch.testing.assert_close(p.detach(), w_prime, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_noise_mean_and_pull_it_is_lookahead(momentum):
    ours, theirs = parameters(), parameters()
    opt = wideflat.EntropySGD(
        ours, lr=0.5, inner_lr=0.02, inner_steps=5, gamma=0, epsilon=0, alpha=0, momentum=momentum, outer_momentum=0.0
    )
    peer = pytorch_optimizer.Lookahead(
        torch.optim.SGD(theirs, lr=0.02, momentum=momentum), k=5, alpha=0.5, pullback_momentum="reset"
    )
    for t in range(12):
        run(opt, ours, 1, start=t)
        run(peer, theirs, 1, start=t)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_is_the_same_in_another_memory_format_and_with_mixed_dtypes():
    def nets():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 70, 3), nn.Conv2d(70, 220, 3), nn.Flatten(), nn.Linear(880, 2)).double()

    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        net = nets().to(memory_format=memory_format)
        x = torch.ones(2, 3, 6, 6, dtype=torch.float64).to(memory_format=memory_format)
        opt = wideflat.EntropySGD(net.parameters(), inner_steps=2, momentum=0.9, epsilon=0.0, weight_decay=0.1)
        for _ in range(3):
            opt.zero_grad()
            net(x).square().sum().backward()
            opt.step()
        assert net[1].weight.is_contiguous(memory_format=memory_format)
        results.append([p.detach().clone() for p in net.parameters()])
    torch.testing.assert_close(*results)

    mixed = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    opt = wideflat.EntropySGD(mixed, inner_steps=2, momentum=0.9)
    run(opt, mixed, 3)
    assert [opt.state[p]["mean"].dtype for p in mixed] == [torch.float32, torch.float64, torch.float32]


# ------------------------------------------------------------------------------------------------- the inner optimizer


def test_an_inner_sgd_is_the_built_in_step():
    settings = {"lr": 0.7, "inner_lr": 0.03, "inner_steps": 3, "gamma": 0.4, "epsilon": 0.2, "seed": 4}
    ours, theirs = parameters(), parameters()
    opt = wideflat.EntropySGD(ours, **settings, momentum=0.9, nesterov=True, weight_decay=0.05)
    inner = partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.05)
    other = wideflat.EntropySGD(
        theirs, **settings, momentum=0.9, nesterov=True, weight_decay=0.05, inner=inner, inner_state="restart"
    )
    for t in range(8):
        opt.param_groups[0]["inner_lr"] = other.param_groups[0]["inner_lr"] = 0.03 / (1 + t)
        run(opt, ours, 1, start=t)
        run(other, theirs, 1, start=t)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_inner_optimizer_sees_the_pull_and_leaves_the_gradients_alone():
    class Seen(torch.optim.SGD):
        seen = None

        def step(self, closure=None):
            Seen.seen = self.param_groups[0]["params"][0].grad.item()
            return super().step(closure)

    w = nn.Parameter(torch.tensor(1.0))
    opt = wideflat.EntropySGD([w], inner_lr=0.5, inner_steps=3, gamma=10.0, epsilon=0.0, inner=Seen)
    w.grad = torch.tensor(1.0)
    opt.step()
    assert (Seen.seen, w.item()) == (1.0, 0.5)
    opt.step()
    assert (Seen.seen, w.grad.item()) == (1.0 + 10.0 * (0.5 - 1.0), 1.0)


@pytest.mark.filterwarnings("ignore:gamma > 0 in the gradient of Adam")
def test_an_inner_optimizer_is_saved_and_loaded_with_the_types_it_needs():
    def make():
        params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
        return params, wideflat.EntropySGD(params, inner_steps=2, inner=partial(torch.optim.Adam, amsgrad=True))

    params, opt = make()
    run(opt, params, 3)
    buffer = io.BytesIO()
    torch.save({"opt": opt.state_dict(), "w": params[0].data}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    again, other = make()
    again[0].data.copy_(saved["w"])
    other.load_state_dict(saved["opt"])
    (inner,) = other.inner
    assert inner.state[again[0]]["step"].dtype == torch.float32
    assert other.state[again[0]]["inner_step"] is inner.state[again[0]]["step"]
    run(opt, params, 4, start=3)
    run(other, again, 4, start=3)
    assert torch.equal(params[0], again[0])


# ------------------------------------------------------------------------------------- the ways an optimizer is used


def test_a_closure_is_evaluated_once_and_its_loss_returned():
    w = nn.Parameter(torch.ones(2))
    opt = wideflat.EntropySGD([w], inner_steps=2)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(1)
        opt.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 2.0
    assert len(calls) == 1


def test_parameters_without_a_gradient_stay_and_do_not_shift_the_noise_of_others():
    def make():
        return [nn.Parameter(torch.full((3,), 2.0)) for _ in range(3)]

    def go(params, used):
        opt = wideflat.EntropySGD(params, inner_steps=2, epsilon=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
        for _ in range(4):
            opt.zero_grad()
            sum(params[i].square().sum() for i in used).backward()
            opt.step()
        return opt

    everything, some = make(), make()
    go(everything, [0, 1, 2])
    opt = go(some, [0, 2])
    assert torch.equal(some[1], torch.full((3,), 2.0))
    assert torch.equal(some[2], everything[2])
    assert some[1] not in opt.state


def test_a_gradient_that_comes_and_goes_within_a_cycle():
    w = nn.Parameter(torch.tensor(1.0))
    other = nn.Parameter(torch.tensor(1.0))
    settings = {"gamma": 0.0, "epsilon": 0.0, "alpha": 0.0, "momentum": 0.0}
    opt = wideflat.EntropySGD([w, other], lr=1.0, inner_lr=0.5, inner_steps=3, **settings)
    for gradient in (None, torch.tensor(1.0), None):
        w.grad, other.grad = gradient, torch.tensor(0.0)
        opt.step()
    assert (w.item(), opt.at_center) == (0.5, True)  # its one inner step counts, although the last call had no gradient


def test_frozen_parameters_have_no_state_and_may_be_thawed():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    opt = wideflat.EntropySGD(net.parameters(), inner_steps=2, momentum=0.9)
    before = net[0].weight.clone()
    x = torch.ones(1, 2)
    for t in range(5):
        if t == 3:
            net[0].requires_grad_(True)
        opt.zero_grad()
        net(x).square().sum().backward()
        opt.step()
        assert torch.equal(net[0].weight, before) == (t < 3)
        assert set(opt.state) == set((net[1] if t < 3 else net).parameters())


def test_a_group_added_in_mid_cycle_joins_it():
    params = parameters()
    opt = wideflat.EntropySGD(params[:2], inner_steps=3, gamma=0.5)
    run(opt, params[:2], 2)
    opt.add_param_group({"params": params[2:], "gamma": 0.1})
    assert [group["position"] for group in opt.param_groups] == [2, 2]
    run(opt, params, 1)
    assert opt.at_center
    assert opt.param_groups[1]["gamma"] == 0.1
    with pytest.raises(ValueError, match="inner_steps must be the same"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], "inner_steps": 2})
    assert len(opt.param_groups) == 2


def test_refuses_what_it_cannot_do():
    embedding = nn.Embedding(4, 2, sparse=True)
    opt = wideflat.EntropySGD(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        opt.step()
    assert opt.param_groups[0]["step"] == 0
    with pytest.raises(ValueError, match="complex parameters"):
        wideflat.EntropySGD([nn.Parameter(torch.ones(1, dtype=torch.complex64))])


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("lr", -1.0, "lr must be a finite number >= 0, got -1"),
        ("lr", torch.tensor([0.1, 0.1]), "Tensor lr must be 1-element"),
        ("inner_state", "half", "inner_state must be 'keep' or 'restart', got 'half'"),
        ("gamma", float("nan"), "gamma must be a finite number >= 0, got nan"),
        ("alpha", 1.5, "alpha must be a finite number >= 0 and <= 1, got 1.5"),
        ("inner_steps", 0, "inner_steps must be a whole number >= 1, got 0"),
        ("inner_steps", 2.5, "inner_steps must be a whole number"),
        ("nesterov", True, "nesterov needs a momentum > 0"),
        ("outer_nesterov", True, "outer_nesterov needs a outer_momentum > 0"),
        ("outer_momentum", -0.1, "outer_momentum, unless it is None, must be a finite number >= 0"),
        ("seed", "a", "seed must be a whole number"),
    ],
)
def test_refuses_bad_arguments(argument, value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        wideflat.EntropySGD([nn.Parameter(torch.ones(1))], **{"momentum": 0.0, argument: value})


def test_momentum_left_out_is_that_of_the_paper():
    params = parameters()
    settings = lambda opt: (opt.param_groups[0]["momentum"], opt.param_groups[0]["nesterov"])  # noqa: E731
    assert settings(wideflat.EntropySGD(params)) == (0.9, True)
    assert settings(wideflat.EntropySGD(params, nesterov=False)) == (0.9, False)
    assert settings(wideflat.EntropySGD(params, momentum=0.5)) == (0.5, False)
    assert settings(wideflat.EntropySGD(params, momentum=0)) == (0, False)
    assert settings(wideflat.EntropySGD([{"params": params, "momentum": 0.0}])) == (0.0, False)
    assert settings(wideflat.EntropySGD(params, inner=torch.optim.Adam, gamma=0.0)) == (0.0, False)
    fused = wideflat.EntropySGD(params)
    fused.load_state_dict(wideflat.EntropySGD(params, momentum=0.0).state_dict())
    assert settings(fused) == (0.0, False)


def test_a_rate_that_was_meant_for_sgd_is_noticed_at_the_line_of_the_user():
    params = parameters()
    with pytest.warns(UserWarning, match=r"lr = 0\.05 is the outer rate.*inner_lr=0\.05") as caught:
        wideflat.EntropySGD(params, lr=0.05, momentum=0.9)
    assert caught[0].filename == __file__
    wideflat.EntropySGD(params, lr=0.05, inner_lr=0.03)  # who gives both has thought of both
    wideflat.EntropySGD(params, lr=0.0)


def test_the_defaults_train_as_sgd_does():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 20, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    errors = {}
    for name, make in (("sgd", lambda p: torch.optim.SGD(p, 0.05, 0.9)), ("default", wideflat.EntropySGD)):
        torch.manual_seed(0)
        first = (nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU())
        net = nn.Sequential(*first, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        opt = make(net.parameters())
        for t in range(400):
            batch = torch.randperm(256, generator=generator.manual_seed(t))[:32]
            opt.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            opt.step()
        wideflat.refresh_batch_norm(net, x.split(32))
        errors[name] = (net.eval()(x).argmax(1) != y).float().mean().item()
    assert errors["sgd"] <= 0.02 and errors["default"] <= 0.02


def test_groups_out_of_phase_are_noticed():
    params = parameters()
    opt = wideflat.EntropySGD([{"params": params[:2]}, {"params": params[2:]}])
    opt.param_groups[1]["position"] = 3
    with pytest.raises(ValueError, match="go through the cycle together"):
        opt.step()


def test_weights_loaded_into_the_model_between_cycles_are_taken_up():
    w = nn.Parameter(torch.tensor(1.0))
    opt = wideflat.EntropySGD([w], lr=1.0, inner_lr=0.1, inner_steps=1, epsilon=0.0, alpha=0.0, momentum=0)
    w.data.fill_(5.0)  # as model.load_state_dict(pretrained) does, after the optimizer was made
    w.grad = torch.tensor(1.0)
    opt.step()
    assert w.item() == pytest.approx(4.9)


@pytest.mark.parametrize("fused", [None, False])
def test_an_emptied_state_starts_afresh(fused):
    params, twin = parameters(), parameters()
    settings = {"inner_steps": 3, "momentum": 0.9, "epsilon": 0.0, "fused": fused}
    opt = wideflat.EntropySGD(params, **settings)
    run(opt, params, 3)
    for p, q in zip(params, twin, strict=True):
        q.data.copy_(p)
    opt.state.clear()
    run(opt, params, 5, start=3)
    run(wideflat.EntropySGD(twin, **settings), twin, 5, start=3)
    assert all(torch.equal(p, q) for p, q in zip(params, twin, strict=True))


@pytest.mark.filterwarnings("ignore:gamma > 0 in the gradient of Adam")
def test_copies_and_pickles_continue_alike():
    params = parameters()
    opt = wideflat.EntropySGD(params, inner_steps=3, momentum=0.9, inner=partial(torch.optim.Adam))
    run(opt, params, 2)
    again, other = pickle.loads(pickle.dumps((params, opt)))
    third, another = copy.deepcopy((params, opt))
    for w, o in ((params, opt), (again, other), (third, another)):
        run(o, w, 3, start=2)
    for a, b, c in zip(params, again, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_at_most_four_copies_of_the_parameters():
    params = parameters(torch.float32)
    size = sum(p.numel() for p in params)
    momenta = {"momentum": 0.9, "outer_momentum": 0.0}
    for settings, copies in (({"momentum": 0}, 2), ({}, 4), ({"momentum": 0.9}, 4), (momenta, 3)):
        opt = wideflat.EntropySGD(params, **settings)
        run(opt, params, 6)
        assert sum(t.numel() for state in opt.state.values() for t in state.values()) == copies * size
    opt.param_groups[0]["outer_momentum"] = 0.9  # switched on by hand later
    run(opt, params, 6)
    assert "outer_momentum_buffer" in opt.state[params[0]]


@pytest.mark.skipif(not kernel_is_there(torch.zeros(1)), reason="no C compiler here: torch needs memory for blocks")
def test_a_step_needs_no_memory_worth_mentioning():
    params = parameters(torch.float32)
    size = sum(p.numel() * p.element_size() for p in params)
    opt = wideflat.EntropySGD(params, inner_steps=2, momentum=0.9, nesterov=True, weight_decay=0.1)
    run(opt, params, 2)
    for _ in range(2):  # the second one ends a cycle
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            opt.step()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        level = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            level += event.nbytes()
            peak = max(peak, level)
        assert peak < 0.01 * size


# ----------------------------------------------------------------------------------------------------------- the center


def net_with_batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def train(net, opt, steps, start=0):
    for t in range(start, start + steps):
        torch.manual_seed(t)
        opt.zero_grad()
        net(torch.randn(8, 3)).square().mean().backward()
        opt.step()


def test_center_puts_w_in_the_model_and_takes_it_out_again():
    net = net_with_batch_norm()
    opt = wideflat.EntropySGD(net.parameters(), inner_steps=3, momentum=0.9)
    train(net, opt, 3)
    w = copy.deepcopy(net.state_dict())
    with opt.center():
        assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), w.values(), strict=True))
    train(net, opt, 2, start=3)
    w_prime = copy.deepcopy(net.state_dict())
    assert not opt.at_center
    with pytest.raises(ZeroDivisionError), opt.center(net):
        assert opt.at_center
        for name, p in net.named_parameters():
            assert torch.equal(p, w[name])
        wideflat.refresh_batch_norm(net, [torch.randn(8, 3)])
        with opt.center():  # nested
            assert torch.equal(net[0].weight, w["0.weight"])
        assert torch.equal(net[0].weight, w["0.weight"])
        for call in (opt.step, opt.flush, opt.state_dict, lambda: opt.load_state_dict({})):
            with pytest.raises(RuntimeError, match="call it after the block"):
                call()
        raise ZeroDivisionError
    assert not opt.at_center
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), w_prime.values(), strict=True))


def test_looking_at_the_center_does_not_change_the_training():
    runs = []
    for look in (False, True):
        net = net_with_batch_norm()
        opt = wideflat.EntropySGD(net.parameters(), inner_steps=3, momentum=0.9)
        for t in range(7):
            train(net, opt, 1, start=t)
            if look:
                with opt.center(net):
                    wideflat.refresh_batch_norm(net, [torch.ones(8, 3)])
        runs.append(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[1].values(), strict=True))


def test_flush_closes_a_partial_cycle():
    full, partial_ = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))
    settings = {"lr": 0.8, "inner_lr": 0.1, "momentum": 0.9, "epsilon": 0.0}
    opt = wideflat.EntropySGD([full], inner_steps=2, **settings)
    other = wideflat.EntropySGD([partial_], inner_steps=5, **settings)
    for _ in range(2):
        full.grad = partial_.grad = torch.tensor(1.0)
        opt.step()
        other.step()
    assert other.distance().item() == pytest.approx((partial_.item() - 1) ** 2 / 2)
    other.flush()
    assert (other.at_center, other.distance().item()) == (True, 0.0)
    assert partial_.item() == full.item()
    other.flush()  # nothing to close
    assert partial_.item() == full.item()


@pytest.mark.parametrize("averaging", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}], ids=["SWA", "EMA"])
def test_torch_averages_of_the_center_compose(averaging):
    net = net_with_batch_norm()
    opt = wideflat.EntropySGD(net.parameters(), inner_steps=3, momentum=0.9)
    averaged = AveragedModel(net, **averaging)
    seen = []
    for t in range(9):
        train(net, opt, 1, start=t)
        if opt.at_center:  # once a cycle; at any other time, within opt.center()
            averaged.update_parameters(net)
            seen.append(net[0].weight.detach().clone())
    expected = torch.stack(seen).mean(0) if not averaging else 0.9 * (0.9 * seen[0] + 0.1 * seen[1]) + 0.1 * seen[2]
    torch.testing.assert_close(averaged.module[0].weight.detach(), expected)
    wideflat.refresh_batch_norm(averaged, [torch.randn(8, 3)])
    assert averaged.module[1].num_batches_tracked == 1


@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
def test_a_pull_through_an_adam_of_short_cycles_is_warned_of(adam):
    make = partial(wideflat.EntropySGD, parameters(), inner=adam)
    with pytest.warns(UserWarning, match=r"inner_steps = 5 < 10: .* Use wideflat\.Entropic around it"):
        make()
    make(gamma=0.0)
    make(inner_steps=10)
    wideflat.EntropySGD(parameters(), inner=torch.optim.RMSprop)
    wideflat.Lookahead(parameters(), inner=adam)
