import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import wideflat
from wideflat.committee.training import train
from wideflat.data import dress_coat
from wideflat.volume.free_entropy import Interrupted
from wideflat.volume.network_energy import Network

FAST = {"samples": 6, "burn": 4, "points": 16, "progress": False}


def blobs(n=60, inputs=8, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=generator)
    centers = torch.randn(classes, inputs, generator=generator)
    return centers[y] + 0.5 * torch.randn(n, inputs, generator=generator), y


def trained(model, data, steps=150):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def mlp(data, hidden=6, seed=0):
    torch.manual_seed(seed)
    return trained(nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3)), data)


def squares(outputs, targets):
    return 0.5 * (outputs - targets).square().sum(1)


def one_weight_an_example(size=12, weight=1.0):
    """A linear network without bias whose i-th example sees the i-th weight alone."""
    model = nn.Linear(size, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(weight)
    return model, (torch.eye(size), torch.ones(size))


# ---- known answers


@pytest.mark.parametrize("seed", [0, 1])
def test_linear_regression_in_float32(seed):
    """log Z = -log det(1 + H)/2 + g (1 + H)^-1 g/2 with H, g of the scaled quadratic loss."""
    torch.manual_seed(seed)
    model, x, y = nn.Linear(10, 1, bias=False), torch.randn(40, 10), torch.randn(40, 1)
    sigma = 0.5
    H, g = sigma**2 * (x.T @ x).double(), sigma * ((model(x) - y).T @ x).detach().double()[0]
    A = torch.eye(10) + H
    exact = (-0.5 * torch.logdet(A) + 0.5 * g @ torch.linalg.solve(A, g)).item()
    found = wideflat.free_entropy(model, (x, y), sigma, squares, scale="absolute", seed=seed, progress=False)
    assert found.converged[0], found.reasons
    assert abs(found.log_z[0] - exact) < 4 * found.stderr[0]
    distance = (torch.linalg.inv(A).diagonal().sum() + torch.linalg.solve(A, g).square().sum()) / 20 * sigma**2
    assert found.relative_distance[0] == pytest.approx(distance.item(), abs=0.05)


def test_the_probability_that_all_are_right():
    """Relative noise on weights of 1: every example is right with probability Phi(1/sigma)."""
    model, data = one_weight_an_example()
    found = wideflat.free_entropy(model, data, [0.3, 1.0], measure="error", progress=False)
    exact = 12 * np.log([0.5 * math.erfc(-1 / s / math.sqrt(2)) for s in (0.3, 1.0)])
    assert found.converged.all(), found.reasons
    assert (np.abs(found.log_z - exact) < 4 * found.stderr).all()
    assert found.conventions["measure"] == "error" and found.conventions["dropped"] == 0


def test_a_network_at_chance_is_right_or_refused():
    """A loss with a ceiling and noise so strong that every random point is at it: the well at w is not met."""
    model, data = one_weight_an_example(6)
    ceiling = lambda outputs, targets: 5 * (1 - torch.exp(-2 * (outputs[:, 0] - targets) ** 2))  # noqa: E731
    t = np.linspace(-9, 9, 200_001)
    weight = np.exp(-t * t / 2) / np.exp(-t * t / 2).sum()
    for sigma in (0.5, 30.0):
        exact = 6 * math.log(np.exp(-5 * (1 - np.exp(-2 * (sigma * t) ** 2))) @ weight)
        found = wideflat.free_entropy(model, data, sigma, ceiling, **FAST)
        assert not found.converged[0] or abs(found.log_z[0] - exact) < 4 * found.stderr[0]


def test_an_untrained_network_may_have_better_ones_around():
    data = blobs()
    torch.manual_seed(1)
    model = nn.Linear(8, 3)
    found = wideflat.free_entropy(model, data, 2.0, progress=False)
    longer = wideflat.free_entropy(model, data, 2.0, samples=60, seed=1, progress=False)
    assert abs(found.log_z - longer.log_z)[0] < 4 * np.hypot(found.stderr, longer.stderr)[0]
    assert longer.log_z[0] > 0 and "log Z > 0" in str(longer)


# ---- identities


@pytest.fixture(scope="module")
def net():
    data = blobs()
    return mlp(data), data


def test_slope_at_beta_zero_is_the_local_energy(net):
    model, data = net
    found = wideflat.free_entropy(model, data, 0.5, quick=True, **{**FAST, "points": 256})
    profile = wideflat.local_energy(model, data, [0.5], metric="loss", max_passes=200, noise="batch", progress=False)
    mean, stderr = found.local_energy
    assert abs(mean[0] - profile.mean[0]) < 4 * math.hypot(stderr[0], profile.stderr[0])


def test_small_sigma(net):
    """log Z -> -beta <V>_0 -> 0, and the bounds meet."""
    model, data = net
    found = wideflat.free_entropy(model, data, [1e-3, 1e-2], **FAST)
    assert found.converged.all() and (np.abs(found.log_z) < 0.1).all()
    assert abs(found.log_z[0]) < abs(found.log_z[1]) + found.stderr[1]
    assert np.allclose(found.lower, found.upper, atol=1e-2)


def test_rescaled_layers_have_the_same_relative_free_entropy(net):
    model, data = net
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(4)
        other[0].bias.mul_(4)
        other[2].weight.div_(4)
    one, two = (wideflat.free_entropy(m, data, 0.3, **FAST) for m in (model, other))
    assert one.log_z == pytest.approx(two.log_z, rel=1e-4)
    three = wideflat.free_entropy(other, data, 0.3, scale="absolute", **FAST)
    with pytest.raises(ValueError, match="scale is 'relative' for one and 'absolute' for the other"):
        one.compare(three)


def test_permuted_units_have_the_same_free_entropy(net):
    model, data = net
    other, order = copy.deepcopy(model), torch.tensor([3, 0, 5, 1, 4, 2])
    with torch.no_grad():
        other[0].weight.copy_(model[0].weight[order])
        other[0].bias.copy_(model[0].bias[order])
        other[2].weight.copy_(model[2].weight[:, order])
    one, two = (wideflat.free_entropy(m, data, 0.4, progress=False) for m in (model, other))
    assert one.converged.all() and two.converged.all(), (one.reasons, two.reasons)
    assert abs(one.compare(two).deviations[0]) < 4


def test_derivative_in_sigma(net):
    """d log Z/d log sigma^2 = N (r - 1)/2, by the difference of two sigmas."""
    model, data = net
    found = wideflat.free_entropy(model, data, [0.27, 0.3, 0.33], samples=40, progress=False)
    slope = (found.log_z[2] - found.log_z[0]) / (2 * math.log(0.33 / 0.27))
    error = math.hypot(found.stderr[0], found.stderr[2]) / (2 * math.log(0.33 / 0.27))
    middle, half = found.points[1], 0.5 * found.conventions["perturbed"]
    assert abs(slope - half * (middle.ratio - 1)) < 4 * math.hypot(error, half * middle.ratio_stderr)


def test_layer_scale_and_given_scales(net):
    model, data = net
    layer = wideflat.free_entropy(model, data, 0.1, scale="layer", parameters="weights", **FAST)
    given = {n: p.detach().square().mean().sqrt() for n, p in model.named_parameters() if n.endswith("weight")}
    same = wideflat.free_entropy(model, data, 0.1, scale=given, parameters="weights", **FAST)
    assert layer.log_z == pytest.approx(same.log_z, rel=1e-6)


# ---- what it takes


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))

    def forward(self, x):
        return self.layers(x)


