"""A small network with its data, and its card, measured once."""

import pytest
import torch
from torch import nn

from wideflat import card


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def examples(model, count=64):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return x, model(x).argmax(1).detach()


@pytest.fixture(scope="session")
def subject():
    model = network()
    return model, examples(model)


@pytest.fixture(scope="session")
def measured(subject):
    return card(*subject, title="net <1>", quick=True, examples=16, progress=False)
