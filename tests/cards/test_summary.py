"""What a card says in words."""

import dataclasses

import numpy as np

from wideflat.cards.summary import bounds, crossed
from wideflat.volume.volume import Integration


def test_bounds_that_noise_has_put_the_wrong_way_round_are_explained():
    near = Integration(0.1, 1.0, np.nan, np.nan, np.nan, lower=-0.47, lower_stderr=0.01, upper=-0.53, upper_stderr=0.03)
    assert bounds(near) == ("-0.470 ± 0.010", "-0.530 ± 0.030") and "closer to each other" in crossed(near)
    far = dataclasses.replace(near, lower=0.0)
    assert "by more than their errors" in crossed(far) and crossed(dataclasses.replace(near, upper=-0.4)) == ""
