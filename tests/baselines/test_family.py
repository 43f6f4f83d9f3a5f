"""The family of outer optimizers: each row of docs/family.md against a twin from its paper, and the limits between."""

import copy

import pytest
import torch
from family_twins import (
    OUTER,
    adamw,
    made,
    replicas_from_one,
    step_all,
    vector,
)
from small_regression import loss_of, same, step

import wideflat

# ------------------------------------------------------------------------------------------------- from the papers


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
