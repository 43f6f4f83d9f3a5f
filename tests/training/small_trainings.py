"""Small images and small trainings, for the tests of this folder."""

import dataclasses

import torch

from wideflat.data import ImageData, ImageSplit
from wideflat.presets import preset
from wideflat.training import Training

#: What tests do not want to see.
QUIET = {"tensorboard": False, "progress": False}


def images(count=64, size=32, classes=10, test=32, seed=0):
    """Images whose brightness tells the class, in noise."""
    generator = torch.Generator().manual_seed(seed)

    def part(n):
        targets = torch.randint(classes, (n,), generator=generator)
        noise = torch.randint(100, (n, size, size, 3), generator=generator)
        pixels = (noise + (150 * targets // classes).view(n, 1, 1, 1)).to(torch.uint8).permute(0, 3, 1, 2)
        return ImageSplit(pixels, targets)

    return ImageData.of("generated", tuple(map(str, range(classes))), part(count), part(test))


def small(algorithm, **changes):
    """SmallConvNet on 16x16 images: 58 thousand weights."""
    cell = dataclasses.replace(preset("cifar10-smallconvnet", algorithm), image_size=16, batch_size=16)
    epochs = changes.pop("epochs", 2)
    return dataclasses.replace(cell, **changes).with_epochs(epochs)


def trained(experiment, data, **more):
    training = Training(experiment, data, **more)
    while training.step < training.total_steps:
        training.iterate()
    return training


def vector(network):
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()])
