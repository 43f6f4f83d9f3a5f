"""A network at several points, with error bars over data."""

import numpy as np
import pytest
import torch
from torch import nn

from wideflat.evaluation.blocks import Blocks
from wideflat.evaluation.evaluation import Evaluation
from wideflat.landscape.points import Sample, move, sample
from wideflat.noise.shared_noise import SharedNoise
from wideflat.progress import Progress


def test_every_point_is_that_of_a_loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    x, y = torch.randn(30, 3), torch.randint(2, (30,))
    d, b = torch.randn(4, 3), torch.randn(4)
    evaluation = Evaluation(model, "loss", "eval", None)
    places = [0.0, 0.5, -1.0]
    with evaluation.prepared(), SharedNoise(model, ["0.weight"]) as change, Progress("", enabled=False) as bar:
        to = move(evaluation, change, {"0.weight": d}, {"1.running_mean": b})
        found = sample(evaluation, Blocks((x, y), 7), [lambda t=t: to(t) for t in places], bar)
    assert model[1].running_mean.tolist() == [0.0] * 4
    for t, mean, row in zip(places, found.mean, found.values, strict=True):
        state = {**model.state_dict(), "0.weight": model[0].weight + t * d, "1.running_mean": t * b}
        with torch.no_grad():
            losses = nn.functional.cross_entropy(torch.func.functional_call(model, state, (x,)), y, reduction="none")
        assert mean == pytest.approx(float(losses.mean()), rel=1e-5)
        assert row.std(ddof=1) / 30**0.5 == pytest.approx(float(losses.std()) / 30**0.5, rel=1e-4)
    assert found.stderr[0] == pytest.approx(found.values[0].std(ddof=1) / 30**0.5)


def test_one_number_a_batch_counts_by_its_examples():
    found = Sample(np.array([[1.0, 4.0]]), np.array([20.0, 10.0]))
    assert found.mean[0] == pytest.approx(2.0)
    assert np.isnan(Sample(np.ones((1, 1)), np.ones(1)).stderr[0])


def test_one_more_wrong_answer_is_the_least_share_that_was_seen():
    assert Sample(np.array([[0.0, 1.0, 0.0, 0.0]]), np.ones(4)).one_more == 0.25
    assert Sample(np.array([[0.0, 0.5, 0.75, 0.0]]), np.ones(4)).one_more == 0.0625  # words of sentences of four
    assert Sample(np.zeros((2, 4)), np.ones(4)).one_more == 0.25
