"""The form in which a network gets its inputs."""

import pytest
import torch
from torch import nn

from wideflat import local_energy
from wideflat.evaluation.evaluation import Evaluation


class Windows(nn.Module):
    """Cuts windows out of the memory of its images, as if that were in the usual order."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 1), nn.Linear(32, 3)

    def forward(self, x):
        return self.head(x.as_strided((len(x), 2, 4, 4), (72, 36, 6, 1)).flatten(1)) + self.conv(x).mean((2, 3))


class Clock(nn.Module):
    """Takes times in seconds, which single precision does not hold."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, t):
        return self.linear(torch.cat([t.sin(), t.cos()], 1).float())


def test_a_network_that_looks_at_memory_gets_its_images_in_the_usual_order():
    torch.manual_seed(0)
    model, x = Windows().eval(), torch.randn(16, 2, 6, 6)
    evaluation = Evaluation(model, "loss", "eval", None)
    with evaluation.prepared():
        outputs, _ = evaluation.outputs(evaluation.load((x, torch.zeros(16))))
        assert torch.equal(outputs, model(x))
    y = torch.randint(3, (16,))
    expected = nn.functional.cross_entropy(model(x), y).item()
    assert local_energy(model, (x, y), [0.1], metric="loss", progress=False).baseline == pytest.approx(expected)


def test_a_usual_network_gets_channels_last():
    seen = []
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 3))
    model[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].stride()))
    data = torch.randn(16, 2, 6, 6), torch.randint(3, (16,))
    local_energy(model, data, [0.1], max_passes=2, progress=False)
    assert seen[-1][1] == 1


def test_double_precision_reaches_a_network_that_takes_it():
    torch.manual_seed(0)
    model, t, y = Clock(), 1e9 + 1e3 * torch.rand(32, 1, dtype=torch.float64), torch.randint(3, (32,))
    expected = nn.functional.cross_entropy(model(t), y).item()
    assert local_energy(model, (t, y), [0.1], metric="loss", progress=False).baseline == pytest.approx(expected)


@pytest.mark.parametrize("first", [nn.Linear(6, 3), nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))])
def test_double_precision_is_rounded_for_a_network_that_does_not(first):
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    ours, theirs = (local_energy(first, (z, y), [0.1], metric="loss", progress=False) for z in (x.double(), x))
    assert ours.baseline == theirs.baseline and (ours.mean == theirs.mean).all()


def test_inside_of_autocast_the_perturbed_weights_are_seen():
    """Autocast keeps the weights that it has cast until its end: dE was 0."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(32, 6)
    data, options = (x, model(x).detach()), {"noise": "batch", "max_passes": 40, "progress": False}

    def squares(outputs, targets):
        return (outputs - targets).square().mean(1)

    outside = local_energy(model, data, [0.4], metric=squares, **options)
    with torch.autocast("cpu", torch.bfloat16):
        inside = local_energy(model, data, [0.4], metric=squares, **options)
    assert outside.mean[0] > 4 * outside.stderr[0]
    assert inside.mean[0] == pytest.approx(outside.mean[0], abs=0.3 * outside.stderr[0])  # the same noise


def test_an_exported_program_is_measured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    data = torch.randn(32, 6), torch.randint(3, (32,))
    shapes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(model, (data[0],), dynamic_shapes=shapes).module()
    ours, theirs = (
        local_energy(m, data, [0.3], metric="loss", noise="batch", progress=False) for m in (exported, model)
    )
    assert ours.mean == pytest.approx(theirs.mean, rel=1e-4)
