"""Networks of every kind: each kind of noise gives what a loop written from Eq. 4 alone gives, or refuses."""

import math

import numpy as np
import pytest
import torch
from zoo import NAMES, REFUSED, zoo

from wideflat import local_energy

SIGMAS = [0.1, 0.4]
PASSES = {"auto": 12, "batch": 12, "example": 12, "pass": 72}


def deviation(outputs, targets):
    """One bounded, smooth number an example: any noise that is too large, too small or in the wrong place shows."""
    d = (outputs - targets).square().reshape(len(outputs), -1).mean(1)
    return d / (1 + d)


def naive(model, x, targets, repetitions=128):
    """Eq. 4 as it stands: draw z, perturb the weights, evaluate all examples, restore; mean and standard error."""
    generator = torch.Generator().manual_seed(1)
    found = []
    with torch.no_grad():
        for _ in range(repetitions):
            before = deviation(model(x.clone()), targets).mean()
            saved = [(p, p.data, p.clone()) for p in model.parameters()]
            z = [torch.randn(p.shape, generator=generator).to(p) for p, _, _ in saved]
            row = []
            for sigma in SIGMAS:
                for (p, data, w), noise in zip(saved, z, strict=True):
                    p.data = data
                    p.copy_(w + sigma * noise * w)  # not data: its version tells networks that keep something of it
                row.append(float(deviation(model(x.clone()), targets).mean() - before))
            for p, data, w in saved:
                p.data = data
                p.copy_(w)
            found.append(row)
    table = np.array(found)
    return table.mean(0), table.std(0, ddof=1) / math.sqrt(repetitions)


# What torch itself says of networks that are differentiated forwards, and of LSTMs with projections.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:LSTM with projections.*:UserWarning")
@pytest.mark.parametrize(("kind", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_network_is_measured_rightly_or_refused(kind, name):
    model, x = zoo(kind)[name]
    with torch.no_grad():
        targets = model(x.clone()).detach().clone()
    inputs = x.clone()
    expected = None
    for noise, passes in PASSES.items():
        if name in REFUSED and noise != "example":  # all examples are one block
            passes = PASSES["pass"]
        options = {"noise": noise, "metric": deviation, "max_passes": passes, "progress": False}
        if noise in REFUSED.get(name, ()):
            with pytest.raises((ValueError, RuntimeError), match=r"noise|memory|expanded|call|complex|generator"):
                local_energy(model, (x, targets), SIGMAS, **options)
            continue
        before = {key: value.clone() for key, value in model.state_dict().items()}
        profile = local_energy(model, (x, targets), SIGMAS, **options)
        assert torch.equal(x, inputs)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        if expected is None:
            expected = naive(model, x, targets)
        error = np.hypot(profile.stderr, expected[1])
        assert (np.abs(profile.mean - expected[0]) < 4 * error).all(), (noise, str(profile), expected)
        assert error[1] < 0.25 * expected[0][1], (noise, error, expected)


def test_the_zoo_is_large():
    assert len(NAMES) >= 60
    assert set(REFUSED) <= {name for _, name in NAMES}
