"""State dicts, copies, pickles, hooks, torch.distributed.checkpoint: as torch's own optimizers have them."""

import copy
import io
import pickle

import pytest
import torch
from optimizers import CENTERED, OPTIMIZERS, copied, every, step, weights
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

SIZES = [(4, 3), 5, (), (0, 2)]

pytestmark = pytest.mark.filterwarnings("ignore:.*SAM perturbs 16-bit weights")


def trained(name, steps=5, sizes=SIZES):
    params = weights(sizes)
    opt = OPTIMIZERS[name](params)
    for t in range(steps):
        step(opt, params, t)
    return params, opt


def same_from_here(one, other, steps=8):
    (params, opt), (again, copy_of_it) = one, other
    for t in range(5, 5 + steps):
        step(opt, params, t)
        step(copy_of_it, again, t)
    assert all(torch.equal(p, q) for p, q in zip(params, again, strict=True))


@every
def test_a_file_is_read_with_weights_only_and_goes_on(name):
    params, opt = trained(name)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again = copied(params)
    other = OPTIMIZERS[name](again, lr=0.5)  # the file knows better
    other.load_state_dict(torch.load(file, weights_only=True))
    same_from_here((params, opt), (again, other))


@every
def test_state_dicts_have_torchs_form_and_are_the_same_twice(name):
    _, opt = trained(name)
    first, second = opt.state_dict(), opt.state_dict()
    assert set(first) == {"state", "param_groups"}
    assert first["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert set(first["state"]) <= {0, 1, 2, 3}
    for number, state in first["state"].items():
        assert set(state) == set(second["state"][number])
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, second["state"][number][key])
    assert all(isinstance(key, str) for state in first["state"].values() for key in state)


@every
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "deepcopy of model and optimizer"])
def test_copies_and_pickles_go_on_alike(name, how):
    params, opt = trained(name)
    if how == "deepcopy":
        again = copied(params)
        other = OPTIMIZERS[name](again)
        other.load_state_dict(copy.deepcopy(opt).state_dict())
    else:
        both = (params, opt)
        if how == "pickle":
            again, other = pickle.loads(pickle.dumps(both))
        else:
            again, other = copy.deepcopy(both)
        assert other.param_groups[0]["params"][0] is again[0]
    same_from_here((params, opt), (again, other))


@every
def test_a_state_saved_in_mid_cycle_loads_into_another_type(name):
    params, opt = trained(name)
    saved = copy.deepcopy(opt.state_dict())
    double = [nn.Parameter(p.detach().double()) for p in params]
    other = OPTIMIZERS[name](double)
    other.load_state_dict(saved)
    for state in other.state.values():
        for key, value in state.items():
            assert not isinstance(value, torch.Tensor) or key.endswith("step") or value.dtype == torch.float64, key
    for group in (*opt.param_groups, *other.param_groups):
        group.update({"epsilon": 0.0} if "epsilon" in group else {})
    for t in range(5, 12):
        step(opt, params, t)
        step(other, double, t)
    for p, q in zip(params, double, strict=True):
        torch.testing.assert_close(p, q.float(), rtol=1e-4, atol=1e-5)


@every
def test_a_state_loads_onto_another_device(name):
    """There is none here but ``meta``, which holds no numbers: that state follows is all that can be seen."""
    _, opt = trained(name)
    there = [nn.Parameter(torch.empty(size, device="meta")) for size in SIZES]
    other = OPTIMIZERS[name](there)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for state in other.state.values():
        for key, value in state.items():
            assert not isinstance(value, torch.Tensor) or key.endswith("step") or value.device.type == "meta", key


# ---------------------------------------------------------------------------------------------------------------- hooks


@every
def test_hooks_of_state_dicts_run_and_may_change_what_passes(name):
    params, opt = trained(name)
    called = []
    opt.register_state_dict_pre_hook(lambda _: called.append("before saving"))

    def mark(_, state_dict):
        called.append("after saving")
        return {**state_dict, "mark": 1}

    handle = opt.register_state_dict_post_hook(mark)
    saved = copy.deepcopy(opt.state_dict())
    assert saved.pop("mark") == 1
    handle.remove()
    assert "mark" not in opt.state_dict()
    again = copied(params)
    other = OPTIMIZERS[name](again)
    order = [2, 0, 3, 1]  # torch's recipe to load by names: a hook numbers what was saved anew
    mixed = {"state": {}, "param_groups": saved["param_groups"]}
    for position, index in enumerate(order):
        if index in saved["state"]:
            mixed["state"][position] = saved["state"][index]

    def sort(_, state_dict):
        called.append("before loading")
        state = {order[position]: value for position, value in state_dict["state"].items()}
        return {"state": state, "param_groups": state_dict["param_groups"]}

    other.register_load_state_dict_pre_hook(sort)
    other.register_load_state_dict_post_hook(lambda _: called.append("after loading"))
    other.load_state_dict(mixed)
    assert called == ["before saving", "after saving", "before saving", "before loading", "after loading"]
    same_from_here((params, opt), (again, other))


@every
def test_hooks_of_steps_run_once_a_step_its_own_and_those_of_all_optimizers(name):
    params = weights(SIZES)
    opt = OPTIMIZERS[name](params)
    called = []
    opt.register_step_pre_hook(lambda o, *_: called.append(("own, before", o)))
    opt.register_step_post_hook(lambda o, *_: called.append(("own, after", o)))
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: called.append(("all, before", o))),
        register_optimizer_step_post_hook(lambda o, *_: called.append(("all, after", o))),
    ]
    try:
        for t in range(4):
            step(opt, params, t)
    finally:
        for handle in handles:
            handle.remove()
    words = ["all, before", "own, before", "own, after", "all, after"]
    mine = [word for word, who in called if who is opt]
    assert sorted(mine) == sorted(words * 4)
    if not name.startswith(("Entropic", "SNOO")):  # the optimizers inside are the user's, who may count their steps
        assert len(called) == len(mine)


@every
def test_a_step_returns_the_loss_of_its_closure_and_zero_grad_clears(name):
    params = weights(SIZES)
    opt = OPTIMIZERS[name](params)

    def closure():
        opt.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss

    expected = closure().item()
    assert opt.step(closure).item() == pytest.approx(expected)
    opt.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in params)
    opt.zero_grad()
    assert all(p.grad is None for p in params)


# ----------------------------------------------------------------------------------------- torch.distributed.checkpoint


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@every
@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoint_round_trip_in_mid_cycle(name, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    net, again = make_net(), make_net()
    opt = OPTIMIZERS[name](list(net.parameters()))
    for t in range(5):
        step(opt, list(net.parameters()), t)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "opt": get_optimizer_state_dict(net, opt, options=options)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = OPTIMIZERS[name](list(again.parameters()), lr=0.9)
    again.load_state_dict(loaded["net"])
    set_optimizer_state_dict(again, other, loaded["opt"], options=options)
    same_from_here((list(net.parameters()), opt), (list(again.parameters()), other))


@every
def test_asking_for_the_state_of_a_new_optimizer_changes_nothing(name):
    net, twin = make_net(), make_net()
    opt, other = OPTIMIZERS[name](list(net.parameters())), OPTIMIZERS[name](list(twin.parameters()))
    get_optimizer_state_dict(net, opt)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))
    if name not in CENTERED:
        return  # torch's optimizers count that step, or keep the zeros that they saw
    same_from_here((list(net.parameters()), opt), (list(twin.parameters()), other))
