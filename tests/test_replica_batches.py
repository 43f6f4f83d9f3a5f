"""Mini-batches for replicas: orders of their own, resumable anywhere."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from wideflat.replica_batches import ReplicaBatches


def stream(**settings):
    loader = DataLoader(torch.arange(10).tolist(), batch_size=3, **settings)
    return ReplicaBatches(loader, 2, seed=5)


def taken(batches, epochs):
    return [[part.tolist() for part in one] for _ in range(epochs) for one in batches]


def test_each_replica_goes_through_all_data_in_an_order_of_its_own_every_epoch():
    batches = stream()
    orders = set()
    for _ in range(3):
        epoch = taken(batches, 1)
        assert len(epoch) == len(batches) == 4
        for replica in range(2):
            order = [number for one in epoch for number in one[replica]]
            assert sorted(order) == list(range(10))
            orders.add(tuple(order))
    assert len(orders) == 6
    assert batches.epoch == 3


def test_the_loader_says_how_batches_are_made():
    batches = stream(drop_last=True, collate_fn=lambda numbers: sum(numbers))
    assert len(batches) == 3 == len(list(batches))
    assert all(isinstance(total, int) for one in batches for total in one)


@pytest.mark.parametrize("stop", range(1, 9))
def test_it_is_resumed_anywhere(stop):
    whole, first, again = stream(), stream(), stream()
    expected = taken(whole, 2)
    seen, saved = [], None
    for _ in range(2):
        for one in first:
            seen.append(one)
            if len(seen) == stop:
                saved = first.state_dict()
                break
        if saved:
            break
    again.load_state_dict(saved)
    rest = [[part.tolist() for part in one] for one in again]
    while len(rest) < 8 - stop:
        rest += [[part.tolist() for part in one] for one in again]
    assert rest[: 8 - stop] == expected[stop:]


def test_what_cannot_be_shuffled_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(TypeError, match="make a loader for each replica"):
        ReplicaBatches(DataLoader(Stream(), batch_size=2), 2)
    with pytest.raises(TypeError, match="DataLoader, got list"):
        ReplicaBatches([1, 2], 2)
    with pytest.raises(ValueError, match="for 3 replicas, these for 2"):
        stream().load_state_dict({"epoch": 0, "position": 0, "seed": 0, "num_replicas": 3})
