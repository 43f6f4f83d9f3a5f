"""The local energy: against closed forms, between its kinds of noise, and what it leaves behind."""

import math
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from wideflat import LocalEnergy, local_energy
from wideflat.energy.profile import Interrupted
from wideflat.models import resnet18, smallconvnet

SIGMAS = [0.1, 0.3, 0.6]
KINDS = ["batch", "example", "pass"]


def measure(model, data, sigmas=SIGMAS, **options):
    return local_energy(model, data, sigmas, progress=False, **options)


def linear_classifier(n=200, inputs=20, seed=0):
    """A linear classifier, its data, and its exact dE: Phi(-y w.x / (sigma sqrt(sum w^2 x^2))) - E(w)."""
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(n, inputs, generator=g), torch.randn(inputs, generator=g)
    y = torch.sign(x @ w + 0.5 * torch.randn(n, generator=g))
    model = nn.Linear(inputs, 1, bias=False)
    model.weight.data.copy_(w)
    field, scale = y.double() * (x.double() @ w.double()), ((x.double() ** 2) @ (w.double() ** 2)).sqrt()
    wrong = (field <= 0).double().mean()
    exact = [float(torch.special.ndtr(-field / (sigma * scale)).mean() - wrong) for sigma in SIGMAS]
    return model, (x, y), np.array(exact), float(wrong)


def square(outputs, targets):
    return (outputs[:, 0] - targets) ** 2


# ---- against closed forms


@pytest.mark.parametrize("noise", KINDS)
def test_a_linear_classifier_has_its_exact_error(noise):
    model, data, exact, wrong = linear_classifier()
    profile = measure(model, data, noise=noise, max_passes=60)
    assert profile.baseline == pytest.approx(wrong)
    assert (np.abs(profile.mean - exact) < 4.5 * profile.stderr).all()
    assert (profile.stderr < 0.02).all()
    assert profile.evaluations.tolist() == [60 * 200] * 3


@pytest.mark.parametrize("noise", KINDS)
def test_a_quadratic_metric_grows_by_sigma_squared_times_the_sum_of_squares(noise):
    """(w.x - y)^2 has the mean (w.x - y)^2 + sigma^2 sum w^2 x^2: sigma is a standard deviation, not a variance."""
    g = torch.Generator().manual_seed(1)
    x, y, w = torch.randn(64, 5, generator=g), torch.randn(64, generator=g), torch.randn(5, generator=g)
    model = nn.Linear(5, 1, bias=False)
    model.weight.data.copy_(w)
    exact = np.array([sigma**2 * float(((x**2) @ (w**2)).mean()) for sigma in SIGMAS])
    profile = measure(model, (x, y), noise=noise, metric=square, max_passes=100)
    assert profile.baseline == pytest.approx(float(((x @ w - y) ** 2).mean()), rel=1e-5)
    assert (np.abs(profile.mean - exact) < 4.5 * profile.stderr).all()
    assert profile.stderr[2] < 0.25 * exact[2]


@pytest.mark.parametrize(
    ("noise", "options"),
    [
        ("batch", {"max_passes": 1}),
        ("batch", {"max_passes": 2}),
        ("batch", {"max_passes": 0.5, "batch_size": 5}),
        ("batch", {"target_stderr": 0.025}),
        ("example", {"max_passes": 2}),
        ("example", {"max_passes": 3, "common_noise": False}),
        ("pass", {"max_passes": 4}),
    ],
    ids=str,
)
def test_stated_intervals_cover_the_truth(noise, options):
    """Over many seeds the 95% intervals contain the exact value in 90-99% of cases (one pass: at least)."""
    model, data, exact, _ = linear_classifier()
    cover, values, stated = [], [], []
    for seed in range(100):
        profile = measure(model, data, noise=noise, seed=seed, **options)
        low, high = profile.interval(0.95).T
        cover.append((low <= exact) & (exact <= high))
        values.append(profile.mean)
        stated.append(profile.stderr)
    mean = np.mean(cover)
    conservative = options.get("max_passes", 2) <= 1
    assert 0.90 <= mean <= (1.0 if conservative else 0.99)
    bias = (np.mean(values, 0) - exact) / (np.std(values, 0) / math.sqrt(len(values)))
    assert (np.abs(bias) < 4).all()
    ratio = np.sqrt(np.mean(np.square(stated), 0)) / np.std(values, 0)
    assert (ratio > 0.8).all() and (ratio < (2.0 if conservative else 1.35)).all()


