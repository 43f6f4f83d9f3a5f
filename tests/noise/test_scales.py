"""What the noise is proportional to: the same definition in every measure, against closed forms and symmetries."""

import numpy as np
import pytest
import torch
from torch import nn

import wideflat
from wideflat import LocalEnergy, layer_profiles, local_energy
from wideflat.hessian.curvature import curvature
from wideflat.landscape.worst_case import worst_case
from wideflat.noise.scales import WORDS, NothingMoves, Scales

SIGMAS = [0.2, 0.6]
GIVEN = {"weight": torch.rand(2, 12, generator=torch.Generator().manual_seed(5)) + 0.1}


def naive(weight, scale):
    """The a of a matrix or of the weight of a convolution, number by number."""
    out = torch.empty_like(weight)
    for index in np.ndindex(*weight.shape):
        rows = {"relative": weight[index], "absolute": torch.ones(1), "layer": weight, "filter": weight[index[0]]}
        out[index] = (rows[scale] ** 2).mean().sqrt()
    return out


def linear_classifier(scale, n=200, inputs=12):
    """Two outputs: wrong with the probability Phi(-(w_y - w_o) x / (sigma sqrt(sum (a_y^2 + a_o^2) x^2)))."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(n, inputs, generator=g), torch.randn(2, inputs, generator=g)
    w[1] *= 3
    model = nn.Linear(inputs, 2, bias=False)
    model.weight.data.copy_(w)
    y = ((x @ (w[1] - w[0]) + 2 * torch.randn(n, generator=g)) > 0).long()
    a = scale["weight"] if isinstance(scale, dict) else naive(w, scale)
    field = (x.double() @ (w[1] - w[0]).double()) * (2 * y - 1)
    spread = ((x**2).double() @ (a**2).sum(0).double()).sqrt()
    wrong = (field <= 0).double().mean()
    exact = [float(torch.special.ndtr(-field / (sigma * spread)).mean() - wrong) for sigma in SIGMAS]
    return model, (x, y), np.array(exact)


def small(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    return model, (torch.randn(60, 5), torch.randint(3, (60,)))


# ---- the definition


@pytest.mark.parametrize("scale", WORDS)
def test_each_scale_is_its_definition(scale):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(4, 5))
    found = Scales(model, ["0.weight", "1.weight", "1.bias"], scale)
    assert found.size == 24 + 20 + 5 and found.unmoved == 0 and found.name == scale
    for name in ("0.weight", "1.weight"):
        torch.testing.assert_close(found.values[name].abs(), naive(model.get_parameter(name).detach(), scale))
    bias = model[1].bias.detach()
    expected = {"absolute": torch.ones(5), "layer": bias.square().mean().sqrt().expand(5)}.get(scale, bias.abs())
    torch.testing.assert_close(found.values["1.bias"].abs(), expected)


def test_the_channel_of_a_transposed_convolution_is_on_its_second_axis():
    torch.manual_seed(2)
    model = nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False)  # weight (4, 3, 3)
    found = Scales(model, ["weight"], "filter").values["weight"]
    for group in range(2):
        for channel in range(3):
            rows = model.weight[2 * group : 2 * group + 2, channel]  # what output 3 group + channel is computed with
            expected = rows.square().mean().sqrt()
            torch.testing.assert_close(found[2 * group : 2 * group + 2, channel], expected.expand(2, 3))


def test_half_precision_does_not_overflow():
    model = nn.Linear(3, 2, bias=False).half()
    model.weight.data.fill_(1000.0)
    for scale in ("layer", "filter"):
        value = Scales(model, ["weight"], scale).values["weight"]
        assert value.dtype == torch.float16 and (value == 1000).all()


def test_what_is_given_is_checked_and_told_apart():
    model = nn.Linear(3, 2)
    one, two = ({"weight": torch.full((3,), factor), "bias": torch.ones(())} for factor in (1.0, 2.0))
    names = ["weight", "bias"]
    assert Scales(model, names, one).name != Scales(model, names, two).name
    assert Scales(model, names, one).values["weight"].shape == (2, 3)
    for wrong, message in (
        ({"weight": torch.ones(2, 3)}, "no tensor for bias"),
        ({**one, "weight": torch.ones(5)}, r"shape \(5,\), which does not fit \(2, 3\)"),
        ({**one, "bias": -torch.ones(2)}, "finite and not negative"),
        ("relativ", 'scale must be "relative", "absolute", "layer", "filter" or a tensor for each name'),
        (3, "or a tensor for each name, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            Scales(model, names, wrong)


# ---- closed forms


@pytest.mark.parametrize("noise", ["batch", "example", "pass"])
@pytest.mark.parametrize("scale", [*WORDS, GIVEN], ids=[*WORDS, "given"])
def test_a_linear_classifier_has_its_exact_error(scale, noise):
    model, data, exact = linear_classifier(scale)
    profile = local_energy(model, data, SIGMAS, noise=noise, scale=scale, max_passes=60, progress=False)
    assert (np.abs(profile.mean - exact) < 4.5 * profile.stderr).all()
    assert (profile.stderr < 0.02).all()


@pytest.mark.parametrize("scale", [*WORDS, GIVEN], ids=[*WORDS, "given"])
def test_worst_case_and_curvature_of_a_quadratic(scale):
    """L = (1/2) sum h (w - 1)^2: the step of length sigma sqrt(D) along a g, and the eigenvalues a^2 h."""
    torch.manual_seed(3)
    model = nn.Linear(12, 2, bias=False).double()
    h = torch.rand(2, 12, dtype=torch.float64) + 0.5

    def loss(outputs, targets):
        return 0.5 * (h * (model.weight - 1) ** 2).sum().expand(len(outputs))

    data = torch.zeros(4, 12, dtype=torch.float64), torch.zeros(4)
    w = model.weight.detach()
    a = scale["weight"].double() if isinstance(scale, dict) else naive(w, scale)
    options = {"metric": loss, "scale": scale, "progress": False}
    delta = a * h * (w - 1)
    delta *= 0.1 * 24**0.5 / delta.norm()
    expected = 0.5 * (h * (w + a * delta - 1) ** 2).sum() - 0.5 * (h * (w - 1) ** 2).sum()
    worst = worst_case(model, data, [0.1], objective=loss, **options)
    assert worst.mean[0] == pytest.approx(float(expected))
    bent = curvature(model, data, top=3, probes=24, tolerance=1e-9, **options)
    assert bent.eigenvalues == pytest.approx(np.sort((a**2 * h).flatten().numpy())[::-1][:3])
    assert bent.local_energy([0.3]).mean[0] == pytest.approx(0.045 * float((a**2 * h).sum()))
    assert worst.conventions["scale"] == bent.conventions["scale"] == Scales(model, ["weight"], scale).name


# ---- symmetries


def rescaled(model, factors):
    """The same function: hidden units (with their biases) times c, what they go into divided by c."""
    other = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other[0].weight.mul_(factors[:, None])
        other[0].bias.mul_(factors)
        other[2].weight.div_(factors)
    return other


@pytest.mark.parametrize("noise", ["batch", "example", "pass"])
@pytest.mark.parametrize("scale", WORDS)
def test_a_rescaled_layer_is_as_flat_unless_noise_is_absolute(scale, noise):
    """With c a power of two every product is the same to the bit."""
    model, data = small()
    options = {"noise": noise, "metric": "loss", "scale": scale, "max_passes": 2, "progress": False}
    one = local_energy(model, data, SIGMAS, **options)
    two = local_energy(rescaled(model, torch.full((7,), 4.0)), data, SIGMAS, **options)
    assert one.baseline == pytest.approx(two.baseline)
    if scale == "absolute":
        assert not np.allclose(one.mean, two.mean, rtol=0.1)
    else:
        assert one.mean == pytest.approx(two.mean, rel=1e-6)


@pytest.mark.parametrize("scale", WORDS)
def test_rescaled_units_are_as_flat_under_relative_noise_alone(scale):
    model, data = small()
    other = rescaled(model, 2.0 ** torch.tensor([0, 1, -1, 2, -3, 4, 0]))
    options = {"noise": "pass", "metric": "loss", "scale": scale, "max_passes": 3, "progress": False}
    one, two = (local_energy(network, data, SIGMAS, **options) for network in (model, other))
    assert np.allclose(one.mean, two.mean, rtol=1e-5) == (scale == "relative")


# ---- one definition for all measures, on every path


@pytest.mark.parametrize("scale", ["absolute", "layer", "filter"])
def test_every_path_has_the_noise_of_a_loop(scale):
    """Folded batch norm, first layer, Flipout, affine noise: a loop over perturbations agrees with all of them."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 2)
    ).eval()
    model[1].weight.data.uniform_(0.5, 2.0)
    x, y = torch.randn(40, 1, 4, 4), torch.randint(2, (40,))
    loss = nn.functional.cross_entropy
    scales = Scales(model, [name for name, _ in model.named_parameters()], scale)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    values = []
    with torch.no_grad():
        base = float(loss(model(x), y))
        for _ in range(400):
            for name, p in model.named_parameters():
                p.copy_(before[name] + 0.1 * scales.values[name] * torch.randn_like(p))
            values.append(float(loss(model(x), y)) - base)
        for name, p in model.named_parameters():
            p.copy_(before[name])
    for noise in ("batch", "example", "pass"):
        passes = 100 if noise == "pass" else 20
        found = local_energy(model, (x, y), [0.1], noise=noise, metric="loss", scale=scale, max_passes=passes,
                             progress=False)  # fmt: skip
        assert not any("plain path" in note for note in found.conventions.get("notes", []))
        assert abs(found.mean[0] - np.mean(values)) < 4 * np.hypot(found.stderr[0], np.std(values) / 20)


