"""Layers of every kind."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from zoo.networks import EXAMPLES, Net, between, head, images, mlp, parameter, seen, series, tokens, vectors


def plain():
    return {
        "linear": (nn.Linear(6, 3), vectors()),
        "linear without bias": (nn.Linear(6, 3, bias=False), vectors()),
        "mlp": (mlp(nn.ReLU()), vectors()),
        "mlp of double precision": (mlp(nn.Tanh()).double(), vectors().double()),
        "one output, squeezed": (Net(lambda net, x: net.a(x).squeeze(), a=nn.Linear(6, 1)), vectors()),
        "prelu": (mlp(nn.PReLU(8)), vectors()),
        "bilinear": (Net(lambda net, x: net.a(x, x.cos()), a=nn.Bilinear(6, 6, 3)), vectors()),
        "dropout": (mlp(nn.Dropout(0.5), nn.ReLU()), vectors()),
        "random in eval mode": (between(lambda h: F.dropout(h, 0.3)), vectors()),
        "nested": (
            nn.Sequential(mlp(nn.ReLU()), nn.Sequential(nn.Linear(3, 8), nn.Sequential(mlp(features=8)))),
            vectors(),
        ),
        "complex inside": (
            Net(lambda net, x: net.b(torch.fft.rfft(net.a(x)).abs()), a=nn.Linear(6, 8), b=nn.Linear(5, 3)),
            vectors(),
        ),
        "complex weight": (
            Net(lambda net, x: (x.to(torch.complex64) @ torch.view_as_complex(net.w)).abs(), w=parameter(6, 3, 2)),
            vectors(),
        ),
    }


def normalisations():
    x = images(4)
    h = torch.randn(EXAMPLES, 8)
    return {
        "batch norm": (
            nn.Sequential(nn.Linear(6, 8), seen(nn.BatchNorm1d(8), h), nn.ReLU(), nn.Linear(8, 3)),
            vectors(),
        ),
        "layer norm": (mlp(nn.LayerNorm(8)), vectors()),
        "layer norm, reused": (
            Net(
                lambda net, x: net.b(net.n(net.n(net.a(x)).relu())),
                a=nn.Linear(6, 8),
                n=nn.LayerNorm(8),
                b=nn.Linear(8, 3),
            ),
            vectors(),
        ),
        "rms norm": (mlp(nn.RMSNorm(8)), vectors()),
        "group norm": (head(144, nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)), x),
        "instance norm": (head(144, nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True)), x),
        "batch norm first": (nn.Sequential(seen(nn.BatchNorm1d(6), vectors()), nn.Linear(6, 3)), vectors()),
        "statistics of the batch by hand": (between(lambda h: (h - h.mean(0)) / (h.std(0) + 0.1)), vectors()),
        "statistics of the batch": (
            mlp(nn.BatchNorm1d(8, affine=False, track_running_stats=False), nn.Tanh()),
            vectors(),
        ),
        "statistics of the batch, affine": (mlp(nn.BatchNorm1d(8, track_running_stats=False), nn.Tanh()), vectors()),
    }


def convolutions():
    x, norm = images(), seen(nn.BatchNorm2d(4), torch.randn(9, 4, 6, 6))
    block = Net(lambda net, x: F.relu(x + net.n(net.c(x))), c=nn.Conv2d(4, 4, 3, padding=1), n=copy.deepcopy(norm))
    excite = Net(
        lambda net, x: x * torch.sigmoid(net.b(F.relu(net.a(x.mean((2, 3))))))[:, :, None, None],
        a=nn.Linear(4, 2),
        b=nn.Linear(2, 4),
    )
    return {
        "conv1d": (head(18, nn.Conv1d(5, 6, 2)), series()),
        "conv2d": (head(64, nn.Conv2d(2, 4, 3), nn.ReLU()), x),
        "conv3d": (head(32, nn.Conv3d(1, 4, 2)), torch.randn(EXAMPLES, 1, 3, 3, 3)),
        "transposed": (head(98, nn.ConvTranspose2d(2, 2, 2)), x),
        "depthwise": (head(128, nn.Conv2d(4, 8, 3, groups=4)), images(4)),
        "grouped": (head(96, nn.Conv2d(4, 6, 3, groups=2), nn.ReLU()), images(4)),
        "dilated": (head(16, nn.Conv2d(2, 4, 3, dilation=2)), x),
        "circular": (head(144, nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")), x),
        "strided, channels last": (head(16, nn.Conv2d(2, 4, 3, 2)).to(memory_format=torch.channels_last), x),
        "folded batch norm": (head(144, nn.Conv2d(2, 4, 3, padding=1), norm, nn.ReLU()), x),
        "residual": (head(144, nn.Conv2d(2, 4, 1), block, nn.ReLU()), x),
        "squeeze and excite": (head(64, nn.Conv2d(2, 4, 3), excite), x),
        "two dilations of one kernel": (
            Net(
                lambda net, x: net.h(
                    torch.cat([F.conv2d(x, net.w, dilation=d, padding=d) for d in (1, 2)], 1).flatten(1)
                ),
                w=parameter(3, 2, 3, 3),
                h=nn.Linear(216, 3),
            ),
            x,
        ),
        "by unfolding": (
            Net(
                lambda net, x: net.h((net.w @ F.unfold(x, 3)).tanh().flatten(1)), w=parameter(4, 18), h=nn.Linear(64, 3)
            ),
            x,
        ),
    }


def sequences():
    encoder = {"d_model": 4, "nhead": 2, "dim_feedforward": 8}
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    cell = Net(_lstm_cell, cell=nn.LSTMCell(4, 5), h=nn.Linear(5, 3))
    own = Net(_attention, q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4), h=nn.Linear(4, 3))
    return {
        "lstm": (
            Net(lambda net, x: net.h(net.r(x)[0][:, -1]), r=nn.LSTM(4, 5, batch_first=True), h=nn.Linear(5, 3)),
            series(),
        ),
        "gru": (
            Net(lambda net, x: net.h(net.r(x)[0][:, -1]), r=nn.GRU(4, 5, batch_first=True), h=nn.Linear(5, 3)),
            series(),
        ),
        "both directions": (
            Net(
                lambda net, x: net.h(net.r(x)[0].mean(1)),
                r=nn.RNN(4, 5, batch_first=True, bidirectional=True),
                h=nn.Linear(10, 3),
            ),
            series(),
        ),
        "lstm, time first": (
            Net(lambda net, x: net.h(net.r(x.transpose(0, 1))[0][-1]), r=nn.LSTM(4, 5), h=nn.Linear(5, 3)),
            series(),
        ),
        "lstm cell": (cell, series()),
        "transformer": (head(20, nn.TransformerEncoderLayer(**encoder, batch_first=True)), series()),
        "transformer, time first": (
            Net(
                lambda net, x: net.h(net.t(x.transpose(0, 1)).mean(0)),
                t=nn.TransformerEncoderLayer(**encoder, activation="gelu"),
                h=nn.Linear(4, 3),
            ),
            series(),
        ),
        "multi-head attention": (
            Net(lambda net, x: net.h(net.a(x, x, x, need_weights=False)[0].mean(1)), a=attention, h=nn.Linear(4, 3)),
            series(),
        ),
        "attention of one's own": (own, series()),
        "positions": (
            Net(lambda net, x: net.b(net.a(x).tanh()).mean(1), a=nn.Linear(4, 5), b=nn.Linear(5, 3)),
            series(),
        ),
        "positions folded into the batch": (
            Net(
                lambda net, x: net.b(net.a(x.flatten(0, 1)).tanh()).reshape(len(x), -1),
                a=nn.Linear(4, 5),
                b=nn.Linear(5, 2),
            ),
            series(),
        ),
        "time first": (Net(lambda net, x: net.a(x.transpose(0, 1)).tanh().mean(0), a=nn.Linear(4, 3)), series()),
        "as long as the batch": (
            Net(lambda net, x: net.a(x.transpose(0, 1)).tanh().mean(0), a=nn.Linear(3, 3)),
            series(EXAMPLES, 3),
        ),
        "embedding": (Net(lambda net, x: net.h(net.e(x).mean(1)), e=nn.Embedding(7, 4), h=nn.Linear(4, 3)), tokens()),
        "embedding bag": (Net(lambda net, x: net.h(net.e(x)), e=nn.EmbeddingBag(7, 4), h=nn.Linear(4, 3)), tokens()),
        "embedding that bounds its weights": (
            Net(lambda net, x: net.h(net.e(x).mean(1)), e=nn.Embedding(7, 4, max_norm=1.0), h=nn.Linear(4, 3)),
            tokens(),
        ),
        "embedding tied to the output": (_tied(), tokens()),
    }


def _lstm_cell(net, x):
    state = None
    for t in range(x.shape[1]):
        state = net.cell(x[:, t], state)
    return net.h(state[0])


def _attention(net, x):
    weights = torch.einsum("bid,bjd->bij", net.q(x), net.k(x)).softmax(-1)
    return net.h(torch.einsum("bij,bjd->bid", weights, net.v(x)).mean(1))


def _tied():
    net = Net(lambda net, x: net.h(net.e(x).mean(1).tanh()), e=nn.Embedding(7, 4), h=nn.Linear(4, 7, bias=False))
    net.h.weight = net.e.weight
    return net
