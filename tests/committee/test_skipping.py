import itertools
import math

import pytest
import torch

from wideflat.committee import SETTINGS, Interrupted, train
from wideflat.committee.gram import Gram
from wideflat.committee.job import Group
from wideflat.committee.randomness import initial_weights
from wideflat.committee.reference import train_one
from wideflat.committee.skipping import largest_coefficient, mixing, movement, spread

#: omega grows so fast that the gradient dies while the replicas are still apart.
DYING = SETTINGS["rsgd-fast"].replace(
    num_replicas=3,
    batch_size=20,
    lr=3e-4,
    tanh_beta1=0.03,
    tanh_beta_max=30.0,
    omega1=0.1,
    gamma0=2.0,
    gamma1=0.03,
    tolerance=1e-6,
    max_epochs=300,
)


@pytest.fixture
def skips(monkeypatch):
    """The epochs at which restarts skipped what is left until the next refresh, by seed."""
    taken: dict[int, list[int]] = {}
    original = Group._skip

    def skip(self, weights):
        rows = original(self, weights)
        for row in rows:
            taken.setdefault(self.restarts[row].seed, []).append(self.epoch)
        return rows

    monkeypatch.setattr(Group, "_skip", skip)
    return taken


@pytest.fixture(scope="module")
def replicas():
    return initial_weights(SETTINGS["rsgd-fast"].replace(num_replicas=4), 0, 784)  # (y, H, N)


def overlaps_of(weights):
    return torch.einsum("ahi,bhi->hab", weights, weights).unsqueeze(0)


def attract(weights, strength, steps):
    for _ in range(steps):
        weights = torch.lerp(weights, weights.mean(dim=0, keepdim=True), strength)
        weights = weights / weights.norm(dim=-1, keepdim=True)
    return weights


@pytest.mark.parametrize("period", [1, 3])
def test_the_matrices_are_the_coupling_and_the_normalisation(replicas, period):
    setting = SETTINGS["rsgd-fast"].replace(num_replicas=4, lr=0.1, gamma0=0.2, gamma1=0.1, period=period)
    mixtures = mixing(setting, overlaps_of(replicas), 5, 6, 4)
    weights = replicas
    for epoch, mixture in zip(range(5, 11), mixtures, strict=True):
        for number in range(1 + 4 * epoch, 5 + 4 * epoch):
            if number % period == 0:
                weights = attract(weights, 0.1 * period * setting.gamma(epoch), 1)
        assert torch.allclose(torch.einsum("hab,bhi->ahi", mixture[0], replicas), weights, atol=1e-13)
        distance = (weights - weights.mean(dim=0)).square().sum() / 8
        assert spread(mixture, overlaps_of(replicas)).item() == pytest.approx(distance.item(), rel=1e-9)


def test_no_preactivation_moves_farther_than_the_bound(replicas, images):
    setting = SETTINGS["rsgd-fast"].replace(num_replicas=4, lr=0.1, gamma0=0.02, gamma1=0.05)
    inputs = images.inputs.double()
    z = (replicas @ inputs.T).unsqueeze(0)
    mixtures = mixing(setting, overlaps_of(replicas), 0, 20, 3)
    bound = movement(mixtures, z)
    weights, farthest = replicas, torch.zeros_like(z)
    for epoch in range(20):
        for _ in range(3):
            weights = attract(weights, 0.1 * setting.gamma(epoch), 1)
            farthest = torch.maximum(farthest, ((weights @ inputs.T).unsqueeze(0) - z).abs())
    assert (farthest <= bound).all()
    assert farthest.max() > 0.1 and (farthest.sum() / bound.sum()) > 0.3  # and it is not a wild overestimate


