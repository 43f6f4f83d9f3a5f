"""Contradictions: at once on the CPU, elsewhere when they are read, all by one wait."""

import pytest
import torch

from tests.played_device import DEVICE, played
from wideflat.evaluation.doubts import Doubts


def test_on_the_cpu_at_once():
    doubts = Doubts()
    doubts.refuse(torch.tensor(False), "no")
    with pytest.raises(ValueError, match=r"^yes$"):
        doubts.refuse(torch.tensor(True), "yes")
    doubts.settle()


def test_on_a_device_when_they_are_read():
    doubts = Doubts()
    with played() as device:
        for flag, why in ((False, "one"), (False, "two"), (True, "two"), (False, "two")):
            doubts.refuse(torch.tensor(flag, device=DEVICE), why)
        assert device.waits.total() == 0
        with pytest.raises(ValueError, match=r"^two$"):
            doubts.settle()
        assert device.waits.total() == 1
        doubts.settle()
    assert device.waits.total() == 1
