"""What a measurement does with each block: later blocks are asked what was found out with the first."""

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import local_energy
from wideflat.noise.uses import Unforeseen

SIGMA, BATCHES, SIZE = 0.3, 6, 50
#: Sizes of the batches that networks have seen; not in them, where they would be put back before every evaluation.
SEEN: list[int] = []

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


class Counted(nn.Module):
    """A network that notes how many examples it has seen."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

    def forward(self, input_ids, labels=None):
        SEEN.append(len(input_ids))
        logits = self.head(torch.tanh(self.words(input_ids)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}


def test_what_comes_before_few_evaluations_of_one_batch_is_few_evaluations():
    """The loop evaluates the batch 21 times; all looks at the network together cost less than four batches more."""
    torch.manual_seed(0)
    model, ids = Counted(), torch.randint(7, (16, 6))
    data = [{"input_ids": ids, "labels": ids.flip(1)}]
    SEEN.clear()
    profile = local_energy(model, data, [0.3], metric="loss", max_passes=20, progress=False)
    assert sum(SEEN) < (21 + 4) * 16
    assert profile.baseline == pytest.approx(model(ids, ids.flip(1))["loss"].item())


@pytest.mark.parametrize("sigmas", [[0.3], [0.0, 0.1, 0.3]])
def test_the_path_without_a_check_gives_what_the_checked_one_gives(monkeypatch, sigmas):
    torch.manual_seed(0)
    model, ids = Counted(), torch.randint(7, (16, 6))
    data = [{"input_ids": ids, "labels": ids.flip(1)}]
    weights = [p.clone() for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    found = []
    for few in (32, 0):
        monkeypatch.setattr("wideflat.energy.block_energy.FEW_EVALUATIONS", few)
        found.append(local_energy(model, data, sigmas, metric="loss", max_passes=5, progress=False))
    assert np.array_equal(found[0].mean, found[1].mean) and np.array_equal(found[0].stderr, found[1].stderr)
    assert found[0].conventions == found[1].conventions
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert [p._version for p in model.parameters()] == versions
