"""How a training is computed: what cannot be meant is refused before anything begins."""

import numpy as np
import pytest

from wideflat.training import Options


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"amp": "fp8"}, ValueError, "amp must be .*bf16.*got 'fp8'"),
        ({"seed": 0.5}, TypeError, "seed must be a whole number"),
        ({"evaluate_every": 0}, ValueError, "evaluate_every must be a whole number >= 1"),
        ({"batch_norm_images": -1}, ValueError, "batch_norm_images must be a whole number >= 1"),
        ({"limit_data": 0}, ValueError, "limit_data must be a whole number >= 1"),
        ({"max_loss": 0.0}, ValueError, "max_loss must be a finite number > 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        Options(**changes)


def test_numbers_of_numpy_become_plain_and_seeds_may_be_negative():
    options = Options(evaluate_every=np.int64(3), seed=-1)
    assert type(options.evaluate_every) is int and options.seed == -1
