"""Networks that somebody else might bring."""

import torch
from torch import nn
from torch.nn import functional as F

from zoo.networks import Net, images, mlp, parameter, series, vectors


def strange():
    return {
        "state space": (Net(_state_space, a=parameter(5), b=nn.Linear(4, 5), c=nn.Linear(5, 3)), series()),
        "deformed grid": (
            Net(_deformed, o=nn.Conv2d(2, 2, 3, padding=1), c=nn.Conv2d(2, 3, 3), h=nn.Linear(48, 3)),
            images(),
        ),
        "looks at the memory of its images": (
            Net(
                lambda net, x: (
                    net.h(x.as_strided((len(x), 2, 4, 4), (72, 36, 6, 1)).flatten(1)) + net.c(x).mean((2, 3))
                ),
                h=nn.Linear(32, 3),
                c=nn.Conv2d(2, 3, 1),
            ),
            images(),
        ),
        "prototypes": (
            Net(lambda net, x: -torch.cdist(net.a(x), net.p), a=nn.Linear(6, 4), p=parameter(3, 4)),
            vectors(),
        ),
        "cosine of prototypes": (
            Net(
                lambda net, x: 3 * F.cosine_similarity(net.a(x)[:, None], net.p[None], dim=2),
                a=nn.Linear(6, 4),
                p=parameter(3, 4),
            ),
            vectors(),
        ),
        "attention with a cache": (
            Net(_cached, q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4), h=nn.Linear(4, 3)),
            series(),
        ),
        "a cache that outlives the call": (
            Net(_outliving, q=nn.Linear(4, 4), k=nn.Linear(4, 4), h=nn.Linear(4, 3)),
            series(),
        ),
        "lengths by the place in the batch": (
            Net(_lengths, r=nn.LSTM(4, 5, batch_first=True), h=nn.Linear(5, 3)),
            series(),
        ),
        "weights of another layer": (
            Net(
                lambda net, x: (
                    torch.func.functional_call(net.b, {"weight": net.a.weight, "bias": 2 * net.a.bias}, (x,)).tanh()
                    @ net.h
                ),
                a=nn.Linear(6, 8),
                b=nn.Linear(6, 8),
                h=parameter(8, 3),
            ),
            vectors(),
        ),
        "rolled by a hook": (_rolled(), vectors()),
        "bfloat16": (mlp(nn.Tanh()).bfloat16(), vectors().bfloat16()),
        "float16": (mlp(nn.Tanh()).half(), vectors().half()),
        "bytes": (
            Net(lambda net, x: net.h(net.c(x.float() / 255).flatten(1)), c=nn.Conv2d(2, 3, 3), h=nn.Linear(48, 3)),
            torch.randint(0, 256, (32, 2, 6, 6), dtype=torch.uint8),
        ),
        "no axis, no element": (
            Net(
                lambda net, x: net.a(x) * net.s + net.e.sum(),
                a=nn.Linear(6, 3),
                s=nn.Parameter(torch.tensor(1.3)),
                e=nn.Parameter(torch.empty(0, 4)),
            ),
            vectors(),
        ),
        "inference mode inside": (Net(_inference, a=nn.Linear(6, 8), h=nn.Linear(8, 3)), vectors()),
    }


def _state_space(net, x):
    state, seen = x.new_zeros(len(x), 5), []
    for t in range(x.shape[1]):
        state = state * (-net.a.exp()).exp() + net.b(x[:, t])
        seen.append(state)
    return net.c(torch.stack(seen, 1)).mean(1)


def _deformed(net, x):
    grid = F.affine_grid(torch.eye(2, 3).repeat(len(x), 1, 1), x.shape, align_corners=False)
    grid = grid + 0.3 * net.o(x).tanh().permute(0, 2, 3, 1)
    return net.h(net.c(F.grid_sample(x, grid, align_corners=False)).flatten(1))


def _cached(net, x):
    keys, values = [], []
    for t in range(x.shape[1]):
        keys.append(net.k(x[:, t]))
        values.append(net.v(x[:, t]))
        weights = torch.einsum("bd,btd->bt", net.q(x[:, t]), torch.stack(keys, 1)).softmax(-1)
    return net.h(torch.einsum("bt,btd->bd", weights, torch.stack(values, 1)))


def _outliving(net, x):
    if net.__dict__.get("keys") is None:
        net.__dict__["keys"] = net.k(x)
    return net.h((net.__dict__["keys"] * net.q(x)).sum(1))


def _lengths(net, x):
    lengths = torch.arange(len(x)) % x.shape[1] + 1
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return net.h(nn.utils.rnn.pad_packed_sequence(net.r(packed)[0], batch_first=True, total_length=5)[0].mean(1))


def _rolled():
    model = mlp(nn.Tanh())
    model[2].register_forward_hook(lambda module, inputs, output: output.roll(1, 0))
    return model


@torch.inference_mode()
def _inference(net, x):
    return net.h(net.a(x).tanh())
