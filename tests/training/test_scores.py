"""Errors and losses of networks and of their ensemble, in the mode of evaluation."""

import math

import pytest
import torch
from torch import nn

from wideflat.training.scores import evaluate


class Fixed(nn.Module):
    """Answers with the columns of its input that are its own; in training mode with noise."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def forward(self, x):
        return torch.randn(len(x), 2) if self.training else x[:, self.columns]


def test_the_ensemble_adds_probabilities_and_not_answers():
    """Two networks that are weakly wrong are outvoted by one that is surely right."""
    logits = torch.tensor([[0.0, 0.1, 0.0, 0.1, 9.0, 0.0]] * 3 + [[5.0, 0.0] * 3])
    y = torch.tensor([0, 0, 0, 1])
    networks = [Fixed(slice(2 * k, 2 * k + 2)).train(k == 1) for k in range(3)]
    found = evaluate(networks, iter([(logits[:3], y[:3]), (logits[3:], y[3:])]))
    assert found.errors == (1.0, 1.0, 0.25) and found.ensemble_error == 0.25
    expected = [nn.functional.cross_entropy(network(logits), y).item() for network in networks[::2]]
    assert [found.losses[0], found.losses[2]] == pytest.approx(expected, rel=1e-6)
    assert [network.training for network in networks] == [False, True, False]


def test_votes_of_networks_elsewhere_are_added():
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    assert evaluate([Fixed(slice(2))], iter([(x, y)])).ensemble_error == 1
    elsewhere = torch.tensor([[0.0, 1.0]])
    assert evaluate([Fixed(slice(2))], iter([(x, y)]), lambda here: here + elsewhere).ensemble_error == 0


def test_no_images_are_refused_and_the_mode_is_put_back():
    network = Fixed(slice(2)).train()
    with pytest.raises(ValueError, match="no images to evaluate on"):
        evaluate([network], iter([]))
    with pytest.raises(RuntimeError):
        evaluate([network], iter([(torch.zeros(1, 2), torch.tensor([[0]]))]))
    assert network.training


def test_losses_of_batches_are_summed_in_double_precision():
    """One image with a loss of 2^24, then 100 of log 2: in float32 the sum would stand still."""
    large, small, y = torch.tensor([[0.0, 2.0**24]]), torch.zeros(1, 2), torch.tensor([0])
    found = evaluate([Fixed(slice(2))], iter([(large, y), *[(small, y)] * 100]))
    assert 101 * found.losses[0] == pytest.approx(2.0**24 + 100 * math.log(2), abs=0.01)
