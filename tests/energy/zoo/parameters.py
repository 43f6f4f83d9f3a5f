"""Parameters held and used in every way."""

import copy
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from zoo.networks import Net, mlp, parameter, vectors


def parameters():
    layer = nn.Linear(6, 6)
    one = nn.Linear(8, 8)
    return {
        "functional": (Net(lambda net, x: F.linear(x, net.w, net.b), w=parameter(3, 6), b=parameter(3)), vectors()),
        "matrix product": (Net(lambda net, x: x @ net.w + net.b, w=parameter(6, 3), b=parameter(3)), vectors()),
        "einsum": (Net(lambda net, x: torch.einsum("bi,io->bo", x, net.w), w=parameter(6, 3)), vectors()),
        "addmm": (Net(lambda net, x: torch.addmm(net.b, x, net.w), w=parameter(6, 3), b=parameter(3)), vectors()),
        "elementwise": (
            Net(lambda net, x: net.h(x * net.s + net.t), s=parameter(6), t=parameter(6), h=nn.Linear(6, 3)),
            vectors(),
        ),
        "a number": (Net(lambda net, x: net.h(x) * net.s.item(), s=parameter(1), h=nn.Linear(6, 3)), vectors()),
        "row vector": (Net(lambda net, x: F.linear(x, net.w)[:, None], w=parameter(6)), vectors()),
        "dictionary": (
            Net(
                lambda net, x: F.linear(x, net.p["w"], net.p["b"]),
                p=nn.ParameterDict({"w": parameter(3, 6), "b": parameter(3)}),
            ),
            vectors(),
        ),
        "list": (
            Net(
                lambda net, x: F.linear(F.linear(x, net.p[0]).relu(), net.p[1]),
                p=nn.ParameterList([parameter(8, 6), parameter(3, 8)]),
            ),
            vectors(),
        ),
        "modules of a list, again": (
            Net(
                lambda net, x: net.h(net.l[1](net.l[0](net.l[1](net.l[0](x).tanh()).tanh()))),
                l=nn.ModuleList([layer, nn.Linear(6, 6)]),
                h=nn.Linear(6, 3),
            ),
            vectors(),
        ),
        "recurrent use": (
            Net(
                lambda net, x: net.h(net.r(net.r(net.r(net.a(x)).tanh()).tanh())),
                a=nn.Linear(6, 8),
                r=one,
                h=nn.Linear(8, 3),
            ),
            vectors(),
        ),
        "tied": (_tied_linear(), vectors()),
        "transpose of itself": (
            Net(lambda net, x: F.linear(F.linear(x, net.w).tanh(), net.w.t()), w=parameter(8, 6)),
            vectors(),
        ),
        "low rank": (Net(lambda net, x: F.linear(x, net.a @ net.b), a=parameter(3, 2), b=parameter(2, 6)), vectors()),
        "mask": (
            Net(lambda net, x: F.linear(x, net.w * net.m), w=parameter(3, 6), m=(torch.rand(3, 6) > 0.5).float()),
            vectors(),
        ),
        "pruned": (_pruned(), vectors()),
        "weight norm, old": (_old(nn.utils.weight_norm), vectors()),
        "weight norm": (
            nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3)),
            vectors(),
        ),
        "spectral norm, old": (_old(nn.utils.spectral_norm), vectors()),
        "spectral norm": (
            nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3)),
            vectors(),
        ),
        "parametrized": (_parametrized(), vectors()),
        "computed bias": (
            Net(
                lambda net, x: net.h(F.linear(x, net.w, net.b * 2).tanh()),
                w=parameter(8, 6),
                b=parameter(8),
                h=nn.Linear(8, 3),
            ),
            vectors(),
        ),
        "cosine": (Net(lambda net, x: F.linear(F.normalize(x), F.normalize(net.w)), w=parameter(3, 6)), vectors()),
        "hypernetwork": (
            Net(lambda net, x: F.linear(x, net.h(net.c).reshape(3, 6)), h=nn.Linear(4, 18), c=torch.randn(4)),
            vectors(),
        ),
        "buffer as input": (
            Net(lambda net, x: net.a(x) * net.a(net.c).sigmoid(), a=nn.Linear(6, 3), c=torch.randn(1, 6)),
            vectors(),
        ),
        "ensemble by vmap": (_ensemble(), vectors()),
        "computed behind torch's back": (
            Net(lambda net, x: net.h(_Double.apply(x, net.w)), w=parameter(8, 6), h=nn.Linear(8, 3)),
            vectors(),
        ),
        "a copy in every call": (Net(lambda net, x: copy.deepcopy(net.a)(x) + net.a(x), a=nn.Linear(6, 3)), vectors()),
        "weight normalised in place": (Net(_normalise, w=parameter(3, 6), h=nn.Linear(3, 3)), vectors()),
        "view of a weight": (_viewed(), vectors()),
        "memory shared by two parameters": (_shared_memory(), vectors()),
        "memory shared in part": (_shared_in_part(), vectors()),
        "expanded parameter": (Net(lambda net, x: x * net.s, s=nn.Parameter(torch.ones(1).expand(6))), vectors()),
        "columns of one matrix": (_columns(), vectors()),
    }


def _tied_linear():
    model = mlp(nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    model[4].weight = model[2].weight
    return model


def _pruned():
    model = mlp(nn.ReLU())
    prune.random_unstructured(model[0], "weight", 0.4)
    return model


def _old(norm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        return nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


def _parametrized():
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3))


def _ensemble():
    return Net(lambda net, x: torch.vmap(lambda w: F.linear(x, w).tanh())(net.w).mean(0), w=parameter(4, 3, 6))


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return 2 * F.linear(x, w)


def _normalise(net, x):
    net.w.data = F.normalize(net.w.data)
    return net.h(F.linear(x, net.w))


def _viewed():
    net = Net(lambda net, x: net.h(x) + x @ net.transposed, h=nn.Linear(6, 3))
    net.transposed = net.h.weight.data.T
    return net


def _shared_memory():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight.data = model[0].weight.data
    return model


def _shared_in_part():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].weight.data = model[0].weight.data[2:5]
    return model


def _columns():
    whole = torch.randn(3, 12)
    a, b = nn.Parameter(whole[:, :6]), nn.Parameter(whole[:, 6:])
    return Net(lambda net, x: F.linear(x, net.a) * F.linear(x, net.b).sigmoid(), a=a, b=b)