def test_no_coefficient_is_larger_than_the_bound(images):
    """Against the derivative of the loss by autograd, for pre-activations anywhere within their reach."""
    setting = SETTINGS["rsgd-slow"].replace(tanh_beta0=3.0, omega0=2.0, tanh_beta1=0.02, omega1=0.02)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(6, 2, 9, 30, generator=generator, dtype=torch.float64)
    targets = torch.where(torch.arange(30) % 2 == 0, 1.0, -1.0).double()
    reach = 0.1 * torch.rand(z.shape, generator=generator, dtype=torch.float64)
    bound = largest_coefficient(setting, z, reach, targets, (10, 20))
    largest = torch.zeros(6, dtype=torch.float64)
    for epoch in range(10, 21, 2):
        for way in (-1.0, 1.0, None):
            offset = reach * (2 * torch.rand(z.shape, generator=generator, dtype=torch.float64) - 1)
            moved = (z + (offset if way is None else way * reach)).requires_grad_()
            output = torch.tanh(setting.tanh_beta(epoch) * moved).sum(dim=2) / 3
            omega = setting.omega(epoch)
            loss = torch.nn.functional.softplus(-2 * omega * targets * output).sum() / (2 * omega)
            (gradient,) = torch.autograd.grad(setting.lr * loss, moved)
            largest = torch.maximum(largest, gradient.abs().amax(dim=(1, 2, 3)))
    assert (largest <= bound).all()
    assert (bound < 10 * largest).all()
    exact = largest_coefficient(setting, torch.zeros(1, 1, 9, 1).double(), 0.0, targets[:1], (0, 0)).item()
    assert exact == pytest.approx(setting.lr * setting.tanh_beta0 / 3 / 2)


def test_skipped_epochs_are_those_of_the_naive_loop(images, skips):
    seeds = (1, 2, 3)
    result = train(DYING, images.inputs, images.targets, seeds, progress=False, refresh=10, dtype=torch.float64)
    assert all(len(skips[seed]) > 4 for seed in seeds)
    assert result.reached == [True] * 3
    for k, seed in enumerate(seeds):
        twin = train_one(DYING, images.inputs, images.targets, seed)
        history = list(itertools.islice(twin, result.epochs[k]))
        assert min(value for _, value in history[:-1]) >= DYING.tolerance > history[-1][1]
        assert result.value[k] == pytest.approx(history[-1][1], rel=1e-6)
        center = history[-1][0].mean(dim=0)
        assert torch.allclose(result.weights[k], center / center.norm(dim=-1, keepdim=True), atol=1e-12)


def test_skipping_does_not_depend_on_neighbours(images, skips):
    run = {"progress": False, "refresh": 10}
    crowd = train(DYING, images.inputs, images.targets, range(5), threads=1, **run)
    in_crowd = {seed: list(epochs) for seed, epochs in skips.items()}
    starts = {epochs[0] for epochs in in_crowd.values()}
    assert len(starts) > 1  # some skipped while others did not
    for k in (1, 3):
        skips.clear()
        alone = train(DYING, images.inputs, images.targets, [k], **run)
        assert skips == {k: in_crowd[k]}
        assert torch.equal(alone.weights[0], crowd.weights[k])
        assert alone.epochs[0] == crowd.epochs[k] and alone.value[0] == crowd.value[k]


def test_skipping_ends_at_the_limit_of_epochs(images, skips):
    last = DYING.replace(max_epochs=97, tolerance=1e-30)
    result = train(last, images.inputs, images.targets, [1, 3], progress=False, refresh=10, dtype=torch.float64)
    assert result.epochs == [97, 97] and result.stop == ["max_epochs"] * 2
    assert all(epochs[-1] == 90 for epochs in skips.values())
    twin = train_one(last, images.inputs, images.targets, 3)
    _, value = next(itertools.islice(twin, 96, None))
    assert result.value[1] == pytest.approx(value, rel=1e-6)


def test_nothing_is_skipped_where_there_is_a_gradient(images, skips):
    for setting in (
        SETTINGS["rsgd-fast"].replace(num_replicas=3, batch_size=20, max_epochs=30),
        DYING.replace(max_epochs=60, dropout=0.2),
        DYING.replace(max_epochs=60, stop="errors", tolerance=0.0),
    ):
        train(setting, images.inputs, images.targets, [0, 1], progress=False, refresh=10)
        assert not skips


def test_a_run_that_skips_can_be_interrupted(images, tmp_path, monkeypatch, skips):
    arguments = (DYING, images.inputs, images.targets, range(4))
    whole = train(*arguments, progress=False, refresh=10)
    path = tmp_path / "state.npz"
    starts = sorted(epochs[0] for epochs in skips.values())
    assert starts[0] < starts[-1]
    original = Gram.epoch

    def epoch(self, number, *rest):
        original(self, number, *rest)
        if number == starts[0] + 1:  # one is ahead, another is not
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Gram, "epoch", epoch)
        train(*arguments, progress=False, refresh=10, checkpoint=path, threads=1)
    resumed = train(*arguments, progress=False, refresh=10, checkpoint=path)
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.epochs == whole.epochs and resumed.value == whole.value
    assert issubclass(Interrupted, KeyboardInterrupt) and not any(math.isnan(value) for value in resumed.value)