def test_intervals_cover_for_the_quadratic_metric():
    g = torch.Generator().manual_seed(1)
    x, y, w = torch.randn(48, 5, generator=g), torch.randn(48, generator=g), torch.randn(5, generator=g)
    model = nn.Linear(5, 1, bias=False)
    model.weight.data.copy_(w)
    exact = 0.3**2 * float(((x**2) @ (w**2)).mean())
    for noise, passes in (("batch", 2), ("example", 2), ("pass", 6)):
        cover = []
        for seed in range(120):
            profile = measure(model, (x, y), [0.3], noise=noise, metric=square, max_passes=passes, seed=seed)
            low, high = profile.interval(0.95)[0]
            cover.append(low <= exact <= high)
        assert 0.88 <= np.mean(cover) <= 0.995, noise


def test_the_three_variances():
    """Variance of one pass: (v/n)(1 + (n-1) rho), (v/n)(1 + (b-1) rho), v/n, with v and rho measured directly."""
    model, (x, y), _, _ = linear_classifier(n=96, inputs=4)
    sigma, b, draws = 0.6, 24, 3000
    g = torch.Generator().manual_seed(0)
    z = torch.randn(draws, x.shape[1], generator=g)
    e = ((x @ ((1 + sigma * z) * model.weight.detach()).T) * y[:, None] <= 0).double()  # (n, draws)
    n = len(x)
    v = float(e.var(1).mean())
    rho = (n * float(e.mean(0).var()) / v - 1) / (n - 1)
    assert rho > 0.02
    for noise, factor in (("pass", n - 1), ("batch", b - 1), ("example", 0)):
        means = [
            measure(model, (x, y), [sigma], noise=noise, batch_size=b, max_passes=2, seed=seed).mean[0]
            for seed in range(200)
        ]
        expected = v / n * (1 + factor * rho) / 2
        assert np.var(means) == pytest.approx(expected, rel=0.35), noise


def test_common_noise_keeps_the_covariance():
    model, data, _, _ = linear_classifier()
    together = measure(model, data, [0.5, 0.52], max_passes=20)
    apart = measure(model, data, [0.5, 0.52], max_passes=20, common_noise=False)

    def correlation(profile):
        return profile.covariance[0, 1] / math.sqrt(profile.covariance[0, 0] * profile.covariance[1, 1])

    assert correlation(together) > 0.9
    assert abs(correlation(apart)) < 0.4
    assert np.sqrt(np.diag(together.covariance)) == pytest.approx(together.stderr)


def test_the_default_noise_is_of_each_example_where_all_layers_are_linear():
    x, y = torch.randn(40, 6), torch.randint(3, (40,))
    mlp = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

    def chosen(model, data, **options):
        return measure(model, data, [0.2], **options).conventions["noise"]

    assert chosen(mlp, (x, y)) == "example"
    assert chosen(mlp, DataLoader(TensorDataset(x, y), batch_size=8)) == "example"
    assert chosen(mlp, ((x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8))) == "example"
    assert chosen(mlp, (x, y), batch_norm="batch") == chosen(mlp, (x, y), batch_norm="recalibrate") == "batch"
    assert chosen(mlp, (x, y), metric=lambda outputs, targets: outputs.var()) == "batch"  # one number for the batch
    network = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    assert chosen(network, (x, y)) == "batch"
    assert chosen(network, (x, y), parameters="3[.].*") == "example"  # its only linear layer


