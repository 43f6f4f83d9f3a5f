"""Averaged weights: the baseline's path, and a mean beside it that equals the one written out."""

import dataclasses

import pytest
import torch
from torch import nn

from wideflat.data import ImageData, ImageSplit
from wideflat.presets import preset
from wideflat.presets.networks import NETWORKS
from wideflat.training import Options, Training


def images(count=40):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 12, 12), dtype=torch.uint8, generator=generator)
    part = ImageSplit(pixels, torch.arange(count) % 10)
    return ImageData.of("noise", tuple("0123456789"), part, part)


def make(algorithm, **changes):
    settings = {"model": "vgg3x512", "model_arguments": (("widths", (4, 4, 4)),), "image_size": 12, "padding": 2}
    cell = dataclasses.replace(preset("cifar10-smallconvnet", algorithm), batch_size=8, **settings, **changes)
    return Training(cell.with_epochs(4), images(), Options(channels_last=False))


def flat(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()]).double()


@pytest.mark.parametrize("base", [{}, {"optimizer": "rmsprop", "nesterov": False}])
@pytest.mark.parametrize("alpha", [0.5, 0.999])
def test_the_mean_is_the_one_written_out(alpha, base):
    ema, sgd = make("ema", alpha=alpha, **base), make("sgd", **base)
    assert torch.equal(flat(ema.learner.center()), flat(sgd.learner.center()))  # before the first step
    mean = None
    for t in range(20):
        ema.iterate(), sgd.iterate()
        w = flat(sgd.learner.networks[0])
        a = min(alpha, (1 + t) / (10 + t))
        mean = w if mean is None else a * mean + (1 - a) * w
        assert torch.equal(flat(ema.learner.networks[0]), w)
        torch.testing.assert_close(flat(ema.learner.center()), mean, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(mean, w, atol=1e-4)


def test_the_center_has_batch_norm_statistics_of_its_own(monkeypatch):
    def network(num_classes, **_):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(400, num_classes))

    monkeypatch.setitem(NETWORKS, "vgg3x512", network)
    training = make("ema")
    for _ in range(10):
        training.iterate()
    refreshed, kept = training.center().state_dict(), training.learner.center().state_dict()
    assert any(not torch.allclose(refreshed[name], kept[name]) for name in kept if "running" in name)


def test_parameters_without_a_gradient_stay_as_they_are():
    training = make("ema")
    frozen = next(training.learner.networks[0].parameters()).requires_grad_(False)
    training.iterate()
    assert torch.equal(next(training.learner.center().parameters()), frozen)


def test_settings_are_marked_as_ours():
    cell = preset("cifar10-resnet18", "ema")
    assert cell.alpha == 0.999 and cell.epochs == preset("cifar10-resnet18").epochs
    assert cell.paper_error is None and {"algorithm", "alpha"} <= dict(cell.notes).keys()
