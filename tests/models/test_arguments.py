"""What the functions that make networks ask of their arguments, by name, whichever network it is."""

import inspect

import pytest
from architectures import build

from wideflat import models
from wideflat.models.arguments import CHECKS


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("resnet18", {"num_classes": 0}, ValueError, "num_classes must be a whole number >= 1"),
        ("densenet121", {"num_classes": 2.5}, TypeError, "num_classes must be a whole number >= 1, got 2.5"),
        ("vgg3x512", {"in_channels": 10**5}, ValueError, "in_channels must be"),
        ("vgg3x512", {"dropout": 1.5}, ValueError, "dropout must be"),
        ("vgg3x512", {"widths": 4}, TypeError, "widths must be a sequence of whole numbers >= 1, got 4"),
        ("vgg3x512", {"widths": (4, 0, 4)}, ValueError, "widths must be a whole number >= 1"),
        ("pyramidnet272", {"alpha": "200"}, TypeError, "alpha must be"),
        ("resnet110", {"option": "C"}, ValueError, "option must be"),
        ("smallconvnet", {"image_size": None}, TypeError, "image_size must be"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(name, arguments, error, message):
    with pytest.raises(error, match=message):
        build(name, **arguments)


@pytest.mark.parametrize("name", [name for name, make in vars(models).items() if hasattr(make, "__wrapped__")])
def test_every_argument_of_every_network_is_asked_for(name):
    assert set(inspect.signature(getattr(models, name)).parameters) <= set(CHECKS)
