"""Parameters whose elements have no memory of their own are refused."""

import pytest
import torch
from torch import nn

import wideflat
from wideflat.checks.parameters import check_parameters


def _shared(kind):
    base = torch.arange(12.0)
    return {
        "two views": [nn.Parameter(base[:8]), nn.Parameter(base[4:])],
        "one memory": [nn.Parameter(base), nn.Parameter(base)],
        "windows": [nn.Parameter(base.unfold(0, 4, 2))],
        "negated": [nn.Parameter(torch._neg_view(base))],
    }[kind]


@pytest.mark.parametrize("kind", ["two views", "one memory", "windows", "negated"])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: wideflat.EntropySGD(params, lr=0.5, inner_lr=0.1),
        lambda params: wideflat.Lookahead(params, lr=0.5, inner_lr=0.1),
        lambda params: wideflat.Entropic(torch.optim.SGD(params, lr=0.1)),
        lambda params: wideflat.SAM(params, lr=0.1),
    ],
    ids=["EntropySGD", "Lookahead", "Entropic", "SAM"],
)
def test_parameters_that_share_memory_are_refused(kind, make):
    """Copies of each that are written back would overwrite each other."""
    with pytest.raises(ValueError, match=r"shares? memory"):
        make(_shared(kind))


def test_columns_of_one_matrix_share_no_memory():
    base = torch.zeros(5, 3)
    check_parameters([nn.Parameter(base[:, k]) for k in range(3)])
    twice = nn.Parameter(torch.zeros(3))
    check_parameters([twice], [{"params": [twice]}])  # one object


def test_a_group_that_is_added_later_shares_no_memory_either():
    base = torch.zeros(4)
    opt = wideflat.EntropySGD([nn.Parameter(base)], lr=0.5, inner_lr=0.1)
    with pytest.raises(ValueError, match="share memory"):
        opt.add_param_group({"params": [nn.Parameter(base[1:])]})
    assert len(opt.param_groups) == 1
