"""The numbers of tensors on a device, seen without waiting for it, and never others than those."""

import torch

from tests.played_device import DEVICE, played
from wideflat.evaluation.blocks import Blocks, cloned, repeated, to_device
from wideflat.evaluation.origins import comes_from, on_host


def test_what_is_on_the_cpu_is_its_own_origin():
    x = torch.arange(3)
    assert on_host(x) is x and comes_from(x, lambda: x + 1) is x and on_host(x) is x


def test_a_batch_that_was_moved_repeated_and_copied_is_known():
    batch = torch.randn(4, 2), torch.arange(4)
    with played() as device:
        there = to_device(batch, DEVICE)
        for made, expected in ((there, batch), (repeated(there, 3), repeated(batch, 3)), (cloned(there), batch)):
            assert torch.equal(on_host(made[1]), expected[1]) and on_host(made[1]).device.type == "cpu"
    assert device.waits.total() == 0


def test_blocks_of_data_on_a_device_are_fetched_once():
    with played() as device:
        x, y = torch.randn(10, 2).to(DEVICE), torch.arange(10).to(DEVICE)
        for block in Blocks((x, y), batch_size=3, seed=1).visit(0):
            seen = on_host(block.batch[1])
            assert seen.device.type == "cpu" and torch.equal(seen, block.batch[1].held)
    assert device.waits.total() == 1


def test_what_was_written_to_has_no_origin():
    source = torch.arange(4)
    with played():
        first, second = (to_device(source, DEVICE) for _ in range(2))
        first.add_(1)
        assert on_host(first) is first and on_host(second) is source
        source.add_(1)
        assert on_host(second) is second
