"""The family of outer optimizers: each row of docs/family.md against a twin from its paper, and the limits between."""

import copy
from functools import partial

import pytest
import torch
from family_twins import AdamW, Nesterov, diloco, easgd, parle, snoo
from small_regression import loss_of, make_model, same, step
from torch import nn

import wideflat

OUTER = {"outer_lr": 0.6, "outer_momentum": 0.8}


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def made(seed=0):
    torch.manual_seed(seed)
    return make_model()


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def replicas_from_one(num_replicas):
    torch.manual_seed(0)
    return wideflat.Replicas(make_model, num_replicas, independent=False)


def step_all(opt, replicas, t):
    """One step of all replicas, each on its own mini-batch."""
    opt.zero_grad()
    k = len(replicas)
    sum(loss_of(model, k * t + i) for i, model in enumerate(replicas)).backward()
    opt.step()


# ------------------------------------------------------------------------------------------------- from the papers


def test_snoo():
    model = made()
    twin = snoo(made(), vector(model), 11, AdamW(0.01), Nesterov(0.6, 0.8), 3)
    opt = wideflat.SNOO(adamw(model.parameters()), inner_steps=3, **OUTER)
    for t, held in enumerate(twin):
        step(opt, model, t)
        torch.testing.assert_close(vector(model), held)


@pytest.mark.parametrize("settings", [{}, {"pull": 0.7}, {"pull": 0.7, "alpha": 0.4}], ids=["", "pull", "mean"])
def test_diloco_and_entropic_diloco(settings):
    replicas = replicas_from_one(3)
    inners = [AdamW(0.01) for _ in replicas]
    twin = diloco(made(), vector(replicas[0]), 11, inners, Nesterov(0.6, 0.8), 3, **settings)
    opt = wideflat.DiLoCo(adamw(replicas.parameters()), replicas=replicas, inner_steps=3, **OUTER, **settings)
    for t, held in enumerate(twin):
        step_all(opt, replicas, t)
        for model, w in zip(replicas, held, strict=True):
            torch.testing.assert_close(vector(model), w)
    assert not opt.at_center
    with opt.center():
        same(replicas[0], replicas[2], rtol=0, atol=0)
    opt.flush()
    same(replicas[0], replicas[1], rtol=0, atol=0)


def test_parle():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(make_model, 2)
    settings = {"lr": 0.8, "inner_lr": 0.05, "gamma": 0.2, "alpha": 0.6}
    twin = parle(made(), [vector(model) for model in replicas], 9, 3, attraction=0.5, **settings)
    opt = wideflat.EntropySGD(replicas.parameters(), inner_steps=3, epsilon=0.0, momentum=0.0, **settings)
    coupling = wideflat.Parle(replicas, opt, gamma=0.5)
    for t, held in enumerate(twin):
        opt.zero_grad()
        sum(loss_of(model, t) for model in replicas).backward()
        opt.step()
        coupling.couple()
        for model, w in zip(replicas, held, strict=True):
            torch.testing.assert_close(vector(model), w)


def test_easgd():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(make_model, 3)
    twin = easgd(made(), [vector(model) for model in replicas], 9, 2, lr=0.05, rho=0.4, beta=0.7)
    opt = torch.optim.SGD(replicas.parameters(), lr=0.05)
    coupling = wideflat.EASGD(replicas, rate=0.7, period=2, gamma=0.2)  # K gamma is the paper's rho
    for t, held in enumerate(twin):
        opt.zero_grad()
        sum(loss_of(model, t) for model in replicas).backward()
        coupling.couple()
        opt.step()
        for model, w in zip(replicas, held, strict=True):
            torch.testing.assert_close(vector(model), w)


# ------------------------------------------------------------------------------------------------------------ limits


def run(make_opt, steps=10, seed=0):
    model = made(seed)
    opt = make_opt(model)
    for t in range(steps):
        step(opt, model, t)
    return vector(model)


