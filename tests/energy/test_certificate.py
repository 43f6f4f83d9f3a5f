"""What noise certifies about changes of the weights."""

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import LocalEnergy, local_energy, shift_profile
from wideflat.energy.certificate import certified_accuracy


def half_space():
    """One example, one output w x: under absolute noise right with the probability Phi(w x / (sigma |x|))."""
    model = nn.Linear(3, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0, 2.0, -1.0]]))
    x = torch.tensor([[2.0, 1.0, 2.0]])
    return model, x


def accuracy(weight, x, sigma):
    return float(torch.special.ndtr((weight @ x.T / (sigma * x.norm())).double()))


def test_it_is_tight_for_a_half_space():
    """The change against x is the worst there is, and its accuracy is what is certified."""
    model, x = half_space()
    weight, sigma = model.weight.detach(), 0.5
    for length in (0.0, 0.1, 0.7, 3.0):
        worst = accuracy(weight - length * x / x.norm(), x, sigma)
        assert certified_accuracy(accuracy(weight, x, sigma), length, sigma) == pytest.approx(worst, abs=1e-7)


def test_no_change_of_a_network_does_worse():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(50, 4)
    data = x, model(x).argmax(1)
    options = {"scale": "absolute", "max_passes": 200, "progress": False}
    before = local_energy(model, data, [0.1, 0.3], **options)
    for seed in range(3):
        torch.manual_seed(seed + 1)
        other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        with torch.no_grad():
            total = 0.0
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                q.copy_(p + 0.05 * torch.randn_like(p))
                total += float((q - p).square().sum())
        after = local_energy(other, data, [0.1, 0.3], **options)
        assert (before.certified(total**0.5) <= 1 - after.energy + 3 * after.stderr).all()


def test_the_limit_holds_as_often_as_it_says():
    model, x = half_space()
    data = x.expand(64, 3), torch.ones(64)
    exact = certified_accuracy(accuracy(model.weight.detach(), x, 0.8), 0.4, 0.8)
    found = [
        local_energy(model, data, [0.8], scale="absolute", noise="example", max_passes=8, seed=s, progress=False)
        for s in range(100)
    ]
    below = sum(profile.certified(0.4, confidence=0.9)[0] <= exact for profile in found)
    assert 82 <= below <= 98


def test_limits_and_refusals():
    profile = LocalEnergy([0.0, 0.5], [0.0, 0.1], [0.0, 0.0], baseline=0.1)
    assert profile.certified(0.0) == pytest.approx([0.9, 0.8])
    assert profile.certified(np.inf).tolist() == [0.0, 0.0] and profile.certified(0.1)[0] == 0
    assert np.all(np.diff([profile.certified(length)[1] for length in (0.0, 0.1, 0.2, 5.0)]) < 0)
    assert certified_accuracy(1.0, 1.0, 0.1) == 1.0 and certified_accuracy(-0.2, 1.0, 0.1) == 0.0
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="shift, a length, must be a finite number >= 0"):
            profile.certified(wrong)
    with pytest.raises(ValueError, match="confidence"):
        profile.certified(0.1, confidence=0.3)
    with pytest.raises(ValueError, match='metric="error"'):
        LocalEnergy([0.5], [0.1], [0.0], 0.1, conventions={"metric": "loss"}).certified(0.1)
    with pytest.raises(ValueError, match="only Gaussian noise"):
        LocalEnergy([0.5], [0.1], [0.0], 0.1, conventions={"measure": "worst case (relative)"}).certified(0.1)


def test_a_measured_shift_has_one_row_a_position():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(50, 4)
    data = x, model(x).argmax(1)
    noise = local_energy(model, data, [0.1, 0.3], scale="layer", progress=False)
    bits = shift_profile(model, data, quantize=[8, 6], scale="layer", noise=False, progress=False)
    found = noise.certified(bits)
    assert found.shape == (2, 2) and (found[0] > 0).all()
    assert found[1].tolist() == noise.certified(float(bits.scaled_lengths[1])).tolist()
    with pytest.raises(ValueError, match="scale is 'relative' for the shift and 'layer' for the noise"):
        noise.certified(shift_profile(model, data, quantize=[8], noise=False, progress=False))
    part = local_energy(model, data, [0.1], scale="layer", parameters="0[.].*", progress=False)
    with pytest.raises(ValueError, match="of what the noise does not move"):
        part.certified(bits)
