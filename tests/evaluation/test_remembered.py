"""Loaders that are read once for several measurements."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from wideflat import layer_profiles, local_energy
from wideflat.evaluation.evaluation import Evaluation
from wideflat.evaluation.remembered import remembered


class Loader:
    """Counts how often it is read."""

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.batches = [(torch.randn(8, 3, generator=g), torch.randint(2, (8,), generator=g)) for _ in range(6)]
        self.readings = 0

    def __iter__(self):
        self.readings += 1
        yield from self.batches


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def test_layers_read_a_loader_once_and_are_what_they_are_alone():
    model, loader = network(), Loader()
    found = layer_profiles(model, loader, [0.2], progress=False)
    assert loader.readings == 1
    alone = local_energy(model, loader.batches, [0.2], parameters="2[.].*", progress=False)
    assert found["2"].mean == alone.mean and found["2"].stderr == alone.stderr


def test_a_loader_that_shuffles_is_remembered_in_the_order_of_a_measurement():
    model = network()
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    before = torch.get_rng_state()
    kept = remembered(loader, Evaluation(model, "loss", "eval", None))
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(torch.cat([b[0] for b in kept])[:, 0].tolist()) == sorted(x[:, 0].tolist())
    again = remembered(loader, Evaluation(model, "loss", "eval", None))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(kept, again, strict=True))


def test_what_stays_as_it_is():
    evaluation, loader = Evaluation(network(), "loss", "eval", None), Loader()
    assert remembered(loader, evaluation, room=10) is loader
    for data in ((torch.zeros(2, 3), torch.zeros(2)), loader.batches, TensorDataset(torch.zeros(2, 3))):
        assert remembered(data, evaluation) is data
    once = iter(loader.batches)
    assert remembered(once, evaluation) is once
