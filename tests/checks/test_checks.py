"""Whatever is given to a check, it is taken or refused by a TypeError or ValueError that names the argument."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import wideflat
from wideflat import checks
from wideflat.checks.parameters import check_parameters

_spec = importlib.util.spec_from_file_location("rubbish", Path(__file__).parent.parent / "fuzz" / "rubbish.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

CHECKS = {
    "whole": lambda value: checks.whole("it", value, least=1),
    "number": lambda value: checks.number("it", value, 0, 1),
    "choice": lambda value: checks.choice("it", value, ["auto", "batch"]),
    "network": lambda value: checks.network(value, "it"),
    "function": lambda value: checks.function("it", value),
    "real_tensor": lambda value: checks.real_tensor("it", value, (2,)),
}


@pytest.mark.parametrize("name", CHECKS)
def test_rubbish_is_refused_in_words(name):
    refused = 0
    for value in _module.rubbish():
        try:
            CHECKS[name](value)
        except (TypeError, ValueError) as error:
            refused += 1
            assert str(error).startswith("it must ") and len(str(error)) < 200
    assert refused > 20


def test_what_is_meant_is_taken():
    assert checks.whole("n", torch.tensor(3), least=1) == checks.whole("n", np.int32(3)) == 3
    assert checks.number("x", 1) == checks.number("x", np.float32(1)) == checks.number("x", torch.tensor([1.0])) == 1.0
    assert type(checks.number("x", 1)) is float and type(checks.whole("n", np.int64(1))) is int


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 2**63, 10**400, 1e300])
def test_numbers_out_of_bounds_are_refused(value):
    with pytest.raises(ValueError, match="alpha must be"):
        checks.number("alpha", value, 0, 1)


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
