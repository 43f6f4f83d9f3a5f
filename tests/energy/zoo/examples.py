"""What becomes of the examples of a batch."""

import torch
from torch import nn

from zoo.networks import EXAMPLES, Net, between, head, images, series, vectors


def examples():
    return {
        "rows and columns": (
            Net(
                lambda net, x: net.h((net.a(x) + net.a(x.transpose(1, 2))).tanh().flatten(1)),
                a=nn.Linear(5, 4),
                h=nn.Linear(20, 3),
            ),
            series(5, 5),
        ),
        "two views": (
            Net(
                lambda net, x: net.h((net.a(x.view(-1, 6, 4)) + net.a(x.view(-1, 4, 6).transpose(1, 2))).flatten(1)),
                a=nn.Linear(4, 4),
                h=nn.Linear(24, 3),
            ),
            vectors(24),
        ),
        "the input twice": (Net(lambda net, x: net.a(x) * net.a(x).sigmoid(), a=nn.Linear(6, 3)), vectors()),
        "the input twice, changed": (Net(_changed, a=nn.Linear(6, 3)), vectors()),
        "writes into its input": (Net(lambda net, x: net.a(x.mul_(0.7).relu_()), a=nn.Linear(6, 3)), vectors()),
        "writes into its input, unseen": (Net(lambda net, x: net.a(_halve(x)), a=nn.Linear(6, 3)), vectors()),
        "writes into its images": (head(144, nn.ReLU(inplace=True), nn.Conv2d(2, 4, 3, padding=1)), images()),
        "attention over the batch": (between(lambda h: (h @ h.T).softmax(-1) @ h), vectors()),
        "graph convolution": (
            Net(lambda net, x: net.b(net.g @ net.a(x).relu()), a=nn.Linear(6, 8), b=nn.Linear(8, 3), g=_graph()),
            vectors(),
        ),
        "neighbours in the batch": (between(lambda h: h + 0.5 * h.roll(1, 0)), vectors()),
        "sums over the batch": (between(lambda h: h.cumsum(0) / 4), vectors()),
        "pairs of the batch": (between(lambda h: h + h.reshape(-1, 2, 8).mean(1).repeat_interleave(2, 0)), vectors()),
        "branches on the batch": (between(lambda h: h if h[:, 0].mean() > 0 else -2 * h), vectors()),
        "softmax over the batch": (
            Net(lambda net, x: (net.a(x) * 2).softmax(0) * len(x), a=nn.Linear(6, 3)),
            vectors(),
        ),
        "experts": (Net(_experts, a=nn.Linear(6, 3), b=nn.Linear(6, 3), gate=nn.Linear(6, 1)), vectors()),
        "experts by data": (Net(_experts_by_data, a=nn.Linear(6, 3), b=nn.Linear(6, 3)), vectors()),
        "experts, one of them rare": (Net(_rare_expert, a=nn.Linear(6, 3), b=nn.Linear(6, 3)), _rare()),
        "experts, soft": (
            Net(
                lambda net, x: (net.gate(x).softmax(1)[:, :, None] * torch.stack([net.a(x), net.b(x)], 1)).sum(1),
                a=nn.Linear(6, 3),
                b=nn.Linear(6, 3),
                gate=nn.Linear(6, 2),
            ),
            vectors(),
        ),
        "sorted": (Net(_sorted, a=nn.Linear(6, 8), b=nn.Linear(8, 3)), vectors()),
        "sorted, one layer twice": (Net(_sorted, a=nn.Linear(6, 6), b=None), vectors()),
        "in chunks": (
            Net(lambda net, x: torch.cat([net.a(part) for part in x.split(5)]), a=nn.Linear(6, 3)),
            vectors(),
        ),
        "one by one": (Net(lambda net, x: torch.stack([net.a(row) for row in x]), a=nn.Linear(6, 3)), vectors()),
        "early exit": (Net(_early_exit, a=nn.Linear(6, 8), b=nn.Linear(8, 8), h=nn.Linear(8, 3)), vectors()),
        "keeps a state": (Net(_stateful, a=nn.Linear(6, 3), state=torch.zeros(3)), vectors()),
        "counts calls": (Net(_counting, a=nn.Linear(6, 3), calls=torch.tensor(0)), vectors()),
    }


def _changed(net, x):
    first = net.a(x)
    x.neg_()
    return first + net.a(x).relu()


def _halve(x):
    x.data.mul_(0.5)
    return x


def _graph():
    graph = (torch.rand(EXAMPLES, EXAMPLES) > 0.9).float() + torch.eye(EXAMPLES)
    return graph / graph.sum(1, keepdim=True)


def _experts(net, x):
    out = x.new_zeros(len(x), 3)
    right = net.gate(x)[:, 0] > 0
    out[right], out[~right] = net.a(x[right]), net.b(x[~right])
    return out


def _experts_by_data(net, x):
    right = x[:, :1] > 0
    return torch.where(right, net.a(x), net.b(x.cos()))


def _rare():
    x = vectors()
    x[:, 0] = x[:, 0].abs()
    x[-1, 0] = -1.0
    return x


def _rare_expert(net, x):
    out, rare = net.a(x), x[:, 0] < 0
    if rare.any():
        out = out.index_put((rare.nonzero()[:, 0],), net.b(x[rare]))
    return out


def _sorted(net, x):
    order = x[:, 0].argsort()
    h = net.a(x[order]).tanh()[order.argsort()]
    return net.a(h) if net.b is None else net.b(h)


def _early_exit(net, x):
    h = net.a(x).tanh()
    undecided = h[:, 0] > 0
    if undecided.any():
        h = torch.where(undecided[:, None], net.b(h), h)
    return net.h(h)


def _stateful(net, x):
    net.state = 0.9 * net.state + 0.1 * net.a(x).mean(0)
    return net.a(x) - net.state


def _counting(net, x):
    net.calls += 1
    return net.a(x)
