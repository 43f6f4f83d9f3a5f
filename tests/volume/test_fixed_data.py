"""The data of an energy: all of it once, the same subset for all, and refused where two readings differ."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from wideflat.volume.fixed_data import FixedData

X, Y = torch.arange(40.0).view(10, 4), torch.arange(10)


def rows(data):
    """All examples, sorted by the first number."""
    x = torch.cat([block.batch[0] for block in data.blocks])
    return x[x[:, 0].argsort()]


class Turned(Dataset):
    """Other images at every reading, as of random augmentation."""

    def __len__(self):
        return len(X)

    def __getitem__(self, k):
        return X[k] + torch.rand(4), Y[k]


def test_every_example_is_in_one_block():
    data = FixedData((X, Y), batch_size=4)
    assert [block.size for block in data.blocks] == [4, 3, 3] and data.examples == 10
    assert torch.equal(rows(data), X)


def test_the_digest_is_of_the_examples_and_not_of_their_order():
    digest = FixedData((X, Y)).digest
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    same = [(X[order], Y[order]), TensorDataset(X, Y), DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True)]
    assert {FixedData(data, batch_size=7).digest for data in same} == {digest}
    one = X.clone()
    one[3] = one[3].flip(0)  # an image that is turned has the same sum
    assert FixedData((one, Y)).digest != digest
    assert FixedData((X, Y.flip(0))).digest != digest  # the same images with other labels


def test_a_subset_is_the_same_for_all_and_of_each_form_of_the_data():
    first = FixedData((X, Y), subset=4)
    assert first.examples == 4 and len(rows(first).unique(dim=0)) == 4
    assert all((row == X).all(1).any() for row in rows(first))
    for data in ((X, Y), TensorDataset(X, Y)):
        assert torch.equal(rows(FixedData(data, batch_size=3, subset=4)), rows(first))
    assert FixedData((X, Y), subset=10).digest == FixedData((X, Y)).digest
    assert len({FixedData((X, Y), subset=4, subset_seed=seed).digest for seed in range(4)}) > 1


def test_every_example_is_as_likely_in_a_subset():
    counts = torch.zeros(10)
    for seed in range(400):
        counts[rows(FixedData((X, Y), subset=3, subset_seed=seed))[:, 0].long() // 4] += 1
    assert (counts - 120).abs().max() < 4.5 * (400 * 0.3 * 0.7) ** 0.5


def test_data_that_change_are_refused_and_one_reading_of_them_is_not():
    with pytest.raises(ValueError, match="not the same in another reading"):
        FixedData(Turned())
    short = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, drop_last=True)
    with pytest.raises(ValueError, match="drops the last batch"):
        FixedData(short)
    assert FixedData(list(short)).examples == 8


@pytest.mark.parametrize(
    ("data", "subset", "words"),
    [
        ((X, Y), 11, "between 1 and the 10 examples there are, got 11"),
        ((X, Y), 0, "subset"),
        ((X, Y[:9]), 3, "must have the same length"),
        ([(X, Y)], 3, "subset needs tensors in memory or a data set, got list"),
    ],
)
def test_a_subset_that_is_none(data, subset, words):
    with pytest.raises(ValueError, match=words):
        FixedData(data, subset=subset)
