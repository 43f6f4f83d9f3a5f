"""Every form against the naive loop, one network at a time by autograd."""

import pytest
import torch

from wideflat.committee import SETTINGS
from wideflat.committee.forms import sigmoid_
from wideflat.committee.randomness import initial_weights
from wideflat.committee.reference import train_one

CASES = {
    "sgd-fast": SETTINGS["sgd-fast"],
    "sgd-slow": SETTINGS["sgd-slow"],
    "dropout": SETTINGS["sgd-fast"].replace(dropout=0.3),
    "rsgd": SETTINGS["rsgd-fast"].replace(num_replicas=3, gamma0=2.0),
    "rsgd, period 3": SETTINGS["rsgd-slow"].replace(num_replicas=3, gamma0=2.0, period=3),
    "rsgd, two replicas, dropout": SETTINGS["rsgd-fast"].replace(num_replicas=2, dropout=0.2),
    "esgd": SETTINGS["esgd"].replace(epsilon=0.0, inner_steps=6),
    "esgd, alpha 0": SETTINGS["esgd"].replace(epsilon=0.0, inner_steps=4, alpha=0.0, hidden=5),
    "esgd, all to mu": SETTINGS["esgd"].replace(epsilon=0.0, inner_steps=3, lr=0.9, gamma0=1.0, inner_lr=1e-4),
}


@pytest.mark.parametrize("form", ["gram", "gram, by torch", "direct"])
@pytest.mark.parametrize("case", CASES)
def test_the_batched_training_is_the_naive_loop(case, form, images, make, advance):
    """Epoch by epoch in float64, with batches that do not divide the patterns, for weights and stopping rule."""
    setting = CASES[case].replace(batch_size=16, tolerance=1e3)  # so that the distance is exact, not a bound
    seeds, count = (0, 5), len(images.inputs)
    fast = make(form, setting, images, seeds)
    twins = [train_one(setting, images.inputs, images.targets, seed) for seed in seeds]
    for epoch in range(4):
        advance(fast, setting, seeds, epoch, count)
        weights = fast.weights()
        rule = {"errors": fast.errors, "loss": lambda e=epoch: fast.loss(e), "distance": fast.distance}[setting.stop]()
        for k, twin in enumerate(twins):
            expected, value = next(twin)
            assert torch.allclose(weights[k], expected, rtol=0, atol=1e-10)
            assert rule[k].item() == pytest.approx(value, rel=1e-7)
    moved = weights[0] - initial_weights(setting, 0, 784)
    assert moved.abs().max() > 1e-4  # something has happened


def test_every_step_equals_the_naive_loop_on_one_batch_epochs(images, make, advance):
    """With one mini-batch an epoch the comparison is step by step."""
    for setting in (CASES["sgd-fast"], CASES["rsgd"], CASES["esgd"].replace(inner_steps=1)):
        setting = setting.replace(batch_size=60)
        fast, twin = make("gram", setting, images, (1,)), train_one(setting, images.inputs, images.targets, 1)
        for epoch in range(20):
            advance(fast, setting, (1,), epoch, 60)
            assert torch.allclose(fast.weights()[0], next(twin)[0], rtol=0, atol=1e-11)


def test_the_noise_of_entropy_sgd(images, make, advance):
    """Its variance in the direct form is that of Algorithm 1, and the Gram form gathers the same variance for w."""
    setting = SETTINGS["esgd"].replace(
        batch_size=60, gradient_scale=1e-30, epsilon=0.01, inner_steps=3, lr=0.5, gamma0=20.0
    )
    # no gradient: w moves by eta times the mean of the explorer's noise, N(0, reach) with the weights of the mean
    k, alpha = setting.inner_lr * setting.gamma0, setting.alpha
    weights = [
        sum((1 - alpha) * alpha ** (2 - i) * (1 - k) ** (i - first) for i in range(first, 3)) for first in range(3)
    ]
    variance = setting.lr**2 * setting.inner_lr * setting.epsilon**2 * sum(w**2 for w in weights)
    seeds = tuple(range(8))
    direct, gram = (make(form, setting, images, seeds) for form in ("direct", "gram"))
    start = direct.weights()
    advance(direct, setting, seeds, 0, 60)
    advance(gram, setting, seeds, 0, 60)
    moved = direct.weights() - start
    assert moved.square().mean().item() == pytest.approx(variance, rel=0.05)
    assert gram.noise == pytest.approx(variance, rel=1e-12)
    assert torch.allclose(gram.weights(), start, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sigmoid_does_not_depend_on_where_a_number_stands(dtype):
    numbers = torch.randn(640, dtype=dtype, generator=torch.Generator().manual_seed(0))
    expected = numbers.clone().sigmoid_()
    for count in (1, 7, 16, 48, 63, 64, 65, 100):
        for start in (0, 3, 100):
            part = numbers[start : start + count].clone()
            assert sigmoid_(part).data_ptr() == part.data_ptr()
            assert torch.equal(part, expected[start : start + count])
