"""Networks that are put together in unusual ways."""

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from zoo.networks import EXAMPLES, Net, images, parameter, series, tokens, vectors


def unusual():
    return {
        "slice of a parameter": (
            Net(lambda net, x: F.linear(x, net.w[1:4], net.b[1:4]), w=parameter(5, 6), b=parameter(5)),
            vectors(),
        ),
        "two slices of one parameter": (
            Net(lambda net, x: F.linear(F.linear(x, net.w[:6]).tanh(), net.w[6:]), w=parameter(9, 6)),
            vectors(),
        ),
        "rows chosen by the data": (
            Net(lambda net, x: (net.w[(x[:, 0] > 0).long()] @ x[:, :, None])[:, :, 0], w=parameter(2, 3, 6)),
            vectors(),
        ),
        "grouped convolution of a repeated kernel": (
            Net(
                lambda net, x: net.h(F.conv2d(x, net.w.repeat(4, 1, 1, 1), groups=4).flatten(1)),
                w=parameter(1, 1, 3, 3),
                h=nn.Linear(64, 3),
            ),
            images(4),
        ),
        "one convolution on two inputs": (
            Net(
                lambda net, x: net.h((net.c(x) - net.c(x.flip(3))).tanh().flatten(1)),
                c=nn.Conv2d(2, 3, 3),
                h=nn.Linear(48, 3),
            ),
            images(),
        ),
        "siamese": (
            Net(
                lambda net, x: net.h((net.a(x[:, 0]) - net.a(x[:, 1])).abs()),
                a=nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
                h=nn.Linear(8, 3),
            ),
            series(2, 6),
        ),
        "weights made from the example": (
            Net(lambda net, x: torch.einsum("boi,bi->bo", net.h(x[:, :4]).reshape(-1, 3, 6), x), h=nn.Linear(4, 18)),
            vectors(),
        ),
        "gradient inside": (
            Net(
                lambda net, x: torch.func.grad(lambda y: F.linear(y, net.w).tanh().sum())(x) @ net.v,
                w=parameter(8, 6),
                v=parameter(6, 3),
            ),
            vectors(),
        ),
        "jvp inside": (
            Net(
                lambda net, x: torch.func.jvp(lambda y: net.h(net.a(y).tanh()), (x,), (torch.ones_like(x),))[1],
                a=nn.Linear(6, 8),
                h=nn.Linear(8, 3),
            ),
            vectors(),
        ),
        "force": (Net(_force, a=nn.Linear(6, 8), h=nn.Linear(8, 1)), vectors()),
        "dual numbers": (Net(_dual, a=nn.Linear(6, 8), h=nn.Linear(8, 3)), vectors()),
        "functional call of itself": (
            Net(
                lambda net, x: torch.func.functional_call(
                    net.a, {"weight": net.a.weight.tanh(), "bias": net.a.bias}, (x,)
                ),
                a=nn.Linear(6, 3),
            ),
            vectors(),
        ),
        "vmap over examples": (Net(lambda net, x: torch.vmap(net.a)(x), a=nn.Linear(6, 3)), vectors()),
        "vmap over examples of a network": (
            Net(
                lambda net, x: torch.vmap(lambda row: net.h(net.a(row).tanh()))(x), a=nn.Linear(6, 8), h=nn.Linear(8, 3)
            ),
            vectors(),
        ),
        "attention, time first": (
            Net(
                lambda net, x: net.h(net.a(*[x.transpose(0, 1)] * 3)[0].mean(0)),
                a=nn.MultiheadAttention(4, 2),
                h=nn.Linear(4, 3),
            ),
            series(),
        ),
        "attention with a learned query": (
            Net(
                lambda net, x: net.h(net.a(net.q.expand(len(x), -1, -1), x, x)[0][:, 0]),
                a=nn.MultiheadAttention(4, 2, batch_first=True),
                q=parameter(1, 1, 4),
                h=nn.Linear(4, 3),
            ),
            series(),
        ),
        "class token": (
            Net(
                _class_token,
                t=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
                q=parameter(1, 1, 4),
                p=parameter(1, 6, 4),
                h=nn.Linear(4, 3),
            ),
            series(),
        ),
        "transformer and decoder": (
            Net(
                lambda net, x: net.h(net.t(x, x.flip(1)).mean(1)),
                t=nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
                h=nn.Linear(4, 3),
            ),
            series(),
        ),
        "gru cell": (Net(_gru_cell, cell=nn.GRUCell(4, 5), h=nn.Linear(5, 3)), series()),
        "packed sequence": (Net(_packed, r=nn.GRU(4, 5, batch_first=True), h=nn.Linear(5, 3)), series()),
        "projected lstm": (
            Net(
                lambda net, x: net.h(net.r(x)[0].mean(1)),
                r=nn.LSTM(4, 6, proj_size=3, batch_first=True),
                h=nn.Linear(3, 3),
            ),
            series(),
        ),
        "transposed in one dimension": (
            Net(lambda net, x: net.h(net.c(x).flatten(1)), c=nn.ConvTranspose1d(5, 2, 2, stride=2), h=nn.Linear(16, 3)),
            series(),
        ),
        "up and down": (
            Net(
                lambda net, x: net.h((x + F.interpolate(net.c(F.avg_pool2d(x, 2)), scale_factor=2)).flatten(1)),
                c=nn.Conv2d(2, 2, 1),
                h=nn.Linear(72, 3),
            ),
            images(),
        ),
        "same padding": (
            Net(
                lambda net, x: net.h(F.conv2d(x, net.w, padding="same").flatten(1)),
                w=parameter(3, 2, 3, 3),
                h=nn.Linear(108, 3),
            ),
            images(),
        ),
        "images without a batch": (
            Net(
                lambda net, x: net.h(torch.stack([net.c(image) for image in x]).flatten(1)),
                c=nn.Conv2d(2, 3, 3),
                h=nn.Linear(48, 3),
            ),
            images(),
        ),
        "channels last inside": (
            Net(
                lambda net, x: net.h(net.c(x.to(memory_format=torch.channels_last)).permute(0, 2, 3, 1).flatten(1)),
                c=nn.Conv2d(2, 3, 3),
                h=nn.Linear(48, 3),
            ),
            images(),
        ),
        "two by two patches": (
            Net(
                lambda net, x: net.h(
                    net.p(x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)).mean((1, 2))
                ),
                p=nn.Linear(8, 5),
                h=nn.Linear(5, 3),
            ),
            images(),
        ),
        "einsum of three": (
            Net(lambda net, x: torch.einsum("bi,io,oc->bc", x, net.u, net.v), u=parameter(6, 4), v=parameter(4, 3)),
            vectors(),
        ),
        "linear in its third argument by name": (
            Net(lambda net, x: F.linear(input=x, weight=net.w, bias=net.b), w=parameter(3, 6), b=parameter(3)),
            vectors(),
        ),
        "weight as the input": (Net(lambda net, x: F.linear(net.w, x).T, w=parameter(3, 6)), vectors()),
        "bias of another": (
            Net(
                lambda net, x: F.linear(x, net.w, net.b) + F.linear(x.cos(), net.v, net.b),
                w=parameter(3, 6),
                v=parameter(3, 6),
                b=parameter(3),
            ),
            vectors(),
        ),
        "bias used elsewhere": (Net(lambda net, x: net.a(x) * net.a.bias.sigmoid(), a=nn.Linear(6, 3)), vectors()),
        "in place on the result": (
            Net(
                lambda net, x: net.b(net.a(x).relu_().mul_(net.s)), a=nn.Linear(6, 8), b=nn.Linear(8, 3), s=parameter(8)
            ),
            vectors(),
        ),
        "prelu with one slope": (nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 3)), vectors()),
        "bilinear of two layers": (
            Net(lambda net, x: net.a(net.b(x), x), a=nn.Bilinear(4, 6, 3), b=nn.Linear(6, 4)),
            vectors(),
        ),
        "keeps its activations": (Net(_caching, a=nn.Linear(6, 8), h=nn.Linear(8, 3)), vectors()),
        "caches a product of its weights": (Net(_cached_product, a=parameter(3, 4), b=parameter(4, 6)), vectors()),
        "returns a view of its input": (
            Net(
                lambda net, x: (x + 0 * net.s)[:, :3] * net.s[:3] if False else x.view_as(x)[:, :3] * net.s[:3],
                s=parameter(6),
            ),
            vectors(),
        ),
        "returns its input beside": (Net(lambda net, x: torch.cat([net.a(x), x], 1), a=nn.Linear(6, 3)), vectors()),
        "double inside": (Net(lambda net, x: net.a(x.double()).float(), a=nn.Linear(6, 3).double()), vectors()),
        "two precisions": (
            Net(lambda net, x: net.h(net.a(x.double()).float()), a=nn.Linear(6, 8).double(), h=nn.Linear(8, 3)),
            vectors(),
        ),
        "autocast inside": (Net(_autocast, a=nn.Linear(6, 8), h=nn.Linear(8, 3)), vectors()),
        "whole numbers": (Net(lambda net, x: net.h(F.one_hot(x, 7).float().flatten(1)), h=nn.Linear(28, 3)), tokens()),
        "embedding times its transpose": (
            Net(lambda net, x: (net.e(x).mean(1) @ net.e.weight.T)[:, :3], e=nn.Embedding(7, 4)),
            tokens(),
        ),
        "embedding with padding": (
            Net(lambda net, x: net.h(net.e(x).sum(1)), e=nn.Embedding(7, 4, padding_idx=0), h=nn.Linear(4, 3)),
            tokens(),
        ),
        "embedding of itself": (
            Net(lambda net, x: net.h(net.w[x].mean(1)), w=parameter(7, 4), h=nn.Linear(4, 3)),
            tokens(),
        ),
        "a layer of the first example": (Net(lambda net, x: net.a(x) + net.a(x[:1]), a=nn.Linear(6, 3)), vectors()),
        "a constant batch of one's own": (
            Net(lambda net, x: net.a(x) + net.a(net.c).mean(0), a=nn.Linear(6, 3), c=torch.randn(EXAMPLES, 6)),
            vectors(),
        ),
        "batch at the end": (Net(lambda net, x: (net.w @ x.T).T, w=parameter(3, 6)), vectors()),
        "repeated examples": (
            Net(lambda net, x: net.a(torch.cat([x, -x])).tanh().view(2, len(x), 3).mean(0), a=nn.Linear(6, 3)),
            vectors(),
        ),
        "repeated inside": (
            Net(lambda net, x: net.a(x.repeat_interleave(2, 0)).tanh().view(len(x), 2, 3).mean(1), a=nn.Linear(6, 3)),
            vectors(),
        ),
        "local response": (
            Net(
                lambda net, x: net.h(F.local_response_norm(net.c(x), 2).flatten(1)),
                c=nn.Conv2d(2, 4, 3),
                h=nn.Linear(64, 3),
            ),
            images(),
        ),
        "fixed point": (Net(_fixed_point, a=nn.Linear(6, 8), r=nn.Linear(8, 8), h=nn.Linear(8, 3)), vectors()),
        "matrix exponential": (
            Net(lambda net, x: x @ torch.matrix_exp(0.3 * net.w)[:, :3], w=parameter(6, 6)),
            vectors(),
        ),
        "solves with its weights": (
            Net(lambda net, x: torch.linalg.solve(net.w @ net.w.T + 2 * torch.eye(6), x.T).T[:, :3], w=parameter(6, 6)),
            vectors(),
        ),
        "complex parameter": (
            Net(
                lambda net, x: (x.to(torch.complex64) @ net.w).abs(),
                w=nn.Parameter(torch.randn(6, 3, dtype=torch.complex64)),
            ),
            vectors(),
        ),
        "a tensor of its own beside": (_unregistered(), vectors()),
    }


