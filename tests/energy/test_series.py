"""Profiles layer by layer and along a training."""

import pytest
import torch
from torch import nn

from wideflat import layer_profiles
from wideflat.energy import LocalEnergyTrace


def normalised():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    x = torch.randn(64, 6)
    return model, (x, model(x).argmax(1))


def test_layer_profiles():
    model, data = normalised()
    profiles = layer_profiles(model, data, [0.5], progress=False)
    assert list(profiles) == ["0", "1", "3"]
    assert [profile.conventions["perturbed"] for profile in profiles.values()] == [112, 32, 51]
    with pytest.raises(ValueError, match="no layer 'head'"):
        layer_profiles(model, data, [0.5], layers=["head"])


def test_a_layer_whose_parameters_are_all_tied_has_no_profile_of_its_own():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    data = torch.randn(16, 4), torch.randint(4, (16,))
    assert list(layer_profiles(model, data, [0.2], progress=False)) == ["0"]


def test_a_trace_keeps_writes_and_reads_profiles(tmp_path):
    model, data = normalised()
    trace = LocalEnergyTrace(data, [0.2], every=5, path=tmp_path / "trace.json", progress=False)
    for epoch in range(11):
        trace(model, epoch)
        model[0].weight.data.add_(0.01)
    assert sorted(trace.profiles) == [0, 5, 10]
    read = LocalEnergyTrace.load(tmp_path / "trace.json")
    assert read[5].mean == pytest.approx(trace.profiles[5].mean)
    assert len(trace.plot().containers) == 3
    with pytest.raises(ValueError, match="every must be >= 1"):
        LocalEnergyTrace(data, [0.2], every=0)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match="not a whole trace"):
        LocalEnergyTrace.load(tmp_path / "broken.json")
