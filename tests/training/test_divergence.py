"""Rates that cannot be meant: refused at the door, or ended as diverged with the last good state kept."""

import math

import pytest
import torch
from small_trainings import QUIET, images, small

from wideflat.training import Diverged, Options, Run, train

FIELDS = [
    *[("sgd", "lr"), ("sgd", "weight_decay"), ("esgd", "epsilon"), ("esgd", "gamma0"), ("rsgd", "gamma0")],
    *[("sam", "rho"), ("esgd", "inner_lr")],
]


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
@pytest.mark.parametrize(("algorithm", "field"), FIELDS)
def test_what_is_not_finite_is_refused(algorithm, field, value):
    with pytest.raises(ValueError, match=rf"{field}.* must be a finite number"):
        small(algorithm, **{field: value})


@pytest.mark.parametrize("value", [1e10, 1e30])
@pytest.mark.parametrize(("algorithm", "field"), FIELDS)
def test_what_is_too_large_ends_as_diverged(tmp_path, algorithm, field, value):
    experiment = small(algorithm, **{field: value}, epochs=2)
    try:
        run = train(experiment, tmp_path / "run", images(32, 16), Options(batch_norm_images=32), **QUIET)
    except Diverged as error:
        told = str(error)
        assert "at iteration" in told and "keeps the last good state" in told and "Try a smaller --lr" in told
        run = Run.open(tmp_path / "run")
        with run.locked():
            state = run.restore()
        assert state is None or all(
            bool(torch.isfinite(weight).all())
            for network in state["learner"]["networks"]
            for weight in network.values()
        )
    else:  # it lived: then what came out is finite
        assert all(bool(torch.isfinite(p).all()) for p in run.load_model().parameters())