def state_of(model):
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [(p.requires_grad, p.grad, p.data_ptr()) for p in model.parameters()]
    return tensors, [module.training for module in model.modules()], flags, torch.get_rng_state()


def same_state(one, two):
    tensors = all(torch.equal(one[0][name], two[0][name]) for name in one[0])
    return tensors and one[1] == two[1] and one[2] == two[2] and torch.equal(one[3], two[3])


@pytest.mark.parametrize("ending", ["well", "error", "interrupt"])
def test_the_network_is_left_as_it_was(ending, monkeypatch):
    model = Norms().train()
    model.layers[0].weight.requires_grad_(False)
    before = state_of(model)
    if ending == "well":
        wideflat.free_entropy(model, blobs(), 0.2, **FAST)
    else:
        fails_after(monkeypatch, 20, RuntimeError if ending == "error" else KeyboardInterrupt)
        with pytest.raises(RuntimeError if ending == "error" else Interrupted):
            wideflat.free_entropy(model, blobs(), 0.2, **FAST)
    assert same_state(before, state_of(model))


def fails_after(monkeypatch, calls, error):
    gradient, left = Network.gradient, [calls]

    def limited(self, *arguments):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return gradient(self, *arguments)

    monkeypatch.setattr(Network, "gradient", limited)


def test_loaders_dictionaries_and_tensors_agree(net):
    model, (x, y) = net
    whole = wideflat.free_entropy(model, (x, y), 0.2, **FAST)
    loader = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
    batches = [{"input": x[i : i + 20], "label": y[i : i + 20]} for i in range(0, 60, 20)]
    forward = lambda model, batch: (model(batch["input"]), batch["label"])  # noqa: E731
    for found in (
        wideflat.free_entropy(model, loader, 0.2, **FAST),
        wideflat.free_entropy(model, batches, 0.2, forward=forward, **FAST),
    ):
        assert found.log_z == pytest.approx(whole.log_z, rel=1e-3, abs=1e-4)
        assert found.conventions["examples"] == 60
    assert wideflat.free_entropy(model, loader, 0.2, **FAST).conventions["data"] == whole.conventions["data"]


