"""Each measure is of the network, the parameters and the examples that were asked for."""

import torch
from torch import nn

from wideflat import card
from wideflat.cards import measures, measuring


def test_a_network_without_gradient_has_the_part_of_a_card_that_needs_none():
    class Signs(nn.Linear):
        def forward(self, x):
            return torch.sign(super().forward(x)).detach()

    torch.manual_seed(0)
    x = torch.randn(40, 3)
    found = card(Signs(3, 2), (x, (x[:, 0] > 0).long()), quick=True, examples=8, progress=False)
    assert {"at_w", "relative", "filter", "layers", "shift", "slice"} <= set(found.measured)
    assert {"worst", "spectrum", "entropy"} <= set(found.refused) and "gradient" in found.refused["spectrum"]


def test_chosen_parameters_are_those_of_every_measure(subject, monkeypatch):
    chosen = tuple(measure for measure in measures.MEASURES if measure.name in ("layers", "shift"))
    monkeypatch.setattr(measuring, "MEASURES", chosen)
    found = card(*subject, quick=True, examples=8, parameters="2[.].*", progress=False)
    assert list(found["layers"]) == ["2"]
    assert found["shift"]["quantize"].conventions["perturbed"] == found["shift"]["prune"].conventions["perturbed"] == 15
    assert found["shift"]["prune"].conventions["parameters"] == "function weights that are 2[.].*"
