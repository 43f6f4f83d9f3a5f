"""What a device must not meet in a step: float64, the host waiting for it, launches that grow with the tensors.

There is no accelerator here. Parameters on the meta device are not on the CPU, so that every path takes them for those
of an accelerator; they have no values, and an operation that needs one fails. A dispatch mode counts what is launched.

Adding an optimizer adds a line to `OPTIMIZERS`, a coupling of replicas one to `COUPLINGS`.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import wideflat

SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
CYCLE = {"inner_steps": 2, "lr": 0.7, "inner_lr": 0.02}


def entropic(params, **changes):
    adamw = torch.optim.AdamW(params, lr=0.01, foreach=True)
    return wideflat.Entropic(adamw, **({"inner_steps": 2, "pull": 1.0, "epsilon": 0.1, "alpha": 0.5} | changes))


OPTIMIZERS = {
    "EntropySGD": lambda params: wideflat.EntropySGD(params, epsilon=0.01, **CYCLE, **SGD),
    "EntropySGD, whole tensors": lambda params: wideflat.EntropySGD(params, epsilon=0.01, fused=False, **CYCLE, **SGD),
    "EntropySGD, no momentum, no mean": lambda params: wideflat.EntropySGD(params, alpha=0.0, **CYCLE),
    "EntropySGD(inner=SGD)": lambda params: wideflat.EntropySGD(
        params, inner=lambda groups, lr: torch.optim.SGD(groups, lr=lr, foreach=True), **CYCLE
    ),
    "EntropySGD, capturable": lambda params: wideflat.EntropySGD(params, epsilon=0.01, capturable=True, **CYCLE, **SGD),
    "Lookahead": lambda params: wideflat.Lookahead(params, **CYCLE, **SGD),
    "Entropic": entropic,
    "Entropic, no pull, no mean": lambda params: entropic(params, pull=0.0, alpha=0.0, epsilon=0.0),
}
COUPLINGS = {
    "rSGD": lambda replicas: wideflat.ReplicaCoupling(replicas, period=1, gamma=0.3),
    "rSGD, proximal": lambda replicas: wideflat.ReplicaCoupling(
        replicas, period=1, gamma=0.3, mode="proximal", optimizer=torch.optim.SGD(replicas.parameters(), lr=0.1)
    ),
    "EASGD": lambda replicas: wideflat.EASGD(replicas, period=1, gamma=0.3),
}

#: Operations whose answer the host waits for.
WAITING = {"aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.item", "aten.nonzero"}

#: What launches nothing.
VIEWS = {"aten.detach", "aten.view", "aten.as_strided", "aten.split_with_sizes", "aten.slice", "aten.alias"}
VIEWS |= {"aten.empty_like", "aten.empty_strided", "aten.empty", "aten.split", "aten.unbind", "aten.select", "aten.t"}
VIEWS |= {"aten.unsqueeze", "aten.expand", "aten.permute", "aten.transpose"}


class Watch(TorchDispatchMode):
    """Counts launches on the device, and remembers what should not happen there."""

    def __init__(self, device="meta"):
        super().__init__()
        self.device, self.launches, self.forbidden = device, Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.replace("::", ".")
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        here = any(t.device.type == self.device for t in tensors)
        result = func(*args, **(kwargs or {}))
        made = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if here and name in WAITING:
            self.forbidden.append(name)
        if here and any(t.device.type == "cpu" for t in made):
            self.forbidden.append(f"{name} to the CPU")
        if any(t.dtype == torch.float64 and t.device.type == self.device for t in [*tensors, *made]):
            self.forbidden.append(f"{name} in float64")
        if name not in VIEWS and (here or any(t.device.type == self.device for t in made)):
            self.launches[name] += 1
        return result


def parameters(count, dtype=torch.float32):
    params = [nn.Parameter(torch.empty(4 + k % 3, 5, device="meta", dtype=dtype)) for k in range(count)]
    for p in params:
        p.grad = torch.empty_like(p)
    return params


def watched(step):
    with Watch() as watch:
        step()
    return watch


def cycle(opt):
    """What two further steps launch, the second with the outer one, after those that make the state."""
    for _ in range(4):
        opt.step()
    return watched(lambda: [opt.step() for _ in range(2)])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_waits_for_the_device_or_uses_float64(name):
    assert cycle(OPTIMIZERS[name](parameters(3))).forbidden == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_launches_do_not_grow_with_the_tensors(name):
    few, many = (cycle(OPTIMIZERS[name](parameters(count))).launches for count in (5, 50))
    assert few == many and few.total() > 0


FAMILY = [wideflat.SAM, wideflat.ASAM, wideflat.GSAM, wideflat.FriendlySAM, wideflat.LookSAM]


def sam_steps(kind, count, steps=2):
    """What so many steps of the family launch, after the first one, which makes the state."""
    params = parameters(count)
    opt = kind(params, rho=0.05, lr=0.02, foreach=True, **SGD)

    def both_halves():
        opt.perturb()
        for p in params:
            p.grad = torch.empty_like(p)
        opt.restore()
        opt.step()

    both_halves()
    return watched(lambda: [both_halves() for _ in range(steps)])


@pytest.mark.parametrize("kind", FAMILY)
def test_the_sam_family_waits_for_nothing(kind):
    assert sam_steps(kind, 3).forbidden == []


@pytest.mark.parametrize("kind", FAMILY)
def test_launches_of_the_sam_family_do_not_grow_with_the_tensors(kind):
    """Of five steps: LookSAM takes both kinds. Gradients are made by the test, one for each tensor."""
    few, many = (sam_steps(kind, count, 5).launches for count in (5, 50))
    assert few == many and few.total() > 0


@pytest.mark.parametrize("rounding", ["kept", "stochastic"])
def test_half_precision_waits_for_nothing_either(rounding):
    opt = wideflat.EntropySGD(parameters(3, torch.bfloat16), epsilon=0.01, rounding=rounding, **CYCLE, **SGD)
    assert cycle(opt).forbidden == []


def test_the_noise_of_a_group_is_a_constant_number_of_launches():
    def launches(count, epsilon):
        return cycle(wideflat.EntropySGD(parameters(count), epsilon=epsilon, **CYCLE, **SGD)).launches.total()

    assert launches(5, 0.1) - launches(5, 0.0) == launches(80, 0.1) - launches(80, 0.0) > 0


def test_launches_of_a_step_beside_those_of_torch():
    """An inner step and a cycle, against torch's foreach SGD; the figures of docs/devices.md."""
    sgd = torch.optim.SGD(parameters(20), lr=0.1, foreach=True, **SGD)
    sgd.step()
    theirs = watched(sgd.step).launches.total()
    opt = wideflat.EntropySGD(parameters(20), epsilon=0.0, inner_steps=3, **SGD)
    for _ in range(4):
        opt.step()
    inner = watched(opt.step).launches.total()
    outer = watched(opt.step).launches.total() - inner
    assert (theirs, inner, outer) == LAUNCHES


#: Of torch's SGD with Nesterov momentum and decay, of an inner step of EntropySGD, of an outer one.
LAUNCHES = (5, 9, 7)


@pytest.mark.parametrize("name", COUPLINGS)
def test_couplings_neither(name):
    replicas = wideflat.Replicas(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to("meta"), 3)
    for p in replicas.parameters():
        p.grad = torch.empty_like(p)
    coupling = COUPLINGS[name](replicas)
    coupling.couple()
    assert watched(coupling.couple).forbidden == []


def test_the_watch_sees_what_it_forbids():
    p = torch.empty(3, device="meta")
    assert watched(lambda: p.double()).forbidden == ["aten._to_copy in float64"]
    x = torch.ones(2)
    with Watch("cpu") as watch:
        bool(x.any())
        torch.equal(x, x)
    assert {"aten._local_scalar_dense", "aten.equal"} & set(watch.forbidden)