@pytest.mark.parametrize("parameters", ["all", "0[.]bias", "0[.]weight", "2[.].*"])
def test_several_passes_at_once_have_the_mean_of_passes_one_by_one(parameters):
    """Passes over one block share what its first layer computes; the mean of (w + sigma z w) x squared is known."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 1)).double()
    x, sigma = torch.randn(6, 3, dtype=torch.float64), 0.4
    (w, b), (v, c) = ((layer.weight.data, layer.bias.data) for layer in (model[0], model[2]))
    s, t, u = (sigma**2 * (parameters in ("all", name)) for name in ("0[.]weight", "0[.]bias", "2[.].*"))
    h = x @ w.T + b
    variance = s * (x * x) @ (w * w).T + t * b * b  # of h, whose components are independent
    exact = (u * (v * v) @ (h * h + variance).T + (v * v) @ variance.T + u * c * c).mean()
    profile = measure(model, (x, torch.zeros(6)), [sigma], metric=square, parameters=parameters, max_passes=4096)
    assert profile.conventions["noise"] == "example"
    assert abs(profile.mean[0] - float(exact)) < 4.5 * profile.stderr[0] < 0.3 * float(exact)


def test_the_kinds_of_noise_agree_on_a_convolutional_network_with_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, 3),
    )  # fmt: skip
    x = torch.randn(96, 2, 6, 6)
    y = model.train()(x).argmax(1)
    profiles = {
        noise: measure(model, (x, y), [0.2, 0.5], noise=noise, max_passes=passes)
        for noise, passes in (("pass", 300), ("batch", 30), ("example", 30))
    }
    for noise in ("batch", "example"):
        gap = profiles[noise].mean - profiles["pass"].mean
        assert (np.abs(gap) < 4.5 * np.hypot(profiles[noise].stderr, profiles["pass"].stderr)).all()
    assert set(profiles["example"].conventions["treatment"].values()) == {"flipout", "independent"}
    assert (profiles["pass"].stderr < 0.1 * profiles["pass"].mean).all()


def test_the_folded_and_the_plain_network_give_the_same_numbers():
    """The fast path against the same z on the network as it is (a hook keeps it from being folded)."""
    torch.manual_seed(0)
    model = resnet18(num_classes=5).to(memory_format=torch.channels_last)
    data = torch.randn(32, 3, 16, 16), torch.randint(5, (32,))
    fast = measure(model, data, [0.05, 0.3], metric="loss", batch_size=16, max_passes=1)
    model.register_forward_hook(lambda module, inputs, output: None)
    plain = measure(model, data, [0.05, 0.3], metric="loss", batch_size=16, max_passes=1)
    assert fast.mean == pytest.approx(plain.mean, rel=1e-3)


def test_the_naive_loop_gives_the_same_numbers():
    """Copy, perturb, evaluate everything, restore: the twin of noise="pass", with the same z."""
    from wideflat.kernels.noise import GaussianNoise
    from wideflat.seeds import derive_seed

    torch.manual_seed(0)
    model = smallconvnet(num_classes=4)
    x, y = torch.randn(20, 3, 32, 32), torch.randint(4, (20,))
    profile = measure(model, (x, y), [0.2], noise="pass", metric="loss", max_passes=2, seed=7)
    model.eval()
    with torch.no_grad():
        base = nn.functional.cross_entropy(model(x), y).item()
        weights = [p.clone() for p in model.parameters()]
        for number in range(2):
            g = torch.Generator().manual_seed(derive_seed(7, "noise", number))
            noise = GaussianNoise(int(torch.randint(2**63 - 1, (), generator=g)))
            flat = noise(0, 0, sum(p.numel() for p in weights))
            for p, w, z in zip(model.parameters(), weights, flat.split([w.numel() for w in weights]), strict=True):
                p.copy_(w + 0.2 * z.view(w.shape) * w)
            value = nn.functional.cross_entropy(model(x), y).item() - base
            assert profile.samples[number, 0] == pytest.approx(value, rel=1e-3, abs=1e-5)


# ---- when to stop


def test_it_stops_at_each_sigma_when_its_error_bar_is_small_enough():
    model, data, _exact, _ = linear_classifier(n=2000)
    profile = measure(model, data, [0.02, 0.6], target_stderr=0.01, batch_size=10)
    assert (profile.stderr <= 0.01).all() and profile.complete
    assert profile.passes[0] < profile.passes[1]
    tight = measure(model, data, target_stderr=1e-5, max_passes=2)
    assert not tight.complete and (tight.passes == 2).all()


def test_nothing_went_wrong_is_not_certainty():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    profile = measure(model, (torch.ones(100, 1), torch.ones(100)), [0.0, 0.01], max_passes=2)
    assert profile.mean.tolist() == [0, 0]
    assert profile.stderr[0] == 0 and profile.stderr[1] == pytest.approx(1 / 200)


def test_equal_seeds_give_equal_results_and_other_seeds_others():
    model, data, _, _ = linear_classifier()
    for noise in KINDS:
        a, b, c = (measure(model, data, noise=noise, max_passes=3, seed=seed) for seed in (1, 1, 2))
        assert (a.mean == b.mean).all() and (a.mean != c.mean).any()


def test_more_sigmas_do_not_change_the_noise_of_one():
    model, data, _, _ = linear_classifier()
    assert measure(model, data, [0.3]).mean[0] == pytest.approx(measure(model, data, [0.1, 0.3]).mean[1], abs=1e-9)


# ---- conventions


def normalised():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(256, 6)
    model.train()
    for _ in range(30):
        model(x)
    return model, (x, model.eval()(x).argmax(1))


def test_batch_norm_modes_do_what_they_say():
    """A large scale on the first layer is undone by batch norm with the statistics of the perturbed network only."""
    model, data = normalised()
    only = {"parameters": "0.weight", "noise": "pass", "max_passes": 40}
    values = {mode: measure(model, data, [0.8], batch_norm=mode, **only) for mode in ("eval", "recalibrate", "batch")}
    assert values["eval"].mean[0] > values["recalibrate"].mean[0] + 0.01
    gap = abs(values["recalibrate"].mean[0] - values["batch"].mean[0])
    assert gap < 0.2 * values["eval"].mean[0]
    for mode, profile in values.items():
        assert profile.conventions["batch_norm"] == mode

    class Scale(nn.Module):  # one factor before the batch norm: statistics of the perturbed network cancel it exactly
        def __init__(self):
            super().__init__()
            self.factor, self.norm = nn.Parameter(torch.ones(1)), nn.BatchNorm1d(1, affine=False, eps=1e-12)

        def forward(self, x):
            return self.norm(self.factor.abs() * x)

    scale, x = Scale(), 1 + torch.randn(64, 1)
    scale.train()(x)
    y = torch.where(x[:, 0] > x.mean(), 1.0, -1.0)
    for mode, changes in (("eval", True), ("recalibrate", False), ("batch", False)):
        profile = measure(scale, (x, y), [0.5], batch_norm=mode, noise="pass", max_passes=8, batch_size=64)
        assert (profile.samples != 0).any() == changes, mode


def test_statistics_over_examples_need_shared_noise():
    model, data = normalised()
    with pytest.raises(ValueError, match='use noise="batch"'):
        measure(model, data, noise="example", batch_norm="batch")


def test_parameters_are_chosen_and_stored():
    model, data = normalised()
    nothing = measure(model, data, [0.5], parameters="3.bias")
    everything = measure(model, data, [0.5])
    assert nothing.mean[0] < everything.mean[0]
    assert nothing.conventions["parameters"] == "3.bias" and nothing.conventions["perturbed"] == 3


# ---- what it leaves behind


class Odd(nn.Module):
    """Buffers of all kinds, tied and frozen parameters, dropout, a counter that a forward pass changes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("nothing", None)
        self.second.bias.requires_grad_(False)
        self.fail = None
        Odd.times = 0  # a count of its own would be put back before every call

    def forward(self, x):
        self.calls += 1
        Odd.times += 1
        if self.fail is not None and Odd.times > 11:
            raise self.fail
        return self.second(self.drop(self.norm(self.first(x)))) * self.mask


