"""Data cut into blocks."""

import collections

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from wideflat.evaluation.blocks import Blocks, as_tensors


class Squares(Dataset):
    """A map-style data set with augmentation inside."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.tensor([float(i)]) + 0.001 * torch.rand(1), i


def contents(blocks, number=0, order=None):
    return [block.batch for block in blocks.visit(number, order)]


@pytest.mark.parametrize("kind", ["tuple", "dataset", "map", "list", "loader", "dict", "arrays", "list of arrays"])
def test_every_example_once_and_the_same_in_every_pass(kind):
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    data = {
        "tuple": (x, y),
        "dataset": TensorDataset(x, y),
        "map": Squares(),
        "list": [(x[:6], y[:6]), (x[6:], y[6:])],
        "loader": DataLoader(Squares(), batch_size=4, shuffle=True),
        "dict": {"x": x, "y": y},
        "arrays": (x.numpy(), y.numpy()),
        "list of arrays": [(x[:6].numpy(), y[:6].numpy()), (x[6:].numpy(), y[6:].numpy())],
    }[kind]
    blocks = Blocks(data, batch_size=4, seed=3)
    first, second = contents(blocks, 0), contents(blocks, 1)
    pick = (lambda batch: (batch["x"], batch["y"])) if kind == "dict" else (lambda batch: batch)
    assert sorted(torch.cat([pick(batch)[1] for batch in first]).tolist()) == list(range(10))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(pick(a)[0], pick(b)[0]) and torch.equal(pick(a)[1], pick(b)[1])
    assert blocks.fixed and blocks.count == len(first)


def test_augmentation_is_fresh_in_every_pass_and_repeats_with_the_seed():
    data = torch.zeros(8, 2), torch.zeros(8)

    def noise(inputs):
        return inputs + torch.rand(inputs.shape)

    one, two = Blocks(data, 4, seed=1, augment=noise), Blocks(data, 4, seed=1, augment=noise)
    assert torch.equal(contents(one, 0)[1][0], contents(two, 0, [1])[0][0])  # whatever came before
    assert not torch.equal(contents(one, 0)[0][0], contents(one, 1)[0][0])
    assert not one.fixed


def test_a_loader_whose_numbers_change_is_found_out():
    class Fresh:
        def __init__(self):
            self.calls = 0

        def __iter__(self):
            self.calls += 1
            yield torch.full((2, 1), float(self.calls)), torch.zeros(2)

    blocks = Blocks(Fresh(), 1)
    contents(blocks, 0)
    assert blocks.fixed
    contents(blocks, 1)
    assert not blocks.fixed


def test_a_loader_generator_is_put_back():
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    blocks = Blocks(DataLoader(Squares(), batch_size=4, shuffle=True, generator=generator), 1)
    assert torch.equal(contents(blocks, 0)[0][1], contents(blocks, 1)[0][1])
    assert torch.equal(generator.get_state(), state)


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="same length"):
        Blocks((torch.zeros(3), torch.zeros(4)), 2)
    with pytest.raises(TypeError, match="got 3"):
        Blocks(3, 2)
    with pytest.raises(ValueError, match="empty"):
        Blocks([], 2)
    with pytest.raises(ValueError, match="empty"):
        contents(Blocks(iter([]), 2))
    with pytest.raises(ValueError, match="batch_size must be a whole number >= 1, got 0"):
        Blocks((torch.zeros(3), torch.zeros(3)), 0)
    short = Blocks(DataLoader(Squares(), batch_size=5), 1)
    contents(short)
    short._batches = DataLoader(Squares(), batch_size=2)
    with pytest.raises(ValueError, match="2 batches in the first pass and 5 in pass 2"):
        contents(short, 1)


def test_an_iterator_can_be_looked_at_without_losing_its_first_batch():
    blocks = Blocks(iter([torch.zeros(2), torch.ones(3)]), 1)
    assert blocks.one_pass and blocks.first().size == 2
    assert [block.size for block in blocks.visit(0)] == [2, 3]


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_inputs_are_one_data_set_and_not_two_batches(kind):
    x, y = torch.arange(10.0), torch.arange(10)
    batches = contents(Blocks(kind([[x, -x], y]), batch_size=4))
    assert len(batches) == 3 and all(torch.equal(a, -b) for (a, b), _ in batches)
    assert sorted(torch.cat([targets for _, targets in batches]).tolist()) == list(range(10))
    pairs = Blocks([(x, y), (x, y)], batch_size=4)
    assert pairs.count == 2 and not pairs.in_memory


def test_arrays_become_tensors():
    frozen = np.arange(6.0).reshape(2, 3)
    frozen.flags.writeable = False
    for array in (frozen, frozen[:, ::-1], frozen.astype(">f8"), frozen.astype(np.float32), frozen > 2):
        found = as_tensors({"a": array, "b": 3})
        assert found["b"] == 3 and found["a"].tolist() == array.tolist()
    assert type(as_tensors(collections.UserDict(a=frozen))) is dict
    with pytest.raises(TypeError, match="must be numbers, got an array of object"):
        as_tensors(np.array([None]))


class Restless(Squares):
    """Augmentation with random numbers of its own, which nobody can seed."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __getitem__(self, i):
        return torch.tensor([float(i)]) + 0.1 * float(self.generator.random()), i


def test_data_that_change_from_pass_to_pass_are_found_out():
    for data in (Restless(), DataLoader(Restless(), batch_size=4)):
        blocks = Blocks(data, 4)
        contents(blocks, 0)
        assert blocks.fixed
        contents(blocks, 1)
        assert not blocks.fixed


def test_flipped_images_are_other_images():
    images = torch.randn(4, 3, 8, 8)

    class Flipping:
        def __iter__(self):
            self.images = images if not hasattr(self, "images") else images.flip(3)
            yield self.images, torch.zeros(4)

    blocks = Blocks(Flipping(), 4)
    contents(blocks, 0)
    contents(blocks, 1)
    assert not blocks.fixed


def test_the_targets_count_the_examples():
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    for inputs in (torch.randn(5, 2, 4), packed, [torch.randn(5, 2, 4), torch.randn(2, 3)]):
        assert Blocks([(inputs, torch.zeros(2))], 1).first().size == 2


@pytest.mark.parametrize("layout", ["sparse", "nested"])
def test_tensors_that_cannot_be_cut_are_refused(layout):
    x = (
        torch.eye(4).to_sparse()
        if layout == "sparse"
        else torch.nested.as_nested_tensor([torch.ones(2)] * 4, layout=torch.jagged)
    )
    with pytest.raises(TypeError, match="dense tensors"):
        Blocks((x, torch.zeros(4)), 2)
