"""What a network does with a batch."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wideflat.evaluation.blocks import Block
from wideflat.evaluation.evaluation import Evaluation
from wideflat.evaluation.probe import observe


class Between(nn.Module):
    """Two linear layers with a function of the hidden units between them."""

    def __init__(self, function=torch.tanh, before=lambda x: x):
        super().__init__()
        self.a, self.b, self.function, self.before = nn.Linear(5, 8), nn.Linear(8, 3), function, before

    def forward(self, x):
        return self.b(self.function(self.a(self.before(x))))


def square(outputs, targets):
    return (outputs - targets).square().mean(1)


def look(model, metric=square, size=12, forward=None):
    torch.manual_seed(0)
    x = torch.randn(size, 5)
    evaluation = Evaluation(model, metric, "eval", forward)
    with evaluation.prepared():
        block = Block(0, (x, model(x.clone()).detach()), size)
        found = observe(evaluation, block, 0)
        assert torch.equal(block.batch[0], x), "the batch itself is not given to the network"
    return found


@pytest.mark.parametrize("size", [2, 3, 12])
def test_a_network_of_layers_is_independent_and_leaves_its_input_alone(size):
    found = look(Between(), size=size)
    assert (found.writes, found.random, found.examples, found.per_example) == (False, False, "independent", True)


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h - h.mean(0),
        lambda h: (h @ h.T).softmax(-1) @ h,
        lambda h: h.cumsum(0),
        lambda h: h + h.roll(1, 0),
        lambda h: h + h.flip(0),
        lambda h: torch.eye(12).roll(1, 0) @ h,  # a graph of just these examples
        lambda h: h + h.reshape(-1, 2, 8).mean(1).repeat_interleave(2, 0),
        lambda h: h if h.mean() > 0.1 else -h,
        lambda h: h * torch.arange(len(h))[:, None],
        lambda h: h - 1e-3 * h.mean(0),
    ],
)
@pytest.mark.parametrize("metric", [square, lambda outputs, targets: square(outputs, targets).mean()])
def test_examples_that_influence_each_other_are_found(function, metric):
    assert look(Between(function), metric).examples == "mixed"


def test_a_metric_that_looks_at_the_whole_batch_is_found():
    assert look(Between(), lambda outputs, targets: outputs.softmax(0)[:, 0]).examples == "mixed"
    assert look(Between(), lambda outputs, targets: square(outputs, outputs.mean(0))).examples == "mixed"


def test_one_example_does_not_decide():
    assert look(Between(), size=1).examples == "unknown"


def test_outputs_without_an_axis_of_examples_do_not_decide():
    model = Between()
    found = look(
        model, lambda outputs, targets: targets[:, 0], forward=lambda net, batch: (net(batch[0]).sum(), batch[1])
    )
    assert found.examples == "unknown"


def test_time_may_come_first_in_the_outputs():
    def forward(net, batch):
        return net(batch[0])[None].expand(4, -1, -1), batch[1]

    assert (
        look(Between(), lambda outputs, targets: square(outputs[0], targets), forward=forward).examples == "independent"
    )


@pytest.mark.parametrize("write", [lambda x: x.relu_(), lambda x: x.data.relu_(), lambda x: x.mul_(0.5)])
def test_writing_into_the_input_is_found(write):
    assert look(Between(before=write)).writes
    assert look(Between(before=write)).examples == "independent"


def test_randomness_is_found_and_told_from_a_state():
    found = look(Between(lambda h: F.dropout(h, 0.5)))
    assert found.random and found.examples == "unknown"
    calls = []

    def counting(h):
        calls.append(1)
        return h * len(calls)

    with pytest.raises(ValueError, match="keeps something from call to call"):
        look(Between(counting))


def test_randomness_that_seldom_matters_is_found_and_a_seed_of_its_own_is_none():
    assert look(Between(lambda h: h if torch.rand(()) > 1e-6 else 0 * h)).random
    assert look(Between(lambda h: h if random.random() > 1e-6 else 0 * h)).random

    def seeding(h):
        torch.manual_seed(0)
        return h * torch.rand(h.shape[1:])

    found = look(Between(seeding))
    assert not found.random and found.examples == "independent"


def test_a_network_that_changes_with_every_other_call_is_refused():
    calls = []

    def alternating(h):
        calls.append(1)
        return h if len(calls) % 2 else 0 * h

    with pytest.raises(ValueError, match="keeps something from call to call"):
        look(Between(alternating))
