"""Weights that a network does not know as its parameters."""

import pytest
import torch
from torch import nn

from wideflat import curvature, local_energy
from wideflat.evaluation.registered import hidden_weights


class Hiding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = [self.first]  # known already
        self.layers = {"head": nn.Linear(4, 3, bias=False)}
        self.scale = [nn.Parameter(torch.ones(3))]

    def forward(self, x):
        return self.layers["head"](self.first(x).tanh()) * self.scale[0]


def test_they_are_named():
    assert hidden_weights(Hiding()) == ["layers['head'].weight", "scale[0]"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # deprecated, and in use
def test_quantised_layers_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3)))
    model = torch.ao.quantization.quantize_dynamic(model, {"1"}, dtype=torch.qint8)
    assert hidden_weights(model) == ["1.0 (Linear, quantised)"]


@pytest.mark.parametrize("measure", [local_energy, curvature])
def test_every_measure_says_that_they_stay(measure):
    more = ([0.1],) if measure is local_energy else ()
    data = torch.randn(16, 4), torch.randint(3, (16,))
    with pytest.warns(UserWarning, match=r"not among its parameters \(layers\['head'\].weight, scale\[0\]\)"):
        measure(Hiding(), data, *more, progress=False)


@pytest.mark.parametrize("layer", [nn.LazyLinear(3), nn.Linear(4, 3, device="meta")])
def test_parameters_without_values_are_refused(layer):
    with pytest.raises(ValueError, match="has no values"):
        local_energy(nn.Sequential(layer), (torch.randn(8, 4), torch.zeros(8).long()), [0.1], progress=False)
