"""Eigenvalues and trace of the Hessian."""

import numpy as np
import pytest
import torch
from attention import Attention
from torch import nn

from wideflat import local_energy
from wideflat.evaluation.blocks import Blocks
from wideflat.evaluation.evaluation import Evaluation
from wideflat.hessian.curvature import Curvature, curvature
from wideflat.hessian.products import Hessian


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
    plain = curvature(model, data, top=0, probes=2, scale="absolute", progress=False).local_energy(sigmas)
    with pytest.raises(ValueError, match="scale is 'absolute' for one and 'relative' for the other"):
        plain.compare(measured)


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
        ({"top": 1.5}, "top must be a whole number >= 0, got 1.5"),
        ({"probes": -1}, "probes must be a whole number"),
        ({"max_iterations": 0}, "max_iterations must be a whole number >= 1"),
        ({"metric": lambda outputs, targets: (outputs.argmax(1) != targets).double()}, "has no gradient"),
    ],
)
def test_bad_arguments_are_named(options, message):
    model, data = small()
    with pytest.raises((TypeError, ValueError), match=message):
        curvature(model, data, progress=False, **options)


# ---- every kind of layer, against differences of the gradient


class Encoder(nn.Module):
    """A transformer's layer over four positions, each of them classified."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.1, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.layer(x))


def between(*layers, width=4):
    return nn.Sequential(nn.Linear(4, width), *layers, nn.Linear(width, 3))


NETWORKS = {
    "LayerNorm": lambda: between(nn.LayerNorm(4), nn.Tanh()),
    "RMSNorm": lambda: between(nn.RMSNorm(4), nn.Tanh()),
    "InstanceNorm": lambda: between(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten(), width=6),
    "GroupNorm": lambda: between(nn.GroupNorm(2, 8), nn.Tanh(), width=8),
    "SiLU": lambda: between(nn.SiLU()),
    "Mish": lambda: between(nn.Mish()),
    "GELU": lambda: between(nn.GELU()),
    "Conv1d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.SiLU(), nn.Flatten(), nn.Linear(4, 3)
    ),
    "MultiheadAttention": Attention,
    "TransformerEncoderLayer": Encoder,
}


def gradient(model, data):
    """The gradient of the mean cross-entropy, positions counted alike, as one vector."""
    outputs = model(data[0])
    loss = nn.functional.cross_entropy(outputs.reshape(-1, 3), data[1].reshape(-1))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def by_differences(model, data, step=1e-5):
    """The Hessian by central differences of the gradient, one weight after the other."""
    columns = []
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        for i in range(len(flat)):
            value = float(flat[i])
            flat[i] = value + step
            above = gradient(model, data)
            flat[i] = value - step
            columns.append((above - gradient(model, data)) / (2 * step))
            flat[i] = value
    hessian = torch.stack(columns, 1)
    return (hessian + hessian.T) / 2


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_layer_against_differences_of_the_gradient(name):
    torch.manual_seed(0)
    model = NETWORKS[name]().double().eval()
    attends = name in ("MultiheadAttention", "TransformerEncoderLayer")
    x = torch.randn(12, 4, 4) if attends else torch.randn(12, 4)
    data = x.double(), torch.randint(3, (12, 4) if name == "TransformerEncoderLayer" else (12,))
    expected = by_differences(model, data)
    evaluation = Evaluation(model, "loss", "eval", None)
    hessian = Hessian(evaluation, Blocks(data, 5), [name for name, _ in model.named_parameters()])
    with evaluation.prepared():
        hessian.loss()
        found = hessian(torch.eye(len(expected), dtype=torch.float64))
    assert float((found - expected).abs().max()) < 1e-7 * float(expected.abs().max())
    largest = curvature(model, data, top=1, probes=0, scale="absolute", tolerance=1e-9, progress=False)
    assert largest.eigenvalues[0] == pytest.approx(float(torch.linalg.eigvalsh(expected)[-1]), rel=1e-6)
    assert largest.conventions["meaning"].startswith("cross-entropy")


def test_targets_that_do_not_count_leave_the_mean_over_the_others():
    model, (x, y) = small()
    keep = torch.arange(40) % 3 != 0
    ours, theirs = (
        curvature(model, data, top=1, probes=10_000, batch_size=7, tolerance=1e-8, progress=False)
        for data in ((x, torch.where(keep, y, -100)), (x[keep], y[keep]))
    )
    assert ours.eigenvalues == pytest.approx(theirs.eigenvalues, rel=1e-6)
    assert ours.trace == pytest.approx(theirs.trace) and ours.baseline == pytest.approx(theirs.baseline)
    assert ours.conventions["examples"] == int(keep.sum())


def test_a_file_of_an_earlier_version(tmp_path):
    found = Curvature(np.array([2.0]), np.array([0.0]), 5.0, 0.2, 0.3, {"scale": "relative", "backend": "curvlinops"})
    found.save(tmp_path / "c.json")
    assert Curvature.load(tmp_path / "c.json").local_energy([0.1]).mean[0] == pytest.approx(0.025)


@pytest.mark.parametrize(("outputs", "last"), [(1, nn.Sigmoid()), (3, nn.Softmax(1))], ids=["sigmoid", "softmax"])
def test_the_loss_of_probabilities_has_the_curvature_of_the_loss_of_logits(outputs, last):
    torch.manual_seed(0)
    logits = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    data = torch.randn(40, 4, dtype=torch.float64), torch.randint(max(outputs, 2), (40,))
    ours, theirs = (
        curvature(model, data, top=2, probes=10_000, tolerance=1e-8, progress=False)
        for model in (nn.Sequential(logits, last), logits)
    )
    assert ours.baseline == pytest.approx(theirs.baseline)
    assert ours.eigenvalues == pytest.approx(theirs.eigenvalues, rel=1e-5)
    assert ours.trace == pytest.approx(theirs.trace) and "probabilit" in ours.conventions["meaning"]
