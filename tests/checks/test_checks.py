"""Whatever is given to a check, it is taken or refused by a TypeError or ValueError that names the argument."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from wideflat import checks

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
