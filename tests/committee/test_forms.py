import numpy as np
import pytest
import torch

from wideflat.committee import SETTINGS
from wideflat.committee.job import make_form
from wideflat.committee.randomness import dropout_mask, initial_weights, order
from wideflat.committee.reference import train_one
from wideflat.data import dress_coat


@pytest.fixture(scope="module")
def images():
    return dress_coat.load(60)


def make(form, setting, patterns, seeds, dtype=torch.float64):
    made = make_form(form.partition(",")[0], setting, patterns, dtype)
    if form == "gram, by torch":
        made.kernel = None
    made.load(torch.stack([initial_weights(setting, seed, patterns.inputs.shape[1]) for seed in seeds]))
    made.seeds = seeds
    return made


def advance(form, setting, seeds, epoch, count):
    orders = torch.from_numpy(np.stack([order(setting, seed, epoch, count) for seed in seeds]))
    masks = None
    if setting.dropout:
        masks = torch.from_numpy(np.stack([dropout_mask(setting, seed, epoch, count) for seed in seeds])).to(form.dtype)
    form.epoch(epoch, orders, masks)


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
def test_the_batched_training_is_the_naive_loop(case, form, images):
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


def test_every_step_equals_the_naive_loop_on_one_batch_epochs(images):
    """With one mini-batch an epoch the comparison is step by step."""
    for setting in (CASES["sgd-fast"], CASES["rsgd"], CASES["esgd"].replace(inner_steps=1)):
        setting = setting.replace(batch_size=60)
        fast, twin = make("gram", setting, images, (1,)), train_one(setting, images.inputs, images.targets, 1)
        for epoch in range(20):
            advance(fast, setting, (1,), epoch, 60)
            assert torch.allclose(fast.weights()[0], next(twin)[0], rtol=0, atol=1e-11)


def test_the_rows_that_are_left_out_do_not_matter(images):
    """Late settings, where most coefficients are tiny: few rows against all rows (bit for bit), and the naive loop."""
    setting = SETTINGS["sgd-fast"].replace(batch_size=20, omega0=200.0, tanh_beta0=4.0, lr=1e-5)
    few, every = (make("gram, by torch", setting, images, (0, 1, 2), torch.float32) for _ in range(2))
    twin = train_one(setting, images.inputs, images.targets, 0)
    fractions = []
    for epoch in range(30):
        few.active = 0.0  # then epoch() measures it
        advance(few, setting, (0, 1, 2), epoch, 60)
        fractions.append(few.active)
        every.active = 1.0
        add = every.add_rows

        def all_rows(a, index, c, add=add):
            every.measure, every.active = False, 1.0
            return add(a, index, c)

        every.add_rows = all_rows
        advance(every, setting, (0, 1, 2), epoch, 60)
        every.add_rows = add
        exact, _ = next(twin)
        assert torch.equal(few.state["a"], every.state["a"])
        assert torch.allclose(few.weights()[0].double(), exact, atol=5e-5)  # with omega = 200 roundings grow quickly
    assert min(fractions) < 0.5  # the branch was taken


def test_the_loss_is_a_bound_only_where_it_is_too_large(images):
    setting = SETTINGS["sgd-slow"].replace(batch_size=20, lr=1e-4, omega1=0.05, tanh_beta1=0.05, tolerance=1e-3)
    form = make("gram", setting, images, (0, 1, 2, 3))
    bounds = 0
    for epoch in range(80):
        advance(form, setting, (0, 1, 2, 3), epoch, 60)
        found = form.loss(epoch)
        exact = form.loss(epoch, exact=True)
        assert (found <= exact * (1 + 1e-12)).all()
        close = (found - exact).abs() <= 1e-12 * exact
        assert ((found > setting.tolerance) | close).all()
        bounds += int((~close).sum())
    assert bounds > 20 and (exact < setting.tolerance).any()


def test_the_noise_of_entropy_sgd(images):
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
