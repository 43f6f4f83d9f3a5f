"""Networks inside of something else."""

import warnings

import torch
from torch import nn
from torch.nn import functional as F

from zoo.networks import Net, head, images, mlp, seen, vectors


class Typed(nn.Module):
    """A network that TorchScript can compile."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def _bypassed():
    """A closure that a copy of the network does not follow: its convolution stays that of the original."""
    conv, norm = nn.Conv2d(2, 4, 3), seen(nn.BatchNorm2d(4), torch.randn(9, 4, 4, 4))
    side = nn.Conv2d(2, 4, 3, bias=False)
    return Net(
        lambda net, x: net.h((net.norm(net.conv(x)) + F.conv2d(x, side.weight.data)).flatten(1)),
        conv=conv,
        norm=norm,
        side=side,
        h=nn.Linear(64, 3),
    )


def _hooked():
    model = mlp(nn.Tanh())
    model[0].register_forward_hook(lambda module, inputs, output: output + module.weight.sum(1))
    return model


def wrapped():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and in use
        scripted = torch.jit.script(Typed())
        traced = torch.jit.trace(Typed().eval(), vectors())
        part = Typed()
        half_scripted = Net(
            lambda net, x: net.s(x) + net.b(net.a(x)), s=torch.jit.script(part), a=nn.Linear(6, 8), b=part.b
        )
    return {
        "compiled": (torch.compile(mlp(nn.Tanh()), backend="eager"), vectors()),
        "compiled convolution": (torch.compile(head(64, nn.Conv2d(2, 4, 3), nn.ReLU()), backend="eager"), images()),
        "scripted": (scripted, vectors()),
        "traced": (traced, vectors()),
        "scripted in part": (half_scripted, vectors()),
        "data parallel": (nn.DataParallel(mlp(nn.Tanh())), vectors()),
        "checkpointed": (
            Net(
                lambda net, x: net.b(torch.utils.checkpoint.checkpoint(net.a, x, use_reentrant=False)),
                a=nn.Linear(6, 8),
                b=nn.Linear(8, 3),
            ),
            vectors(),
        ),
        "hooked": (_hooked(), vectors()),
        "bypassed": (_bypassed(), images()),
    }
