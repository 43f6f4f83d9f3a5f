"""As coded: the cells against transcriptions of what the authors' program computes."""

import copy
import math

import pytest
import torch
from torch import nn

import wideflat
from wideflat.baselines.rmsprop import TensorFlowRMSprop
from wideflat.presets import COLUMNS, PRESETS, preset


def replicas_and_batches(y=3, seed=0):
    torch.manual_seed(seed)
    networks = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in range(y)]
    x, target = torch.randn(25, y, 8, 4, dtype=torch.float64), torch.randint(3, (25, y, 8))
    return networks, x, target


def the_program(networks, optimizer, x, target, g, period):
    """Mean of the losses; every ``period`` steps plus period g times the mean squared distance to the barycenter."""
    for t in range(len(x)):
        optimizer.zero_grad()
        losses = [nn.functional.cross_entropy(w(x[t, a]), target[t, a]) for a, w in enumerate(networks)]
        loss = torch.stack(losses).mean()
        if (t + 1) % period == 0:
            for same in zip(*(w.parameters() for w in networks), strict=True):
                w_bar = torch.stack(list(same)).mean(0)
                loss = loss + period * g * torch.stack([(w - w_bar).square().sum() for w in same]).mean()
        loss.backward()
        optimizer.step()


def ours(networks, optimizer, x, target, gamma, period):
    replicas = wideflat.Replicas(iter(networks).__next__, len(networks))
    coupling = wideflat.ReplicaCoupling(replicas, period=period, gamma=gamma)
    for t in range(len(x)):
        optimizer.zero_grad()
        sum(nn.functional.cross_entropy(w(x[t, a]), target[t, a]) for a, w in enumerate(replicas)).backward()
        coupling.couple()
        optimizer.step()


def parameters(networks):
    return [p for network in networks for p in network.parameters()]


def test_rsgd_as_coded_is_the_mean_of_losses_at_y_times_the_rate():
    printed, coded = (preset("cifar10-smallconvnet", "rsgd", as_coded=flag) for flag in (False, True))
    networks, x, target = replicas_and_batches()
    theirs, settings = copy.deepcopy(networks), {"momentum": 0.9, "nesterov": True}
    optimizer = torch.optim.SGD(parameters(theirs), lr=3 * printed.lr, weight_decay=printed.weight_decay, **settings)
    the_program(theirs, optimizer, x, target, printed.gamma0, printed.period)
    optimizer = torch.optim.SGD(parameters(networks), lr=coded.lr, weight_decay=coded.weight_decay, **settings)
    ours(networks, optimizer, x, target, coded.gamma0, coded.period)
    torch.testing.assert_close(parameters(networks), parameters(theirs), rtol=1e-12, atol=1e-14)


def test_rsgd_with_rmsprop_as_coded_has_y_times_the_rate():
    printed, coded = (preset("cifar100-efficientnet", "rsgd", as_coded=flag) for flag in (False, True))
    networks, x, target = replicas_and_batches()
    theirs, settings = copy.deepcopy(networks), {"momentum": 0.9, "alpha": 0.9}

    def optimizer(networks, lr, eps, weight_decay, first):
        optimizer = TensorFlowRMSprop(parameters(networks), lr, eps=eps, weight_decay=weight_decay, **settings)
        for p in parameters(networks):  # the mean square of gradients y times as large starts y^2 times as large
            optimizer.state[p]["square_avg"] = torch.full_like(p, first)
        return optimizer

    # RMSprop does not feel the mean's 1/y, so that the program's lr *= y is y times the rate.
    their_optimizer = optimizer(theirs, 3 * printed.lr, printed.stabiliser, printed.weight_decay, 1.0)
    the_program(theirs, their_optimizer, x, target, 1000 * printed.gamma0, printed.period)
    our_optimizer = optimizer(networks, coded.lr, coded.stabiliser, coded.weight_decay, 9.0)
    ours(networks, our_optimizer, x, target, 1000 * coded.gamma0, coded.period)
    torch.testing.assert_close(parameters(networks), parameters(theirs), rtol=1e-11, atol=1e-13)