def test_the_free_entropy_has_the_same_scales():
    model, data = small()
    volume = wideflat.free_entropy(model, data, [0.01], scale="filter", chains=2, samples=10, progress=False)
    assert volume.conventions["scale"] == "filter"


# ---- what cannot move, and what can be compared


def test_weights_that_cannot_move_are_counted_and_said():
    model, data = small()
    with torch.no_grad():
        model[0].bias.zero_()
    profile = local_energy(model, data, [0.1], progress=False)
    assert profile.conventions["unmoved"] == 7
    assert "7 of 66 weights cannot move" in str(profile)
    assert local_energy(model, data, [0.1], scale="absolute", progress=False).conventions["unmoved"] == 0
    assert worst_case(model, data, [0.1], progress=False).conventions["unmoved"] == 7


def test_nothing_that_moves_is_an_error_that_names_the_other_scales():
    model, data = small()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.zero_()
    for measure in (local_energy, worst_case):
        with pytest.raises(NothingMoves, match=r'none of the 21 .*"absolute", "layer", "filter"'):
            measure(model, data, [0.1], parameters="2.weight", progress=False)
    with pytest.raises(NothingMoves):
        curvature(model, data, parameters="2.weight", progress=False)
    with pytest.raises(NothingMoves):
        wideflat.free_entropy(model, data, [0.1], parameters="2.weight", progress=False)
    with pytest.warns(UserWarning, match="no profile of 2: none of the 24 chosen weights moves"):
        assert list(layer_profiles(model, data, [0.1], progress=False)) == ["0"]
    assert list(layer_profiles(model, data, [0.1], scale="absolute", progress=False)) == ["0", "2"]


