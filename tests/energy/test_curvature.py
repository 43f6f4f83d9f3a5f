"""Eigenvalues and trace of the Hessian."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import local_energy
from wideflat.energy.curvature import Curvature, curvature


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(40, 4, dtype=torch.float64)
    return model, (x, torch.randint(3, (40,)))


def dense(model, data, relative):
    """The Hessian by torch's own second derivative, as the oracle."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        named = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, named, (data[0],)), data[1])

    hessian = torch.autograd.functional.hessian(loss, flat)
    return flat[:, None] * hessian * flat if relative else hessian


@pytest.mark.parametrize("scale", ["relative", "absolute"])
def test_eigenvalues_and_trace_are_those_of_the_dense_hessian(scale):
    model, data = small()
    expected = dense(model, data, scale == "relative")
    values = torch.linalg.eigvalsh(expected).flip(0)
    found = curvature(model, data, top=4, probes=10_000, scale=scale, batch_size=7, tolerance=1e-6, progress=False)
    assert found.eigenvalues == pytest.approx(values[:4].numpy(), rel=1e-4)
    assert found.trace == pytest.approx(float(expected.trace())) and found.trace_stderr == 0
    few = [curvature(model, data, top=0, probes=20, scale=scale, seed=seed, progress=False) for seed in range(30)]
    deviations = [(c.trace - float(expected.trace())) / c.trace_stderr for c in few]
    assert np.abs(deviations).max() < 5 and np.std(deviations) == pytest.approx(1.05, abs=0.4)


def test_the_trace_predicts_the_local_energy_of_the_loss():
    model, data = small()
    found = curvature(model, data, top=0, probes=10_000, progress=False)
    sigmas = [0.05]
    measured = local_energy(model, data, sigmas, metric="loss", noise="example", max_passes=20_000, progress=False)
    predicted = found.local_energy(sigmas)
    assert predicted.mean[0] == pytest.approx(measured.mean[0], abs=4.5 * measured.stderr[0] + 0.03 * measured.mean[0])
    assert measured.stderr[0] < 0.3 * measured.mean[0]
    with pytest.raises(ValueError, match="absolute"):
        curvature(model, data, top=0, probes=2, scale="absolute", progress=False).local_energy(sigmas)


def test_selection_frozen_parameters_and_state():
    model, data = small()
    model[0].weight.requires_grad_(False)
    model.train()
    found = curvature(model, data, top=1, probes=100, parameters="0.weight", progress=False)
    assert found.conventions["perturbed"] == 20 and not model[0].weight.requires_grad and model.training
    assert model[2].weight.grad is None


def test_a_file(tmp_path):
    found = Curvature(np.array([2.0, 1.0]), np.array([0.0, 0.1]), 5.0, 0.2, 0.3, {"scale": "relative"})
    found.save(tmp_path / "c.json")
    back = Curvature.load(tmp_path / "c.json")
    assert back.eigenvalues.tolist() == [2, 1] and back.trace == 5 and back.conventions == {"scale": "relative"}
    assert "trace 5" in str(back)
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ValueError, match="not a whole curvature file"):
        Curvature.load(tmp_path / "c.json")


def test_unfinished_lanczos_says_so():
    model, data = small()
    with pytest.warns(UserWarning, match="raise max_iterations"):
        curvature(model, data, top=3, probes=0, max_iterations=4, tolerance=1e-9, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "error"}, "step function"),
        ({"top": 0, "probes": 0}, "not both 0"),
        ({"scale": "log"}, "scale must be"),
        ({"backend": "jax"}, "backend must be"),
    ],
)
def test_bad_arguments_are_named(options, message):
    model, data = small()
    with pytest.raises(ValueError, match=message):
        curvature(model, data, progress=False, **options)


@pytest.mark.skipif(importlib.util.find_spec("curvlinops") is not None, reason="curvlinops is installed")
def test_without_curvlinops_asking_for_it_says_what_to_install():
    model, data = small()
    assert curvature(model, data, top=1, probes=0, progress=False).conventions["backend"] == "torch"
    with pytest.raises(ModuleNotFoundError, match=r"wideflat\[curvature\]"):
        curvature(model, data, backend="curvlinops", progress=False)


@pytest.mark.skipif(
    importlib.util.find_spec("curvlinops") is None,
    reason="curvlinops (extra `curvature`) asks for torchvision, which has no build for the CPU torch tested here",
)
def test_curvlinops_gives_the_same():
    model, data = small()
    ours, theirs = (
        curvature(model, data, top=2, probes=10_000, backend=backend, batch_size=10, tolerance=1e-6, progress=False)
        for backend in ("torch", "curvlinops")
    )
    assert theirs.conventions["backend"] == "curvlinops"
    assert theirs.eigenvalues == pytest.approx(ours.eigenvalues, rel=1e-4)
    assert theirs.trace == pytest.approx(ours.trace)
