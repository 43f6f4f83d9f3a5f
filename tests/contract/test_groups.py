"""Param groups, as torch's own optimizers have them: errors in torch's words, names, later groups, older files."""

import copy
import inspect
from importlib import import_module

import pytest
import torch
from optimizers import CENTERED, CYCLE, OPTIMIZERS, copied, every, step, uncoupled, weights, without_noise
from torch import nn
from torch.optim import Optimizer

import wideflat
import wideflat.baselines

pytestmark = pytest.mark.filterwarnings("ignore:.*SAM perturbs 16-bit weights")


def test_all_are_here():
    """Adding an optimizer adds a line to `optimizers.py`."""
    made = {type(make(weights([3]))) for make in OPTIMIZERS.values()}
    rooms = (import_module(name) for name in ("wideflat", "wideflat.baselines"))
    public = {getattr(room, name) for room in rooms for name in room.__all__}
    of_replicas = {wideflat.DiLoCo, wideflat.StreamingDiLoCo}  # an Entropic, made with replicas: tests/baselines
    assert {each for each in public if inspect.isclass(each) and issubclass(each, Optimizer)} - of_replicas == made


@every
def test_what_torch_refuses_is_refused_in_its_words(name):
    make, (p, q) = OPTIMIZERS[name], weights([(2, 2), (2, 2)])
    with pytest.raises(TypeError, match="params argument given to the optimizer should be an iterable of Tensors or"):
        make(p)
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        make([p, p])
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        make([{"params": [p]}, {"params": [p]}])
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        make([])
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        make([p], lr=torch.tensor([0.1, 0.1]))
    with pytest.raises(ValueError, match="all optimizer params should be with/without names"):
        make([("weight", p), q])
    with pytest.raises(ValueError, match="all optimizer param groups should be with/without names"):
        make([{"params": [p], "lr": 0.1}, {"params": [("weight", q)]}])
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        make([p * 1])


@every
def test_a_group_has_settings_of_its_own(name):
    """A group of rate 0 does not move; the other one moves as it does alone."""
    still, moved, alone = weights([5]), weights([7]), weights([7])
    zero = {"lr": 0.0, "weight_decay": 0.0} | ({"inner_lr": 0.0} if "inner_lr" in dir_of(name) else {})
    opt = uncoupled(without_noise(OPTIMIZERS[name]([{"params": moved}, {"params": still, **zero}])))
    other = uncoupled(without_noise(OPTIMIZERS[name](alone)))
    if getattr(opt, "outer", None) is not None and not name.startswith(("EntropySGD", "Lookahead")):
        pytest.skip("the outer optimizer has groups of its own, and Rprop no rate that stays")
    for t in range(9):
        step(opt, moved + still, t)
        step(other, alone, t)
    assert torch.equal(still[0], weights([5])[0])
    torch.testing.assert_close(moved, alone)


def dir_of(name):
    return OPTIMIZERS[name](weights([2])).param_groups[0]


@every
@pytest.mark.parametrize("when", [0, 4])
def test_a_group_may_be_added_later(name, when):
    first, second = weights([5]), weights([(2, 3)])
    opt = without_noise(OPTIMIZERS[name](first))
    for t in range(when):
        step(opt, first, t)
    opt.add_param_group({"params": second})
    assert len(opt.param_groups) == 2
    assert opt.param_groups[1]["lr"] == opt.param_groups[0]["lr"]
    for t in range(when, 9):
        step(opt, first + second, t)
    assert not torch.equal(second[0], weights([(2, 3)])[0])
    saved = copy.deepcopy(opt.state_dict())
    again = copied(first), copied(second)
    other = OPTIMIZERS[name]([{"params": params} for params in again])
    other.load_state_dict(saved)
    for t in range(9, 14):
        step(opt, first + second, t)
        step(other, [*again[0], *again[1]], t)
    assert torch.equal(second[0], again[1][0])
    assert torch.equal(first[0], again[0][0])


@every
def test_a_group_that_is_refused_leaves_nothing_behind(name):
    first = weights([5])
    opt = OPTIMIZERS[name](first)
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": first})
    assert len(opt.param_groups) == 1
    step(opt, first, 0)


@every
def test_named_parameters_keep_their_names(name):
    net = nn.Linear(3, 2)
    opt = OPTIMIZERS[name](net.named_parameters())
    assert opt.param_groups[0]["param_names"] == ["weight", "bias"]
    twin = copy.deepcopy(net)
    other = OPTIMIZERS[name](twin.parameters())
    for t in range(7):
        step(opt, list(net.parameters()), t)
        step(other, list(twin.parameters()), t)
    assert torch.equal(net.weight, twin.weight)
    saved = opt.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
    fresh = OPTIMIZERS[name](copy.deepcopy(net).named_parameters())
    fresh.load_state_dict(copy.deepcopy(saved))
    assert fresh.param_groups[0]["param_names"] == ["weight", "bias"]


@every
def test_a_rate_may_be_a_tensor(name):
    plain, tensor = weights([5, (2, 3)]), weights([5, (2, 3)])
    opt, other = OPTIMIZERS[name](plain, lr=0.13), OPTIMIZERS[name](tensor, lr=torch.tensor(0.13))
    for t in range(9):
        step(opt, plain, t)
        step(other, tensor, t)
        other.param_groups[0]["lr"].mul_(0.9)
        opt.param_groups[0]["lr"] *= 0.9
    torch.testing.assert_close(plain, tensor, rtol=1e-5, atol=1e-6)
    assert isinstance(copy.deepcopy(other.state_dict())["param_groups"][0]["lr"], torch.Tensor)


@every
def test_groups_of_an_older_file_get_the_defaults_of_what_it_does_not_name(name):
    params = weights([5])
    opt = OPTIMIZERS[name](params)
    for t in range(4):
        step(opt, params, t)
    again = copied(params)
    other = OPTIMIZERS[name](again)
    saved = copy.deepcopy(opt.state_dict())
    needed = {"params", "lr", "entropic", "step", "position", *CYCLE}
    newer = {"maximize", "foreach", "differentiable", "fused", "capturable", "outer_momentum", "decoupled_weight_decay"}
    newer |= {"outer_nesterov", "outer_weight_decay"}
    for group in saved["param_groups"]:
        for missing in newer - needed:
            group.pop(missing, None)
    other.load_state_dict(saved)
    if name == "Lookahead":  # a file without these names is one of EntropySGD
        other.param_groups[0].update(outer_momentum=0.0, outer_nesterov=False, outer_weight_decay=0.0)
    for t in range(4, 11):
        step(opt, params, t)
        step(other, again, t)
    torch.testing.assert_close(params, again, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CENTERED)
def test_the_state_of_another_optimizer_is_refused(name):
    params = weights([5])
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    step(sgd, params, 0)
    opt = OPTIMIZERS[name](params)
    if name.startswith("Entropic"):
        with pytest.raises(ValueError, match="not that of an Entropic"):
            opt.load_state_dict(sgd.state_dict())