def test_profiles_of_different_scales_are_not_compared_and_old_ones_are_relative():
    model, data = small()
    relative, absolute = (local_energy(model, data, [0.1], scale=s, progress=False) for s in ("relative", "absolute"))
    with pytest.raises(ValueError, match="scale is 'relative' for one and 'absolute' for the other"):
        relative.compare(absolute)
    assert "scale: absolute" in absolute.about() and "scale" not in relative.about()
    content = relative.to_dict()
    del content["conventions"]["scale"]
    old = LocalEnergy.from_dict(content)
    assert relative.compare(old).mean.tolist() == [0.0]
    with pytest.raises(ValueError, match="scale is 'absolute'"):
        absolute.compare(old)


def test_relative_noise_is_what_it_was_before_there_were_scales():
    """Numbers of commit 6b5adc0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(60, 6), torch.randint(3, (60,))
    before = {
        "batch": [0.008903246786859302, 0.04027992801533806],
        "example": [0.0038071259856224055, 0.018549943880902392],
        "pass": [-0.00934106525447631, -0.014903634952174283],
    }
    for noise, expected in before.items():
        profile = local_energy(model, (x, y), [0.2, 0.5], noise=noise, metric="loss", max_passes=3, progress=False)
        assert profile.mean == pytest.approx(expected, rel=1e-4)  # another processor rounds otherwise