def test_weights_that_are_zero_do_not_move():
    model, data = one_weight_an_example()
    with torch.no_grad():
        model.weight[0, :5] = 0
    found = wideflat.free_entropy(model, data, 0.2, squares_of_one, **FAST)
    assert found.conventions["unmoved"] == 5 and "5 weights are zero and do not move" in str(found)


def squares_of_one(outputs, targets):
    return (outputs[:, 0] - targets) ** 2


def test_a_subset_is_the_same_for_every_network(net):
    model, data = net
    one = wideflat.free_entropy(model, data, 0.2, subset=20, seed=1, **FAST)
    two = wideflat.free_entropy(copy.deepcopy(model), data, 0.2, subset=20, seed=2, **FAST)
    assert one.conventions["examples"] == 20 and one.compare(two, force=True).deviations[0] < 4
    other = wideflat.free_entropy(model, data, 0.2, subset=20, subset_seed=1, **FAST)
    with pytest.raises(ValueError, match="data is"):
        one.compare(other)
    with pytest.raises(ValueError, match="subset must be between 1 and the 60 examples"):
        wideflat.free_entropy(model, data, 0.2, subset=61)
    with pytest.raises(ValueError, match="subset needs tensors in memory or a data set"):
        wideflat.free_entropy(model, [data], 0.2, subset=6)


# ---- what it refuses


class AlwaysDropout(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, training=True)


class Augmented(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, i):
        x, y = blobs(30)
        return x[i].flip(0) if torch.rand(()) < 0.5 else x[i], y[i]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": AlwaysDropout(8, 3)}, "other outputs for the same weights"),
        ({"model": nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3, track_running_stats=False))}, "running statistics"),
        ({"batch_norm": "batch"}, 'batch_norm must be "eval"'),
        ({"batch_norm": "recalibrate"}, 'batch_norm must be "eval"'),
        ({"data": Augmented()}, "not the same in another reading"),
        ({"measure": lambda outputs, targets: (outputs.argmax(1) != targets).float()}, "has no gradient"),
        ({"measure": lambda outputs, targets: F.cross_entropy(outputs, targets)}, "one value for each of the"),
        ({"measure": "accuracy"}, "metric must be"),
        ({"measure": "error"}, "examples are wrong at the weights themselves"),
        ({"measure": "error", "beta": 2.0}, "has no temperature"),
        ({"model": nn.Linear(8, 3).bfloat16()}, r"convert with model.float\(\)"),
        ({"sigmas": [0.1, -1]}, "sigmas must be a finite number > 0"),
        ({"sigmas": []}, "sigmas must have at least one"),
        ({"beta": 0.0}, "beta must be a finite number > 0"),
        ({"scale": "filters"}, "scale must be"),
        ({"scale": {"weight": torch.ones(3, 8)}}, "no tensor for bias"),
        ({"scale": {"weight": -torch.ones(3, 8), "bias": torch.ones(3)}}, "not negative"),
        ({"parameters": "nothing"}, "selects none"),
        ({"chains": 0}, "chains must be a whole number >= 1"),
        ({"on_errors": "keep"}, "on_errors must be"),
    ],
)
def test_refusals(change, words):
    arguments = {"model": nn.Linear(8, 3), "data": blobs(30), "sigmas": [0.1], **FAST, **change}
    with pytest.raises(ValueError, match=words):
        wideflat.free_entropy(**arguments)


def test_examples_that_are_wrong_can_be_dropped():
    model, (x, y) = one_weight_an_example()
    y[:2] = -1
    found = wideflat.free_entropy(model, (x, y), 1.0, measure="error", on_errors="drop", progress=False)
    assert found.conventions["dropped"] == 2 and "2 examples that are wrong" in str(found)
    assert abs(found.log_z[0] - 10 * math.log(0.84134)) < 4 * found.stderr[0]


# ---- stopping and going on


