"""What a definite change of the weights does: against loops, with its error bars, and beside noise of equal length."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import ShiftProfile, local_energy, shift_profile
from wideflat.landscape.rounding import pruned, quantized

LOSS = nn.functional.cross_entropy


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)


def data(n=50, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)


def measure(model, pair, *arguments, **options):
    return shift_profile(model, pair, *arguments, **{"metric": "loss", "noise": False, "progress": False, **options})


def test_the_way_to_another_network_is_that_of_a_loop():
    model, other, (x, y) = network(0), network(1), data()
    other[1].running_mean.normal_()
    other[1].running_var.uniform_(0.5, 2)
    before = copy.deepcopy(model.state_dict())
    places = [-0.5, 0.0, 0.3, 1.0, 1.2]
    found = measure(model, (x, y), other, positions=places)
    base = LOSS(model(x), y, reduction="none")
    for t, mean, stderr in zip(places, found.mean, found.stderr, strict=True):
        there = copy.deepcopy(model)
        with torch.no_grad():
            for name, value in there.state_dict().items():
                if value.is_floating_point():
                    value.copy_(before[name] + t * (other.state_dict()[name] - before[name]))
        difference = (LOSS(there(x), y, reduction="none") - base).detach()
        assert mean == pytest.approx(float(difference.mean()), abs=1e-5)
        assert stderr == pytest.approx(float(difference.std()) / 50**0.5, abs=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    length = math.sqrt(sum(float((p - q).square().sum()) for p, q in zip(model.parameters(), other.parameters(),
                                                                         strict=True)))  # fmt: skip
    assert found.lengths == pytest.approx([abs(t) * length for t in places], rel=1e-5)
    again = measure(model, (x, y), other.state_dict(), positions=places)
    assert again.mean.tolist() == found.mean.tolist()


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_rounding_is_that_of_a_loop(per):
    model, (x, y) = network(), data()
    found = measure(model, (x, y), quantize=[8, 4, 2], per=per)
    for bits, mean in zip((8, 4, 2), found.mean, strict=True):
        there = copy.deepcopy(model)
        for layer in (there[0], there[3]):  # neither biases nor the normalisation
            layer.weight.data = quantized(layer.weight.data, bits, per)
        assert mean == pytest.approx(float(LOSS(there(x), y) - LOSS(model(x), y)), abs=1e-5)
    assert found.kind == "quantize" and found.barrier is None and (np.diff(found.lengths) > 0).all()


def test_rounding_by_channel_knows_transposed_convolutions():
    model = nn.Sequential(nn.ConvTranspose1d(2, 3, 4), nn.Flatten())
    with torch.no_grad():
        model[0].weight[:, 1] *= 20
    x = torch.randn(9, 2, 5, generator=torch.Generator().manual_seed(0))
    metric = lambda outputs, _: outputs.square().sum(1)  # noqa: E731
    found = shift_profile(
        model, (x, x), quantize=[3], per="channel", metric=metric, noise=False, progress=False, batch_size=9
    )
    other = copy.deepcopy(model)
    with torch.no_grad():
        for channel in range(3):
            other[0].weight[:, channel] = quantized(model[0].weight[:, channel], 3)
        expected = float((metric(other(x), x) - metric(model(x), x)).mean())
    assert found.mean[0] == pytest.approx(expected, rel=1e-4)


def test_pruning_is_that_of_a_loop():
    model, (x, y) = network(), data()
    found = measure(model, (x, y), prune=[0.0, 0.5, 1.0])
    for share, mean in zip((0.0, 0.5, 1.0), found.mean, strict=True):
        there = copy.deepcopy(model)
        new = pruned({"0": there[0].weight.data, "3": there[3].weight.data}, share)
        there[0].weight.data, there[3].weight.data = new["0"], new["3"]
        assert mean == pytest.approx(float(LOSS(there(x), y) - LOSS(model(x), y)), abs=1e-5)
    assert found.scaled_lengths[2] == pytest.approx(math.sqrt(8 * 4 + 8 * 3))  # delta = -w: each |delta / a| is 1


def test_noise_of_equal_length_stands_beside_it():
    model, pair = network(), data()
    found = measure(model, pair, quantize=[4, 2], noise=True, scale="filter", max_passes=3)
    alone = local_energy(model, pair, found.sigmas, metric="loss", parameters="weights", scale="filter", max_passes=3,
                         progress=False)  # fmt: skip
    assert (np.abs(found.noise_mean - alone.mean) < 5 * np.hypot(found.noise_stderr, alone.stderr)).all()
    # E |sigma a z|^2 = sigma^2 sum a^2, and the mean square of a filter is a^2
    size = math.sqrt(float(model[0].weight.square().sum() + model[3].weight.square().sum()))
    assert found.sigmas * size == pytest.approx(found.lengths, rel=1e-5)
    assert found.conventions["scale"] == "filter"


def test_a_barrier_is_the_height_over_the_chord():
    """E = (w^2 - 1)^2 from w = -1 to w = 1: the barrier is 1, at t = 1/2."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(-1.0)
    pair = torch.ones(6, 1), torch.ones(6)

    def well(outputs, targets):
        return (outputs[:, 0] ** 2 - 1) ** 2

    found = measure(model, pair, {"weight": torch.ones(1, 1)}, metric=well)
    assert found.barrier == pytest.approx(1.0) and found.barrier_interval == pytest.approx((1.0, 1.0))
    same = measure(model, pair, model, metric=well)
    assert same.barrier == 0 and same.barrier_interval == (0.0, 0.0)
    assert "barrier 1.00000" in str(found)