def snapshot(model):
    return (
        {name: (p, p.data_ptr(), p.detach().clone(), p.requires_grad, p.grad) for name, p in model.named_parameters()},
        {name: (b, b.clone()) for name, b in model.named_buffers()},
        [module.training for module in model.modules()],
        [getattr(module, "track_running_stats", None) for module in model.modules()],
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),  # noqa: NPY002
        random.getstate(),
    )


def assert_unchanged(model, before):
    after = snapshot(model)
    for name, (p, pointer, value, flag, grad) in before[0].items():
        q = after[0][name]
        assert q[0] is p and q[1] == pointer and torch.equal(q[2], value) and q[3] == flag and q[4] is grad
    for name, (buffer, value) in before[1].items():
        assert after[1][name][0] is buffer and torch.equal(after[1][name][1], value), name
    assert after[2] == before[2] and after[3] == before[3]
    assert torch.equal(after[4], before[4]) and (after[5] == before[5]).all() and after[6] == before[6]


@pytest.mark.parametrize(
    "options",
    [
        {"noise": "batch"},
        {"noise": "example"},
        {"noise": "pass", "max_passes": 2},
        {"batch_norm": "batch"},
        {"batch_norm": "recalibrate"},
    ],
    ids=str,
)
@pytest.mark.parametrize("fail", [None, RuntimeError("boom"), KeyboardInterrupt()], ids=["done", "exception", "Ctrl-C"])
def test_everything_is_as_before(options, fail):
    torch.manual_seed(0)
    model = Odd()
    model.norm.train()
    model.drop.eval()
    data = torch.randn(64, 4), torch.randint(4, (64,))
    model.fail = fail
    before = snapshot(model)
    if fail is None:
        profile = measure(model, data, **options)
        assert profile.conventions["perturbed"] == 16 + 4 + 4 + 8  # tied weights once, frozen ones too, no buffers
    else:
        with pytest.raises(type(fail)):
            measure(model, data, batch_size=16, **options)
    assert_unchanged(model, before)


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    model, data, exact, _ = linear_classifier()
    calls = 0

    def metric(outputs, targets):
        nonlocal calls
        calls += 1
        if calls > 150:
            raise KeyboardInterrupt
        return (outputs[:, 0] * targets <= 0).float()

    with pytest.raises(Interrupted) as caught:
        measure(model, data, metric=metric, max_passes=1000)
    profile = caught.value.profile
    assert not profile.complete and (profile.evaluations > 0).all()
    assert (np.abs(profile.mean - exact) < 5 * profile.stderr).all()
    profile.save(tmp_path / "partial.json")
    assert not LocalEnergy.load(tmp_path / "partial.json").complete


