"""What every measure begins with: the parameters, the blocks and the words of its result."""

import math

import pytest
import torch
from torch import nn

from wideflat.energy.opening import opened

X, Y = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def begin(model=None, data=(X, Y), **changes):
    given = {"metric": "loss", "parameters": "weights", "batch_norm": "eval", "forward": None, "batch_size": 8}
    return opened(network() if model is None else model, data, **{**given, "seed": 5, **changes})


def test_all_data_are_gone_through_and_only_the_chosen_parameters_move():
    model = network()
    found = begin(model)
    assert found.model is model and found.names == ["0.weight", "3.weight"] and found.words == "weights"
    blocks = list(found.blocks.visit(0))
    assert [block.size for block in blocks] == [8, 8, 7, 7] and found.batch_size == 8
    assert torch.equal(torch.cat([block.batch[0] for block in blocks]).sort(0).values, X.sort(0).values)


def test_its_metric_is_that_of_the_whole_network():
    model = network()
    found = begin(model, batch_size=None)
    exact = nn.functional.cross_entropy(model.eval()(X), Y).item()
    with found.evaluation.prepared(), torch.no_grad():
        seen = [(found.evaluation.values(block.batch, block.size), block.size) for block in found.blocks.visit(0)]
    assert sum(float(value.sum()) for value, _ in seen) / 30 == pytest.approx(exact, rel=1e-5)


def test_the_size_of_a_block_is_told_only_where_the_answer_depends_on_it():
    more = {"perturbed": 20, "examples": 30}
    told = begin().conventions("curvature", **more)
    assert told["measure"] == "curvature" and told["metric"] == "loss" and told["seed"] == 5 and told["perturbed"] == 20
    assert told["batch_norm"] == "eval" and told["batch_size"] is None
    assert begin().conventions("ascent", batches_matter=True, **more)["batch_size"] == 8
    assert begin(batch_norm="batch").conventions("curvature", **more)["batch_size"] == 8
    plain = begin(nn.Linear(3, 2), batch_norm="batch").conventions("curvature", **more)
    assert plain["batch_norm"] is None and plain["batch_size"] is None  # there is no batch norm in it


def test_networks_and_parameters_that_differ_are_told_apart():
    more = {"perturbed": 20, "examples": 30}
    one, other = begin(nn.Linear(3, 2)), begin(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    assert one.conventions("x", **more)["architecture"] != other.conventions("x", **more)["architecture"]
    assert begin(parameters="all").conventions("x", **more)["parameters"] == "all"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"batch_norm": "recalibrate"}, ValueError, "batch_norm"),
        ({"batch_norm": "batch", "statistics": ("eval",)}, ValueError, "batch_norm"),
        ({"model": "resnet"}, TypeError, "model"),
        ({"data": iter([(X, Y)])}, ValueError, "only once"),
        ({"parameters": "nothing[.]like[.]this"}, ValueError, "nothing"),
        ({"batch_size": math.nan}, (TypeError, ValueError), "batch_size"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, error, words):
    with pytest.raises(error, match=words):
        begin(**changes)