def _force(net, x):
    """The gradient of an energy by the inputs."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(net.h(net.a(x).tanh()).sum(), x)
    return gradient


def _dual(net, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net.h(net.a(forward_ad.make_dual(x, torch.ones_like(x))).tanh())).tangent


def _class_token(net, x):
    h = torch.cat([net.q.expand(len(x), -1, -1), x], 1) + net.p
    return net.h(net.t(h)[:, 0])


def _gru_cell(net, x):
    state = x.new_zeros(len(x), 5)
    for t in range(x.shape[1]):
        state = net.cell(x[:, t], state)
    return net.h(state)


def _packed(net, x):
    lengths = 1 + (x[:, 0, 0] > 0).long() * (x.shape[1] - 1)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return net.h(net.r(packed)[1][0])


def _caching(net, x):
    net.__dict__["last"] = net.a(x).tanh()
    return net.h(net.__dict__["last"])


def _cached_product(net, x):
    """Merged weights that are computed once and kept: only for the weights of the first call are they right."""
    if "merged" not in net.__dict__:
        net.__dict__["merged"] = (net.a @ net.b).detach()
    return F.linear(x, net.__dict__["merged"]) + x[:, :3] * net.a.mean()


def _autocast(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.h(net.a(x).tanh()).float()


def _fixed_point(net, x):
    z, u = torch.zeros(len(x), 8), net.a(x)
    for _ in range(4):
        z = torch.tanh(0.5 * net.r(z) + u)
    return net.h(z)


def _unregistered():
    net = Net(lambda net, x: net.a(x) + x @ net.__dict__["extra"], a=nn.Linear(6, 3))
    net.__dict__["extra"] = torch.randn(6, 3)
    return net
