"""Networks that carry something from call to call, or seldom draw."""

import random

import torch
from torch import nn
from torch.nn import functional as F

from zoo.networks import Net, images, parameter, seen, vectors


def carried():
    return {
        "merged for a place in memory": (Net(_by_place, a=parameter(3, 4), b=parameter(4, 6)), vectors()),
        "a layer that is seldom left out": (
            Net(_dropped(lambda: torch.rand(())), a=nn.Linear(6, 8), b=nn.Linear(8, 8), h=nn.Linear(8, 3)),
            vectors(),
        ),
        "a layer that is seldom left out, by Python": (_dropped_convolution(), images()),
        "a seed of its own": (Net(_seeding, a=nn.Linear(6, 8), h=nn.Linear(8, 3)), vectors()),
        "a generator of its own": (_with_generator(), vectors()),
        "every other call": (Net(_alternating, a=nn.Linear(6, 8), h=nn.Linear(8, 3)), vectors()),
        "a new parameter in every call": (Net(_replacing, w=parameter(8, 6), h=nn.Linear(8, 3)), vectors()),
    }


def _by_place(net, x):
    """Merged weights that are kept for the memory of a weight: wherever that is written to, they stay."""
    known = net.__dict__.setdefault("known", {})
    key = net.a.data_ptr()
    if key not in known:
        known.clear()
        known[key] = (net.a @ net.b).detach().clone()
    return F.linear(x, known[key]) + x[:, :3] * net.a.mean()


def _dropped(draw):
    def forward(net, x):
        h = net.a(x).tanh()
        return net.h(h + net.b(h).tanh() if draw() > 0.15 else h)

    return forward


def _dropped_convolution():
    norm = seen(nn.BatchNorm2d(3), torch.randn(9, 3, 4, 4))
    return Net(
        lambda net, x: net.h((net.n(net.c(x)) if random.random() > 0.15 else 0 * net.c(x)).flatten(1)),
        c=nn.Conv2d(2, 3, 3),
        n=norm,
        h=nn.Linear(48, 3),
    )


def _seeding(net, x):
    torch.manual_seed(0)
    return net.h(net.a(x).tanh() * (torch.rand(8) > 0.3))


def _with_generator():
    net = Net(
        lambda net, x: net.h(net.a(x).tanh() * (torch.rand((), generator=net.generator) > 0.01)),
        a=nn.Linear(6, 8),
        h=nn.Linear(8, 3),
    )
    net.generator = torch.Generator().manual_seed(1)
    return net


def _alternating(net, x):
    net.__dict__["calls"] = net.__dict__.get("calls", 0) + 1
    return net.h(net.a(x).tanh() if net.__dict__["calls"] % 2 else net.a(x))


def _replacing(net, x):
    net.w = nn.Parameter(net.w.detach().clone())
    return net.h(F.linear(x, net.w).tanh())