LIMITS = {
    "Entropic without pull is SNOO": (
        lambda m: wideflat.Entropic(adamw(m.parameters()), inner_steps=3, pull=0.0, **OUTER),
        lambda m: wideflat.SNOO(adamw(m.parameters()), inner_steps=3, **OUTER),
    ),
    "SNOO without outer momentum is Lookahead": (
        lambda m: wideflat.SNOO(adamw(m.parameters()), inner_steps=3, outer_lr=0.5, outer_momentum=0.0),
        lambda m: wideflat.Lookahead(m.parameters(), lr=0.5, inner_lr=0.01, inner_steps=3, inner=torch.optim.AdamW),
    ),
    "SNOO with rate 1 and no momentum is its inner optimizer": (
        lambda m: wideflat.SNOO(adamw(m.parameters()), inner_steps=3, outer_lr=1.0, outer_momentum=0.0),
        lambda m: adamw(m.parameters()),
    ),
    "Entropy-SGD without noise, mean and pull is Lookahead": (
        lambda m: wideflat.EntropySGD(m.parameters(), 0.5, 0.05, 4, gamma=0.0, epsilon=0.0, alpha=0.0, momentum=0.0),
        lambda m: wideflat.Lookahead(m.parameters(), 0.5, 0.05, 4),
    ),
    "Entropic around SGD, restarted, without pull is Lookahead": (
        lambda m: wideflat.Entropic(
            torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
            inner_steps=4, outer_lr=0.5, outer_momentum=0.0, pull=0.0, inner_state="restart",
        ),
        lambda m: wideflat.Lookahead(m.parameters(), 0.5, 0.05, 4, momentum=0.9),
    ),
    "DiLoCo of one worker is SNOO": (
        lambda m: wideflat.DiLoCo(
            adamw(m.parameters()), replicas=wideflat.Replicas(lambda: m, 1), inner_steps=3, **OUTER
        ),
        lambda m: wideflat.SNOO(adamw(m.parameters()), inner_steps=3, **OUTER),
    ),
    "entropic DiLoCo of one worker is Entropic": (
        lambda m: wideflat.DiLoCo(
            adamw(m.parameters()), replicas=wideflat.Replicas(lambda: m, 1), inner_steps=3, pull=0.5, **OUTER
        ),
        lambda m: wideflat.Entropic(adamw(m.parameters()), inner_steps=3, pull=0.5, **OUTER),
    ),
    "Streaming DiLoCo of one fragment is DiLoCo": (
        lambda m: wideflat.StreamingDiLoCo(
            adamw(m.parameters()), replicas=wideflat.Replicas(lambda: m, 1), inner_steps=3, fragments=1,
            pull=0.5, alpha=0.3, **OUTER,
        ),
        lambda m: wideflat.DiLoCo(
            adamw(m.parameters()), replicas=wideflat.Replicas(lambda: m, 1), inner_steps=3, pull=0.5, alpha=0.3, **OUTER
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_limits(limit):
    ours, theirs = LIMITS[limit]
    torch.testing.assert_close(run(ours, 12), run(theirs, 12), rtol=1e-9, atol=1e-11)


def test_diloco_after_every_step_of_sgd_is_data_parallel_sgd():
    replicas, model = replicas_from_one(2), made()
    sgd = torch.optim.SGD(replicas.parameters(), lr=0.05)
    opt = wideflat.DiLoCo(sgd, replicas=replicas, inner_steps=1, outer_lr=1.0, outer_momentum=0.0)
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    for t in range(6):
        step_all(opt, replicas, t)
        plain.zero_grad()
        ((loss_of(model, 2 * t) + loss_of(model, 2 * t + 1)) / 2).backward()
        plain.step()
    same(replicas[0], model)
    same(replicas[1], model)


def test_parle_without_attraction_is_entropy_sgd_in_each_replica():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(make_model, 2)
    alone = copy.deepcopy(replicas[1])
    make = partial(wideflat.EntropySGD, inner_steps=3, epsilon=0.0, momentum=0.9)
    opt, other = make(replicas.parameters()), make(alone.parameters())
    coupling = wideflat.Parle(replicas, opt, gamma=0.0)
    for t in range(7):
        opt.zero_grad()
        sum(loss_of(model, t) for model in replicas).backward()
        opt.step()
        coupling.couple()
        step(other, alone, t)
    same(replicas[1], alone)


# ---------------------------------------------------------------------------------------------- DiLoCo as an optimizer


@pytest.mark.parametrize("fragments", [{}, {"fragments": 2}, {"fragments": 2, "delay": 1, "mix": 0.3}])
def test_resumed_in_mid_cycle_bit_for_bit(fragments):
    def make(replicas):
        settings = {"replicas": replicas, "inner_steps": 4, "pull": 0.5, "alpha": 0.2, **OUTER, **fragments}
        return (wideflat.StreamingDiLoCo if fragments else wideflat.DiLoCo)(adamw(replicas.parameters()), **settings)

    whole = replicas_from_one(2)
    opt = make(whole)
    focusing = wideflat.Focusing(opt, factor=10.0, total=20)
    for t in range(7):
        step_all(opt, whole, t)
        focusing.step()
    opt.eval()
    same(whole[0], whole[1], rtol=0, atol=0)
    again = replicas_from_one(2)
    other = make(again)
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert other.pull == pytest.approx(0.5 * 10 ** (7 / 20))
    for replicas, o in ((whole, opt), (again, other)):
        o.train()
        for t in range(7, 13):
            step_all(o, replicas, t)
    same(whole, again, rtol=0, atol=0)


def test_fragments_follow_each_other():
    """Every L / P steps one of them is at its center, in all replicas alike; the others go on."""
    replicas = replicas_from_one(2)
    parts = [list(model.parameters())[:1] for model in replicas] + [list(model.parameters())[1:] for model in replicas]
    opt = wideflat.StreamingDiLoCo(adamw(replicas.parameters()), replicas=replicas, inner_steps=4, fragments=2, **OUTER)
    met = []
    for t in range(8):
        step_all(opt, replicas, t)
        met.append([all(torch.equal(p, q) for p, q in zip(*parts[k : k + 2], strict=True)) for k in (0, 2)])
    assert met == [[False, False], [True, False], [False, False], [False, True]] * 2
    assert not opt.at_center and opt.distance() > 0
    opt.flush()
    assert opt.at_center and opt.distance() == 0
    same(replicas[0], replicas[1], rtol=0, atol=0)


class Slow:
    """A manager that notes when something is sent and when it is waited for."""

    def __init__(self):
        self.events = []

    def start_quorum(self):
        pass

    def register_state_dict_fn(self, *_):
        pass

    def allreduce(self, tensor):
        self.events.append("send")
        return self

    def wait(self):
        self.events.append("wait")

    def should_commit(self):
        return True


def test_steps_go_on_while_a_fragment_is_on_its_way():
    model, manager = made(), Slow()
    opt = wideflat.StreamingDiLoCo(
        adamw(model.parameters()),
        replicas=model,
        manager=manager,
        inner_steps=8,
        fragments=[model[0], model[2]],
        delay=3,
    )
    seen = []
    for t in range(8):
        step(opt, model, t)
        seen.append(tuple(manager.events))
        manager.events.clear()
    sent, waited = ("send",) * 2, ("wait",) * 2
    assert seen == [sent, (), (), waited] * 2
    step(opt, model, 8)
    opt.recenter()  # what is on its way is waited for, and forgotten
    assert manager.events == [*sent, *waited]
    assert not any("sent" in state for state in opt.state.values())


@pytest.mark.parametrize("fragments", [{}, {"fragments": 2, "delay": 1, "mix": 0.5}])
def test_no_number_leaves_the_device_within_a_step_of_diloco(fragments, monkeypatch):
    replicas = replicas_from_one(2)
    kind = wideflat.StreamingDiLoCo if fragments else wideflat.DiLoCo
    sgd = torch.optim.SGD(replicas.parameters(), lr=0.01, momentum=0.9)  # AdamW reads its own count of steps on the CPU
    opt = kind(sgd, replicas=replicas, inner_steps=4, pull=0.5, alpha=0.2, **fragments)

    def refuse(*_):
        raise AssertionError("the host waits for the device")

    for t in range(9):
        opt.zero_grad()
        sum(loss_of(model, t) for model in replicas).backward()
        with monkeypatch.context() as patched:
            for reading in ("item", "tolist", "__bool__", "__float__", "__int__"):
                patched.setattr(torch.Tensor, reading, refuse)
            opt.step()


def test_what_cannot_be_meant_is_refused():
    torch.manual_seed(0)
    apart = wideflat.Replicas(make_model, 2)
    with pytest.raises(ValueError, match="start from one w"):
        wideflat.DiLoCo(adamw(apart.parameters()), replicas=apart)
    together = replicas_from_one(2)
    with pytest.raises(ValueError, match="4 parameters and the replicas have 8"):
        wideflat.DiLoCo(adamw(together[0].parameters()), replicas=together)
    with pytest.raises(ValueError, match="multiple of the number of fragments"):
        wideflat.StreamingDiLoCo(adamw(together.parameters()), replicas=together, fragments=3, inner_steps=10)
    for wrong in ({"delay": 5}, {"mix": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            wideflat.StreamingDiLoCo(
                adamw(together.parameters()), replicas=together, fragments=2, inner_steps=10, **wrong
            )
    model = made()
    with pytest.raises(ValueError, match="belongs to one fragment; 2 belong to none"):
        wideflat.StreamingDiLoCo(
            adamw(model.parameters()), replicas=wideflat.Replicas(lambda: model, 1), fragments=[model[0]], inner_steps=2
        )