def test_the_intervals_of_change_and_barrier_cover_over_repetitions():
    """Many data sets from one of 20,000 examples, whose own values stand for the truth."""
    model, other, (x, y) = network(2), network(3), data(20_000)
    options = {"positions": np.linspace(0, 1, 6), "batch_size": 1000}
    truth = measure(model, (x, y), other, **options)
    changes = barriers = 0
    for k in range(60):
        part = slice(100 * k, 100 * k + 100)
        found = measure(model, (x[part], y[part]), other, **options)
        changes += abs(found.mean[3] - truth.mean[3]) <= 1.984 * found.stderr[3]
        low, high = found.barrier_interval
        barriers += low <= truth.barrier <= high
    assert 52 <= changes <= 60 and barriers >= 54


def test_statistics_are_computed_anew_where_asked():
    model, other, pair = network(0), network(1), data()
    plain, anew = (measure(model, pair, other, positions=[0.5], batch_norm=kind) for kind in ("eval", "recalibrate"))
    assert plain.mean[0] != anew.mean[0] and anew.conventions["batch_norm"] == "recalibrate"


def test_save_load_print_and_plot(tmp_path):
    found = measure(network(0), data(), network(1), positions=[0.0, 0.5, 1.0])
    found.scaled_lengths[1] = math.inf
    found.save(tmp_path / "shift.json")
    again = ShiftProfile.load(tmp_path / "shift.json")
    for name, value in vars(found).items():
        assert np.array_equal(np.asarray(value), np.asarray(getattr(again, name)), equal_nan=name.startswith("noise_"))
    assert str(again) == str(found) and "loss of Sequential" in found.about()
    (tmp_path / "half.json").write_text('{"format": 1, "positions": [0.0]')
    with pytest.raises(ValueError, match="is not a whole shift profile"):
        ShiftProfile.load(tmp_path / "half.json")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    for kind in ({"other": network(1)}, {"quantize": [4]}, {"prune": [0.5]}):
        ax = measure(network(0), data(), **kind, noise=True).plot(label="one")
        assert ax.get_xlabel() in ("$t$", "bits", "share of weights that are 0")
        ax.figure.clf()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of other=, quantize= and prune=; got none"),
        ({"quantize": [4], "prune": [0.5]}, "got quantize and prune"),
        ({"quantize": [4.5]}, "bits must be whole numbers"),
        ({"quantize": [1]}, "bits must be whole numbers >= 2"),
        ({"prune": [2.0]}, "between 0 and 1"),
        ({"prune": [0.5], "per": "channel"}, "is for quantize=, not for prune="),
        ({"quantize": [4], "per": "channels"}, 'did you mean "channel"'),
        ({"quantize": [4], "positions": [0.5]}, "positions are for other weights"),
        ({"other": {"0.weight": torch.ones(8, 4)}}, "same network; it has no 0.bias"),
        ({"other": {**network().state_dict(), "lora": torch.ones(1)}}, "the network has no lora"),
        ({"other": {**network().state_dict(), "0.weight": torch.ones(1)}}, r"shape \(8, 4\) here and \(1,\) in other"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        measure(network(), data(), **options)
    with pytest.raises(TypeError, match="state dictionary or a network"):
        measure(network(), data(), 3)
