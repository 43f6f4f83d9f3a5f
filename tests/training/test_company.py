"""Alone: nobody is asked, everything is here; and how the other companies are told from it."""

import pytest
import torch
from torch import nn

from wideflat.training.company import Alone, on_torchrun


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"WORLD_SIZE": "2"}, False),  # as some queues set it, without torchrun
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "here"}, False),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "here"}, True),
    ],
)
def test_torchrun_is_known_by_all_that_it_sets(environment, several, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert on_torchrun() == several


def test_alone_has_all_replicas_and_agrees_with_itself():
    with Alone() as company:
        assert company.local_replicas(3) == [0, 1, 2]
        assert company.gather("x") == company.of_replicas("x") == ["x"]
        assert company.agree(5, False, "SIGTERM", True) == ("SIGTERM", True) and not company.all(False)
        state = {"step": 3}
        assert company.packed(state) is company.unpacked(state) is state


def test_a_mini_batch_is_not_divided():
    torch.manual_seed(0)
    network, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    whole = Alone().share(network)
    assert whole.share(x, y)[0] is x
    loss = whole.loss(whole(x), y)
    assert whole.own(loss) is whole.mean(loss) is loss
    torch.testing.assert_close(loss, nn.functional.cross_entropy(network(x), y))
