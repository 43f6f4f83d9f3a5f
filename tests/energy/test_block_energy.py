"""What a measurement does with each block: later blocks are asked what was found out with the first."""

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import local_energy
from wideflat.noise.uses import Unforeseen

SIGMA, BATCHES, SIZE = 0.3, 6, 50

#: Sizes of the batches that were seen: what a network holds itself is put back before every call.
SEEN = []


class LateMixing(nn.Module):
    """Subtracts the mean of its batch, but not in batches with a large first input: here, in all but the first."""

    def __init__(self, mixes=True):
        super().__init__()
        self.own, self.common, self.mixes = nn.Linear(10, 3), nn.Linear(10, 3), mixes

    def forward(self, x):
        SEEN.append(len(x))
        h = 0.1 * self.own(x) + 2 * self.common(torch.ones_like(x))
        return h - h.mean(0) if self.mixes and not bool((x[:, 0] > 2).any()) else h


def distance(outputs, targets):
    return (outputs - targets).square().sum(1)


def case(mixes=True):
    torch.manual_seed(0)
    model = LateMixing(mixes).eval()
    inputs = torch.randn(BATCHES * SIZE, 10)
    inputs[:, 0] = torch.linspace(3, -3, len(inputs))
    with torch.no_grad():
        return model, [(x, model(x) + 0.2) for x in inputs.split(SIZE)]


def by_loop(model, data, draws=300):
    """Eq. 4 with one z for all examples: the mean and its standard error."""
    generator, weights = torch.Generator().manual_seed(1), [p.detach().clone() for p in model.parameters()]
    energy = lambda: float(torch.cat([distance(model(x), y) for x, y in data]).mean())  # noqa: E731
    with torch.no_grad():
        before, found = energy(), []
        for _ in range(draws):
            for p, w in zip(model.parameters(), weights, strict=True):
                p.copy_(w + SIGMA * w * torch.randn(w.shape, generator=generator))
            found.append(energy() - before)
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)
    return np.mean(found), np.std(found) / draws**0.5


def measure(model, data, **options):
    return local_energy(model, data, [SIGMA], metric=distance, progress=False, **options)


def test_examples_that_influence_each_other_in_later_batches_only_are_measured_with_care():
    model, data = case()
    mean, stderr = by_loop(model, data)
    profile = measure(model, data, max_passes=40)
    assert abs(profile.mean[0] - mean) < 4 * np.hypot(stderr, profile.stderr[0])
    assert "measured again with care: the examples of a batch influence each other" in str(profile.conventions)


def test_noise_of_each_example_that_was_asked_for_is_refused_then():
    model, data = case()
    with pytest.raises(Unforeseen, match="influence each other, which those of the first batch did not"):
        measure(model, data, noise="example")


def test_blocks_are_tried_ever_more_seldom_and_once():
    model, data = case(mixes=False)
    SEEN.clear()
    profile = measure(model, data, noise="example", max_passes=3)
    alone = [size for size in SEEN if size <= 3]
    SEEN.clear()
    measure(model, data[:1], noise="example", max_passes=3)
    assert len(alone) - sum(size <= 3 for size in SEEN) == 3  # of blocks 1, 2 and 4
    assert profile.conventions["noise"] == "example"
