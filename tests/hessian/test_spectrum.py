"""The spectrum against dense matrices: eigenvalues, moments, density, and how often its intervals cover."""

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import Spectrum, layer_spectra, spectrum
from wideflat.hessian.eigenvalues import FEW
from wideflat.hessian.lanczos import Krylov


def dense(model, data, scale="absolute", names=None):
    """The scaled Hessian of the mean cross-entropy by torch's own second derivative."""
    named = {n: p.detach() for n, p in model.named_parameters() if names is None or n in names}
    shapes, flat = [p.shape for p in named.values()], torch.cat([p.flatten() for p in named.values()])

    def loss(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        weights = {n: part.view(shape) for n, part, shape in zip(named, parts, shapes, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (data[0],)), data[1])

    hessian = torch.autograd.functional.hessian(loss, flat)
    a = flat if scale == "relative" else torch.ones_like(flat)
    return (a[:, None] * hessian * a).numpy()


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x, y = torch.randn(40, 5, dtype=torch.float64), torch.randint(3, (40,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, (x, y)


@pytest.mark.parametrize("scale", ["relative", "absolute"])
def test_with_all_steps_every_eigenvalue_is_found(scale):
    model, data = trained()
    values = np.linalg.eigvalsh(dense(model, data, scale))
    found = spectrum(model, data, probes=2, steps=len(values), top=4, scale=scale, batch_size=16, progress=False)
    assert found.eigenvalues == pytest.approx(values[::-1][:4], rel=1e-6) and found.size == len(values)
    assert found.extent == pytest.approx((values[0], values[-1]), rel=1e-6)
    assert abs(found.trace - values.sum()) < 5 * found.trace_stderr
    assert found.baseline == pytest.approx(float(nn.functional.cross_entropy(model(data[0]), data[1]).detach()))


def test_layers_have_the_spectra_of_their_blocks():
    model, data = trained()
    found = layer_spectra(model, data, probes=2, steps=60, scale="absolute", progress=False)
    for layer in ("0", "2"):
        block = dense(model, data, names=[f"{layer}.weight", f"{layer}.bias"])
        values = np.linalg.eigvalsh(block)
        assert found[layer].eigenvalues[0] == pytest.approx(values[-1], rel=1e-6)
        assert found[layer].size == len(values) and found[layer].conventions["parameters"] == layer
    assert list(layer_spectra(model, data, ["2"], probes=1, steps=3, progress=False)) == ["2"]
    with pytest.raises(ValueError, match="no layer 'x'"):
        layer_spectra(model, data, ["x"], progress=False)


def test_probes_in_several_groups_are_the_same_probes(monkeypatch):
    model, data = trained()
    whole = spectrum(model, data, probes=3, steps=5, progress=False)
    monkeypatch.setattr("wideflat.hessian.spectrum.ROOM", 1)
    parts = spectrum(model, data, probes=3, steps=5, progress=False)
    assert parts.nodes == pytest.approx(whole.nodes) and parts.weights == pytest.approx(whole.weights)


def quadrature(values, probes, steps, seed):
    """The spectrum of a diagonal matrix, without a network."""
    h = torch.tensor(values, dtype=torch.float64)
    starts = torch.randn(len(h), probes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    iteration = Krylov(starts, steps)
    while not iteration.ended:
        iteration.take(h[:, None] * iteration.columns)
    rules = iteration.rules()
    wide = max(len(rule.nodes) for rule in rules)
    nodes, weights = (
        np.stack([np.pad(getattr(rule, name), (0, wide - len(rule.nodes))) for rule in rules])
        for name in ("nodes", "weights")
    )
    top = min(rules, key=lambda rule: rule.residuals[-1])
    return Spectrum(nodes, weights, top.nodes[-1:], top.residuals[-1:], len(h), 0.0)


def coverage(repetitions, probes=4):
    """How often the interval of the density holds the exact one: in the bulk, at its edge, at two outliers."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, 0.3, 300), [3.0, 5.0]])
    points, width = np.array([-0.3, 0.0, 0.3, 0.8, 3.0, 5.0]), 0.2
    exact = np.exp(-0.5 * ((points[:, None] - values) / width) ** 2).mean(1) / (width * np.sqrt(2 * np.pi))
    hits, deviations = [], []
    for seed in range(repetitions):
        found = quadrature(values, probes, 40, seed)
        density = found.density(points, width)
        hits.append((density.lower <= exact) & (exact <= density.upper))
        deviations.append((found.trace - values.sum()) / found.trace_stderr)
    return np.mean(hits, axis=0), np.std(deviations)


def test_the_intervals_of_the_density_cover():
    covered, spread = coverage(150)
    assert (covered > 0.88).all() and covered.mean() > 0.92 and spread == pytest.approx(1, abs=0.2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("probes", [2, 4, 16])
def test_the_intervals_of_the_density_cover_over_many_repetitions(probes):
    covered, spread = coverage(2000, probes)
    print(probes, covered.round(4), round(spread, 3))
    meant = 1 - 0.05 * probes / (probes + FEW)  # few probes do not know their own spread
    assert (np.abs(covered - meant) < 0.015).all() and spread == pytest.approx(1, abs=0.06)


def test_a_vector_whose_space_is_used_up_ends():
    found = quadrature([2.0, 2.0, 2.0, 5.0], 3, 4, 0)
    assert found.extent == pytest.approx((2.0, 5.0)) and found.weights.sum(1) == pytest.approx(np.ones(3))
    assert found.trace == pytest.approx(11, abs=5 * found.trace_stderr)


def test_joined_probes_are_those_of_both():
    model, data = trained()
    a, b = (spectrum(model, data, probes=2, steps=6, seed=seed, progress=False) for seed in (0, 1))
    both = a.joined(b)
    assert len(both.nodes) == 4 and both.trace == pytest.approx((a.trace + b.trace) / 2)
    assert both.trace_stderr < max(a.trace_stderr, b.trace_stderr) and both.conventions["probes"] == 4
    with pytest.raises(ValueError, match="same seed"):
        a.joined(a)
    with pytest.raises(ValueError, match="conventions differ"):
        a.joined(spectrum(model, data, probes=2, steps=6, seed=1, scale="absolute", progress=False))


def test_save_load_print_and_plot(tmp_path):
    model, data = trained()
    found = spectrum(model, data, matrix="ggn", probes=2, steps=6, progress=False)
    found.save(tmp_path / "s.json")
    again = Spectrum.load(tmp_path / "s.json")
    assert str(again) == str(found) and "Gauss-Newton matrix of the loss" in str(found)
    assert found.extent[0] > -1e-9  # the Gauss-Newton matrix of a convex loss is not negative
    assert found.plot(label="x").get_yscale() == "log"
    (tmp_path / "s.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="not a whole spectrum"):
        Spectrum.load(tmp_path / "s.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matrix": "fisher"}, "matrix must be"),
        ({"probes": 0}, "probes must be a whole number >= 1"),
        ({"steps": 0}, "steps must be"),
        ({"metric": "error"}, "step function"),
        ({"batch_norm": "recalibrate"}, "batch_norm must be"),
    ],
)
def test_bad_input(options, message):
    model, data = trained()
    with pytest.raises(ValueError, match=message):
        spectrum(model, data, progress=False, **options)


def test_a_width_must_be_positive():
    with pytest.raises(ValueError, match="width must be a finite number > 0"):
        quadrature([1.0, 2.0], 1, 2, 0).density(width=0.0)