# ---- data of all kinds


def test_data_of_all_kinds_give_the_same_answer():
    model, (x, y), exact, _ = linear_classifier()
    kinds = {
        "tensors": (x, y),
        "dataset": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True),
        "list": [(x[i : i + 20], y[i : i + 20]) for i in range(0, 200, 20)],
    }
    for name, data in kinds.items():
        profile = measure(model, data, max_passes=30)
        assert (np.abs(profile.mean - exact) < 4.5 * profile.stderr).all(), name
        assert profile.evaluations.tolist() == [6000] * 3 and profile.conventions["examples"] == 200


def test_a_stream_is_measured_once_through():
    model, (x, y), exact, _ = linear_classifier()
    profile = measure(model, ((x[i : i + 10], y[i : i + 10]) for i in range(0, 200, 10)))
    assert (profile.passes == 1).all() and (np.abs(profile.mean - exact) < 4.5 * profile.stderr).all()
    with pytest.raises(ValueError, match="only once"):
        measure(model, iter([(x, y)]), max_passes=2)


def test_dictionaries_with_a_forward_of_ones_own():
    model, (x, y), exact, _ = linear_classifier()

    def forward(network, batch):
        return network(batch["pixels"]), batch["label"]

    for noise in KINDS:
        profile = measure(model, {"pixels": x, "label": y}, forward=forward, noise=noise, max_passes=40)
        assert (np.abs(profile.mean - exact) < 4.5 * profile.stderr).all()
    with pytest.raises(TypeError, match="give forward="):
        measure(model, [{"pixels": x, "label": y}])
    with pytest.raises(TypeError, match=r"must return \(outputs, targets\)"):
        measure(model, {"pixels": x}, forward=lambda network, batch: network(batch["pixels"]))


def test_augmentation_is_the_same_for_the_baseline():
    """With sigma -> 0 the difference vanishes although every pass has other inputs."""
    model, data, _, _ = linear_classifier()

    def augment(inputs):
        return inputs + 2 * torch.randn(inputs.shape)

    profile = measure(model, data, [1e-7], augment=augment, metric=square, max_passes=3)
    assert abs(profile.mean[0]) < 1e-4 * profile.baseline and profile.conventions["augmented"]
    assert profile.baseline > 1.5 * measure(model, data, [1e-7], metric=square).baseline


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "antithetic"}, 'noise must be "auto", "batch"'),
        ({"batch_norm": "train"}, 'batch_norm must be "eval"'),
        ({"metric": "accuracy"}, 'metric must be "error"'),
        ({"target_stderr": 0.0}, "target_stderr must be positive"),
        ({"max_passes": 0}, "max_passes must be a finite number > 0"),
        ({"noise": "pass", "max_passes": 1}, "one perturbation has no error bar"),
        ({"metric": lambda outputs, targets: outputs[:3]}, "one number for each of the"),
    ],
)
def test_bad_arguments_are_named(options, message):
    model, data, _, _ = linear_classifier()
    with pytest.raises(ValueError, match=message):
        measure(model, data, **options)


def test_bad_sigmas():
    model, data, _, _ = linear_classifier()
    for sigmas in ([], [-0.1], [float("nan")]):
        with pytest.raises(ValueError, match=r"sigmas must (be|have)"):
            measure(model, data, sigmas)


def test_a_metric_of_one_number_a_batch():
    model, data, _, _ = linear_classifier()
    whole = measure(model, data, metric=lambda outputs, targets: square(outputs, targets).mean(), max_passes=2)
    single = measure(model, data, metric=square, noise="batch", max_passes=2)
    assert whole.mean == pytest.approx(single.mean, rel=1e-5)


