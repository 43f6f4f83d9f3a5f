"""ASAM against its box, its peer and its limit."""

from functools import partial

import pytorch_optimizer
from sam_twins import RHO, compare_with_box, compare_with_peer, compare_with_sam

import wideflat


def test_its_setting_is_that_of_the_box():
    compare_with_box("asam", eta=0.3)


def test_it_equals_its_peer():
    theirs = partial(pytorch_optimizer.SAM, adaptive=True)
    compare_with_peer(partial(wideflat.ASAM, eta=0.0), theirs, weight_decay=0.01)


def test_where_the_sizes_of_all_weights_are_alike_it_is_sam():
    compare_with_sam(partial(wideflat.SAM, adaptive=True, eta=1e9), rho=RHO / 1e9)
