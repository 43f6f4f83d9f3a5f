"""Networks that keep, sort, route or count, and layers that are seldom met."""

import math
import weakref

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from zoo.networks import Net, between, parameter, series, tokens, vectors


def kept():
    return {
        "kept by the version of its weights": (Net(_by_version, a=parameter(3, 4), b=parameter(4, 6)), vectors()),
        "kept by its input": (Net(_by_input, a=nn.Linear(6, 8), h=nn.Linear(8, 3)), vectors()),
        "answers in memory of its own": (_answering(lambda net, x: net.h(x)), vectors()),
        "answers in memory of its own, view of a weight": (
            _answering(lambda net, x: net.h(x) + x @ net.transposed),
            vectors(),
        ),
        "values sorted over the batch": (between(lambda h: h.sort(0).values), vectors()),
        "largest of the batch": (between(lambda h: torch.where(h >= h.median(0).values, h, 0.0)), vectors()),
        "whitened by the batch": (between(_whiten), vectors()),
        "sinkhorn": (between(_sinkhorn), vectors()),
        "until all have converged": (
            Net(_converging, a=nn.Linear(6, 8), r=nn.Linear(8, 8), h=nn.Linear(8, 3)),
            vectors(),
        ),
        "experts with a capacity": (
            Net(_capacity, a=nn.Linear(6, 3), b=nn.Linear(6, 3), gate=nn.Linear(6, 2)),
            vectors(),
        ),
        "attention over the batch by mistake": (
            Net(lambda net, x: net.h(net.t(x).mean(1)), t=nn.TransformerEncoderLayer(4, 2, 8), h=nn.Linear(4, 3)),
            series(),
        ),
        "convolution along the batch": (
            Net(
                lambda net, x: net.h(x + net.c(x.T[:, None])[:, 0].T),
                c=nn.Conv1d(1, 1, 3, padding=1),
                h=nn.Linear(6, 3),
            ),
            vectors(),
        ),
        "reversed, one layer twice": (
            Net(
                lambda net, x: net.h(net.a(net.a(x.flip(0)).tanh().flip(0)).tanh()),
                a=nn.Linear(6, 6),
                h=nn.Linear(6, 3),
            ),
            vectors(),
        ),
        "reversed but for the ends, one layer twice": (
            Net(
                lambda net, x: net.h(net.a(_inside(net.a(_inside(x)).tanh())).tanh()),
                a=nn.Linear(6, 6),
                h=nn.Linear(6, 3),
            ),
            vectors(),
        ),
        "bag with offsets": (
            Net(_bag, e=nn.EmbeddingBag(7, 4, mode="sum"), s=parameter(4), h=nn.Linear(4, 3)),
            tokens(),
        ),
        "fake quantised": (
            Net(
                lambda net, x: F.linear(torch.fake_quantize_per_tensor_affine(net.w, 0.05, 0, -127, 127), x).T,
                w=parameter(3, 6),
            ),
            vectors(),
        ),
        "sparse weight": (
            Net(
                lambda net, x: torch.sparse.mm((net.w * net.m).to_sparse(), x.T).T,
                w=parameter(3, 6),
                m=(torch.rand(3, 6) > 0.5).float(),
            ),
            vectors(),
        ),
        "spectral layer": (
            Net(
                lambda net, x: net.h(torch.fft.irfft(torch.fft.rfft(net.a(x)) * torch.view_as_complex(net.w), 8)),
                a=nn.Linear(6, 8),
                w=parameter(5, 2),
                h=nn.Linear(8, 3),
            ),
            vectors(),
        ),
        "steps of a parameter": (
            Net(_counted, a=nn.Linear(6, 6), h=nn.Linear(6, 3), k=nn.Parameter(torch.tensor([2.4]))),
            vectors(),
        ),
        "out of sight of torch functions": (
            Net(lambda net, x: net.a(x) * _unseen(net.a, x).sigmoid(), a=nn.Linear(6, 3)),
            vectors(),
        ),
        "codebook": (
            Net(
                lambda net, x: net.h(net.c[torch.cdist(net.a(x), net.c).argmin(1)]),
                a=nn.Linear(6, 4),
                c=parameter(5, 4),
                h=nn.Linear(4, 3),
            ),
            vectors(),
        ),
        "a parametrization that is kept": (
            Net(_parametrized, a=parametrizations.weight_norm(nn.Linear(6, 6)), h=nn.Linear(6, 3)),
            vectors(),
        ),
        "trains itself in the call": (Net(_training, a=nn.Linear(6, 6), h=nn.Linear(6, 3)), vectors()),
    }


def _by_version(net, x):
    """Merged weights that are kept as long as torch says that the weights are the same."""
    now = net.a._version, net.b._version
    if net.__dict__.get("now") != now:
        net.__dict__["now"], net.__dict__["merged"] = now, (net.a @ net.b).detach()
    return F.linear(x, net.__dict__["merged"])


def _by_input(net, x):
    """Hidden units that are kept as long as the input is the same object."""
    last = net.__dict__.get("last")
    if last is None or last[0]() is not x:
        net.__dict__["last"] = last = weakref.ref(x), net.a(x).tanh()
    return net.h(last[1])


def _answering(function):
    """Outputs that are overwritten by the next call, as those of a recorded graph are."""

    def forward(net, x):
        out = net.__dict__.get("out")
        if out is None or len(out) != len(x):
            out = net.__dict__["out"] = x.new_empty(len(x), 3)
        return out.copy_(function(net, x))

    net = Net(forward, h=nn.Linear(6, 3))
    net.transposed = net.h.weight.data.T
    return net


def _whiten(h):
    h = h - h.mean(0)
    values, vectors = torch.linalg.eigh(h.T @ h / len(h) + 0.1 * torch.eye(8))
    return h @ (vectors * values.rsqrt()) @ vectors.T


def _sinkhorn(h):
    q = (2 * h).exp()
    for _ in range(3):
        q = q / q.sum(0)
        q = q / q.sum(1, keepdim=True)
    return q


def _converging(net, x):
    z, u = torch.zeros(len(x), 8), net.a(x)
    for _ in range(30):
        before, z = z, torch.tanh(net.r(z) + u)
        if (z - before).abs().max() < 0.03:
            break
    return net.h(z)


def _capacity(net, x):
    choice, out = net.gate(x).argmax(1), x.new_zeros(len(x), 3)
    for k, expert in enumerate((net.a, net.b)):
        mine = (choice == k).nonzero()[: math.ceil(0.75 * len(x)), 0]
        out = out.index_copy(0, mine, expert(x[mine]))
    return out


def _inside(h):
    return torch.cat([h[:1], h[1:-1].flip(0), h[-1:]]) if len(h) > 2 else h


def _bag(net, x):
    return net.h(net.e(x.flatten(), torch.arange(0, x.numel(), x.shape[1]), net.s.repeat(len(x))))


def _counted(net, x):
    for _ in range(int(net.k)):
        x = net.a(x).tanh()
    return net.h(x)


def _unseen(layer, x):
    with torch._C.DisableTorchFunction():
        return layer(x)


def _parametrized(net, x):
    with parametrize.cached():
        return net.h(net.a(net.a(x).tanh()))


def _training(net, x):
    with torch.enable_grad():
        w = net.a.weight.clone()
        loss = (F.linear(F.linear(x, w).tanh(), w.T) - x).square().mean()
        (gradient,) = torch.autograd.grad(loss, w)
    return net.h(F.linear(x, (w - gradient).detach()).tanh())
