"""Data without an end are refused in every door that takes data, those with one are gone through."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import wideflat
from wideflat.checks.streams import MOST_ALIKE, ending, length_of

X, Y = torch.randn(6, 4), torch.arange(6) % 3


class Stream(IterableDataset):
    """The same example for ever."""

    def __iter__(self):
        return itertools.repeat((X[0], Y[0]))


class Long(Dataset):
    """More examples than an order of them can be drawn of."""

    def __len__(self):
        return 10**12

    def __getitem__(self, k):
        return X[0], Y[0]


class Claiming(list):
    """More batches than anybody has."""

    def __len__(self):
        return 10**15


def pairs():
    while True:  # a new tuple of the same tensors each time
        yield X, Y


class Pairs:
    """Batches for ever, as often as it is asked for."""

    def __iter__(self):
        return pairs()


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def coupling():
    return wideflat.ReplicaCoupling(wideflat.Replicas(lambda: nn.Linear(2, 1), num_replicas=2))


QUIET = {"progress": False}
DOORS = {
    "refresh_batch_norm": lambda data: wideflat.refresh_batch_norm(network(), data),
    "local_energy": lambda data: wideflat.local_energy(network(), data, [0.1], **QUIET),
    "worst_case": lambda data: wideflat.worst_case(network(), data, [0.1], **QUIET),
    "curvature": lambda data: wideflat.curvature(network(), data, top=1, probes=1, **QUIET),
    "spectrum": lambda data: wideflat.spectrum(network(), data, probes=1, steps=2, **QUIET),
    "layer_profiles": lambda data: wideflat.layer_profiles(network(), data, [0.1], max_passes=1, **QUIET),
    "shift_profile": lambda data: wideflat.shift_profile(network(), data, quantize=[4], **QUIET),
    "slices": lambda data: wideflat.slices(network(), data, positions=[0.0, 0.1], dimensions=1, **QUIET),
    "free_entropy": lambda data: wideflat.free_entropy(network(), data, [0.1], quick=True, **QUIET),
    "llc": lambda data: wideflat.llc(network(), data, quick=True, **QUIET),
    "LocalEnergyTrace": lambda data: wideflat.energy.LocalEnergyTrace(data, [0.1], **QUIET)(network(), 0),
    "from_datasets": lambda data: wideflat.data.from_datasets(data, data),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("data", [pairs, Pairs, Long], ids=["generator", "iterable", "length 10^12"])
def test_data_without_an_end_are_refused(door, data):
    with pytest.raises((TypeError, ValueError), match=r"no end|at most|must be|only once") as caught:
        DOORS[door](data())
    assert "wideflat" in str(caught.traceback[-1].path)


@pytest.mark.parametrize("make", [itertools.count, pairs, lambda: itertools.repeat(nn.Parameter(torch.ones(2)))])
def test_lists_of_parameters_and_numbers_without_an_end_are_refused(make):
    for door in (
        lambda values: wideflat.SAM([nn.Parameter(torch.ones(2))], lr=0.1).add_param_group({"params": values}),
        lambda values: wideflat.EntropySGD([nn.Parameter(torch.ones(2))]).add_param_group({"params": values}),
        lambda values: coupling().initial_gamma(values),
        lambda values: wideflat.layer_profiles(network(), (X, Y), [0.1], layers=values, **QUIET),
        lambda values: wideflat.local_energy(network(), (X, Y), values, **QUIET),
    ):
        with pytest.raises((TypeError, ValueError)):
            door(make())


def test_what_changes_is_not_taken_for_the_same():
    """A loader may write into one buffer again and again."""
    tensor, array = torch.zeros(3), np.zeros(3)

    def written(buffer, times):
        for _ in range(times):
            buffer += 1
            yield buffer, 0

    times = 3 * MOST_ALIKE
    for buffer in (tensor, array):
        assert sum(1 for _ in ending("data", written(buffer, times))) == times
    with pytest.raises(ValueError, match="the same tuple 1000 times"):
        list(ending("data", itertools.repeat((tensor, 0))))


def test_a_length_is_believed():
    assert sum(1 for _ in ending("data", [X] * 5000)) == 5000
    assert sum(1 for _ in ending("data", range(300), most=10)) == 300
    with pytest.raises(ValueError, match="gave 10 entries and more"):
        list(ending("data", iter(range(300)), most=10))
    with pytest.raises(ValueError, match="at most 1000000000 entries"):
        list(ending("data", Claiming([X])))
    assert length_of("data", DataLoader(Stream())) is None


def test_what_is_asked_for_is_taken_from_what_has_no_end():
    """A number of batches, and the examples of a card, are all that is taken."""
    batches = ((X + k, Y) for k in itertools.count())
    wideflat.refresh_batch_norm(network(), batches, num_batches=3)
    assert torch.equal(next(batches)[0], X + 3)


def test_an_iterable_that_fails_says_so():
    class Failing:
        def __iter__(self):
            raise RuntimeError("no network")

    with pytest.raises(TypeError, match=r"loader cannot be gone through, got a Failing: no network"):
        wideflat.refresh_batch_norm(network(), Failing())
