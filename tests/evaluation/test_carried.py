"""What a network carries from call to call is noted and put back, so that a measurement is of its weights alone."""

import random
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wideflat import local_energy
from wideflat.evaluation.carried import Carried


class Cache:
    """An object of somebody's own."""

    def __init__(self):
        self.entries, self.hits = {}, 0


def holding():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("buffer", torch.zeros(2))
    model[0].number, model[0].nan, model[0].words = 0, float("nan"), "a"
    model.list, model.tuple, model.set = [1, [2]], (torch.ones(2), [3]), {1}
    model.dict, model.queue, model.cache = OrderedDict(a=torch.zeros(2)), deque([1], maxlen=2), Cache()
    model.generator, model.python, model.numpy = torch.Generator(), random.Random(0), np.random.default_rng(0)
    return model


CHANGES = {
    "0.number": lambda model: setattr(model[0], "number", 1),
    "0.words": lambda model: setattr(model[0], "words", "b"),
    "new": lambda model: setattr(model, "new", 1),
    "0.new": lambda model: setattr(model[0], "new", torch.ones(1)),
    "list": lambda model: model.list[1].append(3),
    "tuple": lambda model: model.tuple[0].add_(1),
    "set": lambda model: model.set.add(2),
    "dict": lambda model: model.dict.update(b=1),
    "queue": lambda model: model.queue.append(2),
    "cache": lambda model: model.cache.entries.update(a=1),
    "buffer": lambda model: setattr(model, "buffer", torch.ones(2)),
}


@pytest.mark.parametrize("place", CHANGES)
def test_a_change_is_seen_and_put_back(place):
    model = holding()
    carried = Carried(model)
    assert carried.changed() == []
    CHANGES[place](model)
    assert carried.changed() == [place]
    carried.restore([place])
    assert carried.changed() == []
    assert not hasattr(model, "new") and model.list == [1, [2]] and model.cache.entries == {}
    assert torch.equal(model.tuple[0], torch.ones(2)) and torch.equal(model.buffer, torch.zeros(2))


def test_numbers_written_behind_the_back_are_put_back():
    model = holding()
    carried = Carried(model)
    model.buffer.data.add_(1)
    model.dict["a"].data.add_(1)
    assert carried.changed() == ["buffer", "dict"]
    with carried.afterwards():
        pass
    assert not model.buffer.any() and not model.dict["a"].any()


@pytest.mark.parametrize("name", ["generator", "python", "numpy"])
def test_generators_that_were_drawn_from_are_found(name):
    model = holding()
    carried = Carried(model)
    assert carried.drawn() == []
    if name == "generator":
        torch.rand(1, generator=model.generator)
    else:
        getattr(model, name).random()
    assert carried.drawn() == [name]


def test_nothing_is_put_back_where_parameters_were_replaced():
    model = holding()
    carried = Carried(model)
    model[0].weight, model[0].number = nn.Parameter(torch.ones(2, 2)), 1
    assert not carried.whole
    carried.restore()
    assert model[0].number == 1


class Plain(nn.Module):
    """A network, and below what somebody makes of it."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.a, self.h = nn.Linear(6, 8), nn.Linear(8, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g) / 2)
        self.calls = 0

    def hidden(self, x):
        return F.linear(x, self.a.weight).tanh()

    def forward(self, x):
        return self.h(self.hidden(x))


class EveryTenth(Plain):
    def forward(self, x):
        self.calls += 1
        return self.h(self.hidden(x)) if self.calls % 10 else 0 * self.h(self.hidden(x))


class Refreshed(Plain):
    def hidden(self, x):
        if self.calls % 3 == 0:
            self.kept = self.a.weight.detach().clone()
        self.calls += 1
        return F.linear(x, self.kept).tanh()


class ByValues(Plain):
    def hidden(self, x):
        if not hasattr(self, "known"):
            self.known = {}
        key = x.numpy().tobytes()
        if key not in self.known:
            self.known[key] = super().hidden(x)
        return self.known[key]


class ByMemory(Plain):
    def hidden(self, x):
        if getattr(self, "key", None) != (x.data_ptr(), len(x)):
            self.key, self.kept = (x.data_ptr(), len(x)), super().hidden(x)
        return self.kept


@pytest.mark.parametrize("noise", ["batch", "pass"])
@pytest.mark.parametrize("kind", [EveryTenth, Refreshed, ByValues, ByMemory])
def test_what_is_measured_is_the_network_as_it_was_given(kind, noise):
    g = torch.Generator().manual_seed(0)
    data = torch.randn(40, 6, generator=g), torch.randn(40, 3, generator=g)
    options = {"metric": lambda y, t: (y - t).square().mean(1), "noise": noise, "max_passes": 4, "progress": False}
    options["batch_size"] = 16
    model = kind().eval()
    before = dict(vars(model))
    found, expected = (
        local_energy(model, data, [0.1, 0.4], **options),
        local_energy(Plain(), data, [0.1, 0.4], **options),
    )
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-4)
    assert any("from call to call" in note for note in found.conventions["notes"])
    assert vars(model) == before
