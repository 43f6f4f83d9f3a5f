"""FriendlySAM against its box, its peer and its limit."""

from functools import partial

import pytest
import pytorch_optimizer
from sam_twins import compare_with_box, compare_with_peer, compare_with_sam
from torch import nn

import wideflat


def test_its_settings_are_those_of_the_box():
    compare_with_box("friendly", sigma=0.6, decay=0.7)


def test_it_equals_its_peer():
    compare_with_peer(wideflat.FriendlySAM, pytorch_optimizer.FriendlySAM, weight_decay=0.01)


def test_with_all_of_the_gradient_it_is_sam():
    compare_with_sam(partial(wideflat.FriendlySAM, sigma=0.0))


def test_a_decay_beyond_one_is_refused():
    with pytest.raises(ValueError, match="decay must be"):
        wideflat.FriendlySAM(nn.Linear(2, 2).parameters(), decay=2.0)