def test_esgd_as_coded_is_the_programs_loop():
    """Without noise, which is compared by its size: gamma once an outer step, the outer rate times gamma."""
    coded = preset("cifar10-smallconvnet", "esgd", as_coded=True)
    outer_steps, g1 = 60 * 391, coded.paper_gamma1
    assert coded.gamma_factor == pytest.approx((1 + g1) ** outer_steps)
    assert coded.epsilon * math.sqrt(coded.inner_lr) == pytest.approx(1e-4 * math.sqrt(2 * coded.inner_lr))

    torch.manual_seed(0)
    w = torch.randn(7, dtype=torch.float64)
    theirs, hessian, L = w.clone(), torch.linspace(0.1, 3, 7, dtype=torch.float64), coded.inner_steps
    outer_velocity = torch.zeros_like(w)
    for t in range(4):
        gamma = coded.gamma0 * (1 + g1) ** t
        explorer, mean, velocity = theirs.clone(), theirs.clone(), torch.zeros_like(w)
        for _ in range(L):
            d = hessian * explorer + gamma * (explorer - theirs) + coded.weight_decay * explorer
            velocity = 0.9 * velocity + d
            explorer = explorer - coded.inner_lr * (d + 0.9 * velocity)
            mean = coded.alpha * mean + (1 - coded.alpha) * explorer
        d = theirs - mean + coded.weight_decay * theirs
        outer_velocity = 0.9 * outer_velocity + d
        theirs = theirs - coded.lr * gamma * (d + 0.9 * outer_velocity)

    p = nn.Parameter(w.clone())
    momenta = {"momentum": coded.momentum, "nesterov": coded.nesterov, "weight_decay": coded.weight_decay}
    opt = wideflat.EntropySGD([p], coded.lr, coded.inner_lr, L, coded.gamma0, 0.0, coded.alpha, **momenta)
    focusing = wideflat.Focusing(opt, coded.gamma_factor, total=L * outer_steps, every=L)
    for _ in range(4 * L):
        p.grad = hessian * p.detach()
        opt.param_groups[0]["lr"] = coded.lr * opt.param_groups[0]["gamma"]
        opt.step()
        focusing.step()
    torch.testing.assert_close(p.detach(), theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "name, factor", [("cifar10-smallconvnet", 1.6), ("cifar10-resnet110", 520), ("tinyimagenet-densenet", 1.9)]
)
def test_growth_of_gamma_by_the_printed_gamma_1(name, factor):
    assert preset(name, "esgd", as_coded=True).gamma_factor == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("column", COLUMNS)
def test_what_differs_is_listed_field_by_field(name, column):
    printed, coded = preset(name, column), preset(name, column, as_coded=True)
    labels = {"as_coded", "notes", "coded"}
    differs = {field for field, value in printed.to_dict().items() if coded.to_dict()[field] != value} - labels
    assert differs == {field for field, _ in coded.coded}
    assert not {field for field, _ in coded.notes} & differs
    assert coded.as_coded and not printed.as_coded and not printed.coded
    if "imagenet" not in name:
        assert {"pixel_mean", "pixel_std"} <= differs
    if column in ("rsgd", "rsgdxy"):
        assert coded.weight_decay == pytest.approx(3 * printed.weight_decay)
        assert coded.gamma0 == (None if printed.gamma0 is None else 2 * printed.gamma0)
        assert ("batch_norm" in differs) == (printed.model != "smallconvnet")
    if column == "esgd":
        assert {"epsilon", "gamma_in_lr", "gamma_clock"} <= differs and coded.optimizer == "sgd"


def test_only_the_columns_of_table_1_were_coded():
    with pytest.raises(ValueError, match="cell as coded must be one of sgd, rsgd, esgd, rsgdxy, got 'sam'"):
        preset("cifar10-resnet18", "sam", as_coded=True)