def test_a_metric_of_one_number_a_batch_has_honest_error_bars_with_example_noise():
    """Several passes are evaluated at once where the metric tells examples apart, and only there.

    Over many seeds the stated error bars have the size of the actual spread, and the intervals cover the exact value.
    """
    model, (x, y), _, _ = linear_classifier(n=64)
    w = model.weight.detach()[0]
    exact = np.array([sigma**2 * float(((x**2) @ (w**2)).mean()) for sigma in SIGMAS])
    options = {"noise": "example", "max_passes": 4, "batch_size": 16}
    found = [
        measure(model, (x, y), metric=lambda outputs, targets: square(outputs, targets).mean(), seed=seed, **options)
        for seed in range(120)
    ]
    spread = np.std([profile.mean for profile in found], 0, ddof=1)
    stated = np.sqrt(np.mean([profile.stderr**2 for profile in found], 0))
    assert stated == pytest.approx(spread, rel=0.2)  # the spread of 120 numbers is known to 6.5%
    intervals = np.stack([profile.interval(0.95) for profile in found])
    cover = (intervals[..., 0] <= exact) & (exact <= intervals[..., 1])
    assert 0.9 <= cover.mean() <= 0.99
    assert (np.abs(np.mean([profile.mean for profile in found], 0) - exact) < 4 * spread / math.sqrt(120)).all()


def test_an_overflow_is_infinite_and_not_left_out():
    model, data, _, _ = linear_classifier(n=64)

    def sometimes(outputs, targets):
        return torch.where(outputs[:, 0].abs() > 8, math.nan, outputs[:, 0] ** 2)

    profile = measure(model, data, [0.01, 5.0], metric=sometimes)
    assert profile.mean[1] == math.inf


# ---- several processes


def test_two_processes_give_the_result_of_one(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        from torch.utils.data.distributed import DistributedSampler
        from wideflat import local_energy
        rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        torch.set_num_threads(1)
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        g = torch.Generator().manual_seed(0)
        x = torch.randn(200, 6, generator=g)
        y = (x[:, 0] > 0).long()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        loader = DataLoader(TensorDataset(x, y), batch_size=25)
        for name, data, options in (
            ("batch", (x, y), {"max_passes": 3}),
            ("target", (x, y), {"target_stderr": 0.02}),
            ("pass", (x, y), {"noise": "pass", "max_passes": 5}),
            ("loader", loader, {"max_passes": 2}),
        ):
            profile = local_energy(model, data, [0.3, 0.6], progress=False, **options)
            profile.save(f"{folder}/{name}-{world}-{rank}.json")
        if world > 1:
            sharded = DataLoader(TensorDataset(x, y), batch_size=25, sampler=DistributedSampler(x))
            profile = local_energy(model, sharded, [0.3], progress=False, max_passes=2)
            assert profile.conventions["examples"] == 200 and (profile.evaluations == 400).all(), profile
            dist.destroy_process_group()
        """)
    )

    def start(rank, world):
        return subprocess.Popen([sys.executable, "-W", "error", str(script), str(rank), str(world), str(tmp_path)])

    for world in (1, 2):
        processes = [start(rank, world) for rank in range(world)]
        assert [process.wait(120) for process in processes] == [0] * world
    for name in ("batch", "target", "pass", "loader"):
        alone, first, second = (
            LocalEnergy.load(Path(tmp_path) / f"{name}-{part}.json") for part in ("1-0", "2-0", "2-1")
        )
        assert first.mean.tolist() == second.mean.tolist()
        assert first.mean == pytest.approx(alone.mean, abs=1e-12), name
        assert first.stderr == pytest.approx(alone.stderr, abs=1e-12), name
        assert first.baseline == pytest.approx(alone.baseline)


@pytest.mark.parametrize("noise", ["batch", "example"])
def test_error_bars_of_answers_at_every_position_are_as_long_as_the_spread(noise):
    """One more wrong token of 8 x 64 is one in 512, not one in 8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12))
    x = torch.randint(12, (8, 64))
    y = model(x).argmax(-1)
    options = {"noise": noise, "batch_size": 2, "progress": False}
    truth = local_energy(model, (x, y), [0.1], max_passes=400, seed=999, **options).mean
    found = [local_energy(model, (x, y), [0.1], max_passes=6, seed=seed, **options) for seed in range(30)]
    z = [float(one.mean[0] - truth[0]) / one.stderr[0] for one in found]
    assert 0.7 < math.sqrt(sum(value**2 for value in z) / len(z)) < 1.5
