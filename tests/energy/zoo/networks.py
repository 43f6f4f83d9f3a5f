"""What the networks of the zoo are made of, and their inputs."""

import torch
from torch import nn

EXAMPLES = 32


class Net(nn.Module):
    """A network from a function of itself and its input; parts are modules, parameters or (plain tensors) buffers."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


def vectors(features=6):
    return torch.randn(EXAMPLES, features)


def series(length=5, channels=4):
    return torch.randn(EXAMPLES, length, channels)


def images(channels=2, size=6):
    return torch.randn(EXAMPLES, channels, size, size)


def tokens(length=4):
    return torch.randint(7, (EXAMPLES, length))


def mlp(*middle, features=6):
    return nn.Sequential(nn.Linear(features, 8), *middle, nn.Linear(8, 3))


def head(features, *front):
    return nn.Sequential(*front, nn.Flatten(), nn.Linear(features, 3))


def between(function):
    """A function of the hidden units between two linear layers."""
    return Net(lambda net, x: net.b(function(torch.tanh(net.a(x)))), a=nn.Linear(6, 8), b=nn.Linear(8, 3))


def seen(norm, x):
    """A network with running statistics of ``x``."""
    norm.train()(x)
    return norm.eval()
