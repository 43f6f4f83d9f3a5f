"""LookSAM against its box, its peer and its limit."""

from functools import partial

import pytest
import pytorch_optimizer
from sam_twins import compare_with_box, compare_with_peer, compare_with_sam
from torch import nn

import wideflat


def test_its_settings_are_those_of_the_box():
    compare_with_box("look", period=2, alpha=0.3)


def test_it_equals_its_peer_where_there_is_one_parameter():
    """The peer takes lengths and angles within each parameter, the paper those of the whole gradient."""
    ours, theirs = partial(wideflat.LookSAM, period=3), partial(pytorch_optimizer.LookSAM, k=3)
    compare_with_peer(ours, theirs, lambda: nn.Linear(3, 1, bias=False).double())


def test_with_a_second_gradient_at_every_step_it_is_sam():
    compare_with_sam(partial(wideflat.LookSAM, period=1))


def test_a_period_of_nothing_is_refused():
    with pytest.raises(ValueError, match="period must be"):
        wideflat.LookSAM(nn.Linear(2, 2).parameters(), period=0)
