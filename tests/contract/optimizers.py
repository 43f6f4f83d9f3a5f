"""Every optimizer of the package, a line each: what this folder asks of all of them.

`test_all_are_here` fails where one is missing. A line is a function of parameters (or groups of them) and of settings
that replace its own, such as ``lr``.
"""

from functools import partial

import pytest
import torch
from torch import nn

import wideflat
from wideflat.baselines import TensorFlowRMSprop

SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
CYCLE = {"inner_steps": 3, "lr": 0.7, "inner_lr": 0.02}
#: With a small rho the two gradients are nearly the same, and rounding is a large part of what is between them.
LOOK = {"lr": 0.02, "period": 3, "rho": 1.0, "alpha": 0.3}
#: Where a line makes an optimizer inside, these are for that one.
OF_THE_BASE = ("foreach", "maximize", "differentiable")


def entropy_sgd(params, **changes):
    return wideflat.EntropySGD(params, **({"epsilon": 0.01} | CYCLE | changes))


def entropic(params, base=torch.optim.SGD, lr=0.02, settings=SGD, **changes):
    of_the_base = {name: changes.pop(name) for name in OF_THE_BASE if name in changes}
    inner = base(params, lr=lr, **settings, **of_the_base)
    return wideflat.Entropic(inner, **({"inner_steps": 3, "pull": 0.5, "alpha": 0.3} | changes))


OPTIMIZERS = {
    "EntropySGD": partial(entropy_sgd, **SGD),
    "EntropySGD, no kernel": partial(entropy_sgd, fused=False, **SGD),
    "EntropySGD, no momentum": partial(entropy_sgd, momentum=0.0),
    "EntropySGD, capturable": partial(entropy_sgd, capturable=True, **SGD),
    "EntropySGD(inner=SGD)": partial(entropy_sgd, inner=partial(torch.optim.SGD, **SGD), epsilon=0.0),
    "EntropySGD(inner=AdamW)": partial(entropy_sgd, inner=torch.optim.AdamW, gamma=0.0),
    "EntropySGD(inner=RMSprop), restarted": partial(
        entropy_sgd, inner=partial(torch.optim.RMSprop, momentum=0.9), inner_state="restart"
    ),
    "Lookahead": lambda params, **changes: wideflat.Lookahead(params, **(CYCLE | SGD | changes)),
    "Entropic": entropic,
    "Entropic, no mean": partial(entropic, alpha=0.0),
    "Entropic, capturable": partial(entropic, capturable=True),
    "Entropic(AdamW)": partial(entropic, base=torch.optim.AdamW, settings={}),
    "Entropic(Rprop), Adam outside": partial(
        entropic, base=torch.optim.Rprop, settings={}, outer=partial(torch.optim.Adam, lr=0.1)
    ),
    "SNOO": lambda params, lr=0.02, **changes: wideflat.SNOO(
        torch.optim.SGD(params, lr=lr, **SGD, **{k: v for k, v in changes.items() if k in OF_THE_BASE}), inner_steps=3
    ),
    "SAM": lambda params, **changes: wideflat.SAM(params, **({"rho": 0.05, "lr": 0.02} | SGD | changes)),
    "SAM, no momentum": lambda params, **changes: wideflat.SAM(params, **({"lr": 0.02} | changes)),
    "SAM(Adam)": lambda params, **changes: wideflat.SAM(params, torch.optim.Adam, **({"lr": 0.02} | changes)),
    "ASAM": lambda params, **changes: wideflat.ASAM(params, **({"rho": 0.1, "lr": 0.02} | SGD | changes)),
    "GSAM": lambda params, **changes: wideflat.GSAM(params, **({"lr": 0.02} | SGD | changes)),
    "FriendlySAM": lambda params, **changes: wideflat.FriendlySAM(params, **({"lr": 0.02} | SGD | changes)),
    "LookSAM": lambda params, **changes: wideflat.LookSAM(params, **(LOOK | SGD | changes)),
    "TensorFlowRMSprop": lambda params, **changes: TensorFlowRMSprop(
        params, **({"lr": 0.002, "momentum": 0.9} | changes)
    ),
}
every = pytest.mark.parametrize("name", OPTIMIZERS)
#: Those that have a center.
CENTERED = [name for name in OPTIMIZERS if name.startswith(("EntropySGD", "Lookahead", "Entropic", "SNOO"))]
#: Those that are tested in half precision and all layouts: one of each kind. What LookSAM divides by is a difference of
#: gradients, so that rounding grows from step to step.
COVERING = [
    name for name in OPTIMIZERS if not any(word in name for word in ("Adam", "restarted", "SAM,", "LookSAM", "SNOO"))
]


def gradients_at(params, t):
    """The gradients of a smooth loss; they lie in memory as they like."""
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(100 * t + i)
        target = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        curvature = torch.linspace(0.5, 1.5, p.numel(), dtype=torch.float64).view(p.shape)
        p.grad = (curvature * (p.detach().double() - target)).to(p.dtype)


def step(opt, params, t, gradients=gradients_at):
    """One step with these gradients; by a closure where the optimizer asks for one."""

    def closure():
        opt.zero_grad()
        gradients(params, t)
        return torch.zeros(())

    if isinstance(opt, wideflat.SAM):
        return opt.step(closure)
    closure()
    return opt.step()


def weights(sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((0.5 + 0.1 * torch.randn(size, generator=generator)).to(dtype)) for size in sizes]


def copied(params):
    return [nn.Parameter(p.detach().clone()) for p in params]


def uncoupled(opt):
    """Without what lets parameters feel each other: norms and inner products over all of them."""
    for group in opt.param_groups:
        group.update({"rho": 0.0} if "rho" in group else {})
    if isinstance(opt, wideflat.GSAM | wideflat.LookSAM):
        opt.alpha = 0.0
    return opt


def without_noise(opt):
    for group in opt.param_groups:
        group.update({"epsilon": 0.0} if "epsilon" in group else {})
    return opt