def test_ctrl_c_and_the_rest_later_bit_for_bit(net, tmp_path, monkeypatch):
    model, data = net
    whole = wideflat.free_entropy(model, data, [0.2, 1.0], seed=3, **FAST)
    path = tmp_path / "entropy.pt"
    for calls in (60, 150):
        with monkeypatch.context() as patch:
            fails_after(patch, calls, KeyboardInterrupt)
            with pytest.raises(Interrupted, match="it goes on from here"):
                wideflat.free_entropy(model, data, [0.2, 1.0], seed=3, checkpoint=path, **FAST)
    found = wideflat.free_entropy(model, data, [0.2, 1.0], seed=3, checkpoint=path, **FAST)
    for one, two in zip(whole.points, found.points, strict=True):
        assert {**one.to_dict(), "seconds": 0} == {**two.to_dict(), "seconds": 0}
    with pytest.raises(ValueError, match=r"another measurement \(seed differ\)"):
        wideflat.free_entropy(model, data, [0.2, 1.0], seed=4, checkpoint=path, **FAST)
    with torch.no_grad():
        other = copy.deepcopy(model)
        other[0].bias.add_(1e-3)
    with pytest.raises(ValueError, match="weights differ"):
        wideflat.free_entropy(other, data, [0.2, 1.0], seed=3, checkpoint=path, **FAST)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        wideflat.free_entropy(model, data, [0.2, 1.0], seed=3, checkpoint=path, **FAST)


def test_minutes_end_it(net):
    model, data = net
    found = wideflat.free_entropy(model, data, [0.2, 0.4], minutes=0, **FAST)
    assert not found.complete and len(found.points) == 0 and "stopped" in str(found)


def test_it_says_what_it_will_cost(net, capsys):
    model, data = net
    wideflat.free_entropy(model, data, 0.3, samples=6, burn=4, points=16)
    text = capsys.readouterr().err
    assert "75 weights, 60 examples" in text and "gradients of" in text


# ---- committees


class Committee(nn.Module):
    """The median over hidden units of their fields: positive where the majority votes +1."""

    def __init__(self, weights):
        super().__init__()
        self.weights = nn.Parameter(weights)

    def forward(self, x):
        return (x @ self.weights.T / math.sqrt(x.shape[1])).median(1).values


@pytest.mark.parametrize("seed", [0, 1])
def test_a_committee_against_the_sampler(seed):
    """Eq. 3 by thermodynamic integration and by subset simulation, with absolute noise of variance Delta."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.where(torch.rand(15, 30, generator=generator) < 0.5, 1.0, -1.0)
    w = torch.randn(3, 30, generator=generator)
    w = w * math.sqrt(30) / w.norm(dim=1, keepdim=True)
    y = Committee(w)(x).detach().sign()
    sampled = wideflat.local_entropy(w, x, y, deltas=[1.0], method="sample", particles=400, seed=seed)
    found = wideflat.free_entropy(Committee(w), (x, y), 1.0, "error", scale="absolute", seed=seed, progress=False)
    assert found.converged[0], found.reasons
    error = math.hypot(found.stderr[0], sampled.log_z_stderr.item())
    assert abs(found.log_z[0] - sampled.log_z.item()) < 4 * error < 6
    assert found.relative_distance[0] == pytest.approx(sampled.relative_distance.item(), abs=0.1)


@pytest.fixture(scope="module")
def real_committees():
    """Two solutions of 9 x 784 weights of 100 images, with these; units of norm sqrt N."""
    patterns = dress_coat.load(100)
    x, y = torch.as_tensor(patterns.inputs).float(), torch.as_tensor(patterns.targets).float()
    found = {}
    for setting in ("sgd-fast", "sgd-slow"):
        w = train(setting, x, y, seeds=[0], progress=False).weights[0].float()
        found[setting] = w * math.sqrt(w.shape[1]) / w.norm(dim=1, keepdim=True)
    return found, x, y


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["sgd-fast", "sgd-slow"])
@pytest.mark.parametrize("delta", [0.3, 1.0, 3.0])
def test_real_committees_against_the_sampler_and_its_approximations(setting, delta, real_committees):
    """Within errors of the sampler; EP with vector sites within 10 %, BP makes the volume too small, as is known."""
    committees, x, y = real_committees
    w = committees[setting]
    found = wideflat.free_entropy(
        Committee(w.clone()), (x, y), math.sqrt(delta), "error", scale="absolute", progress=False
    )
    sampled = wideflat.local_entropy(w, x, y, [delta], method="sample", particles=128, runs=3)
    assert found.converged[0], found.reasons
    error = math.hypot(found.stderr[0], sampled.log_z_stderr.item())
    assert abs(found.log_z[0] - sampled.log_z.item()) < 4 * error < 6
    assert found.relative_distance[0] == pytest.approx(sampled.relative_distance.item(), rel=0.05)
    ladder = [d for d in (0.1, 0.3, 1.0) if d < delta] + [delta]
    ep, bp = (wideflat.local_entropy(w, x, y, ladder, method=method).log_z[-1].item() for method in ("ep-vector", "bp"))
    assert abs(found.log_z[0] - ep) < 4 * error + 0.1 * abs(ep) and bp < found.log_z[0] + 4 * error
