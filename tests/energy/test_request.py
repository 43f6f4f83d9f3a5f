"""What is asked for, and how it will be measured."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from wideflat import local_energy
from wideflat.energy.request import TOGETHER


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.a(x)
        return self.b(torch.tanh(h - h.mean(0)))


def data(n=40):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 5, generator=g), torch.randint(3, (n,), generator=g)


def measure(model, batches, **options):
    return local_energy(model, batches, [0.3], progress=False, **options)


def test_examples_that_influence_each_other_share_their_noise_and_are_evaluated_together():
    profile = measure(Mixing(), data())
    assert profile.conventions["noise"] == "batch" and profile.conventions["batch_size"] == 40
    assert profile.passes[0] == 64 and profile.degrees_of_freedom[0] > 30
    assert any("influence each other" in note for note in profile.conventions["notes"]) and "influence" in str(profile)
    assert measure(Mixing(), data(), batch_size=10).conventions["batch_size"] == 10
    assert measure(Mixing(), data(3 * TOGETHER), max_passes=2).conventions["block_size"] <= TOGETHER
    with pytest.raises(ValueError, match=r'depends on the others of its batch: use noise="batch"'):
        measure(Mixing(), data(), noise="example")


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(8, affine=False, track_running_stats=False), nn.BatchNorm1d(8, track_running_stats=False)]
)
def test_batch_norm_without_running_statistics_mixes_examples(layer):
    model = nn.Sequential(nn.Linear(5, 8), layer, nn.Linear(8, 3))
    assert measure(model, data()).conventions["noise"] == "batch"
    with pytest.raises(ValueError, match="depends on the others"):
        measure(model, data(), noise="example")


def test_a_first_batch_of_one_example_does_not_decide():
    """(length, batch, features) with a first batch of one example of length one: its axes look alike."""

    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 3)

        def forward(self, x):
            return (
                self.a(x.transpose(0, 1).squeeze()).reshape(-1, *x.shape[:1], 3).mean(0)
                if len(x) > 1
                else self.a(x[:, 0])
            )

    g = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(n, t, 5, generator=g), torch.randint(3, (n,), generator=g)) for n, t in ((1, 1), (6, 4), (6, 4))
    ]
    assert measure(TimeFirst(), batches).conventions["noise"] == "batch"
    with pytest.raises(ValueError, match="does not show whether"):
        measure(TimeFirst(), batches, noise="example")
    x, y = data()
    mlp = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    assert measure(mlp, (x, y), batch_size=1).conventions["noise"] == "example"  # looked at in a larger batch


def test_all_data_in_one_batch_has_an_error_bar_with_degrees_of_freedom():
    x, y = data()
    profile = measure(
        nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 3), nn.Flatten(), nn.Linear(9, 3)), [(x, y)]
    )
    assert profile.conventions["noise"] == "batch" and profile.degrees_of_freedom[0] > 30


def test_a_network_that_draws_random_numbers_is_averaged_over_them():
    model = nn.Linear(5, 1, bias=False)
    nn.init.ones_(model.weight)
    x = torch.randn(64, 5)
    x = x - x.mean(1, keepdim=True)  # w x = 0

    def forward(net, batch):  # (w x + sigma (z w) x + r)^2 with random r
        return net(batch[0]) + torch.randn(len(batch[0]), 1), batch[1]

    def square(outputs, targets):
        return outputs[:, 0] ** 2

    profile = measure(model, (x, torch.zeros(64)), forward=forward, metric=square, max_passes=40)
    exact = 0.09 * float(((x**2) @ (model.weight.detach()[0] ** 2)).mean())
    assert abs(profile.mean[0] - exact) < 4 * profile.stderr[0] < 0.5 * exact
    assert "random numbers" in str(profile)


def test_a_graph_of_just_these_nodes_is_measured_as_a_whole():
    class Graph(nn.Module):
        def __init__(self, nodes):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
            self.register_buffer("edges", torch.softmax(torch.randn(nodes, nodes), 1))

        def forward(self, x):
            return self.b(self.edges @ self.a(x).relu())

    profile = measure(Graph(100), data(100))
    assert profile.conventions["noise"] == "batch" and profile.conventions["batch_size"] == 100
    with pytest.raises(RuntimeError, match="shape"):  # what is wrong for all data stays the error it is
        measure(Graph(99), data(100))


class Drifting(Dataset):
    """Data that are other numbers whenever they are read."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 40

    def __getitem__(self, i):
        self.reads += 1
        return torch.full((2,), float(self.reads)), 0.0


def test_perturbed_and_unperturbed_network_see_the_same_of_data_that_change():
    model = nn.Linear(2, 1)

    def metric(outputs, targets):
        return outputs[:, 0] ** 2

    profile = local_energy(
        model, Drifting(), [1e-6], metric=metric, noise="batch", batch_size=10, max_passes=3, progress=False
    )
    assert abs(profile.mean[0]) < 1e-3 * profile.baseline


def test_time_may_come_first_in_the_inputs():
    torch.manual_seed(0)
    first, last = nn.GRU(4, 5), nn.GRU(4, 5, batch_first=True)
    last.load_state_dict(first.state_dict())
    x, y = torch.randn(6, 20, 4), torch.randint(5, (20,))
    options = {"noise": "batch", "metric": "loss", "max_passes": 3, "progress": False}
    options["forward"] = lambda model, batch: (model(batch[0])[1][0], batch[1])
    a = local_energy(first, [(x[:, :13], y[:13]), (x[:, 13:], y[13:])], [0.3], **options)
    b = local_energy(last, [(x[:, :13].transpose(0, 1), y[:13]), (x[:, 13:].transpose(0, 1), y[13:])], [0.3], **options)
    assert a.mean == pytest.approx(b.mean, rel=1e-4) and a.baseline == pytest.approx(b.baseline)


def test_strengths_of_the_noise_have_a_default():
    torch.manual_seed(0)
    profile = local_energy(torch.nn.Linear(3, 2), (torch.randn(20, 3), torch.arange(20) % 2), progress=False)
    assert profile.sigmas.tolist() == [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]


def test_parameters_that_the_first_call_makes_are_not_left_out():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.h = nn.Linear(5, 8), None

        def forward(self, x):
            x = self.a(x).tanh()
            if self.h is None:
                self.h = nn.Linear(x.shape[1], 3)
            return self.h(x)

    model = Lazy()
    with pytest.raises(ValueError, match=r"makes, renames or replaces parameters \(h.weight, h.bias\)"):
        measure(model, data())
    assert measure(model, data()).conventions["perturbed"] == 5 * 8 + 8 + 8 * 3 + 3
