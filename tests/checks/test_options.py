"""Words, strengths, devices, types, groups and whole records: taken as they are meant, or refused by name."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wideflat.checks import options


@pytest.mark.parametrize(
    ("check", "value", "error"),
    [
        (options.text, ["a"], TypeError),
        (options.strength, "0.5", TypeError),
        (options.strength, math.nan, ValueError),
        (options.strength, torch.ones(2), TypeError),
        (options.value_of, "x", TypeError),
        (options.device, "meta", ValueError),
        (options.device, "cuda:99", ValueError),
        (options.device, True, TypeError),
        (options.dtype, torch.int64, ValueError),
        (options.dtype, "float32", TypeError),
    ],
)
def test_rubbish_is_refused_by_the_name_of_the_option(check, value, error):
    with pytest.raises(error, match=r"^it must "):
        check("it", value)


def test_a_strength_on_a_device_is_not_waited_for():
    given = torch.tensor(0.5)
    assert options.strength("gamma", given) is given
    assert options.strength("gamma", torch.tensor(2)) == 2.0  # a whole number is none of a schedule's


def test_measured_values_may_be_infinite_and_have_hundreds_of_digits():
    assert math.isnan(options.value_of("x", np.float32("nan")))
    assert options.value_of("x", -(10**400)) == -math.inf


def test_a_param_group_has_pairs_and_an_end():
    w = nn.Parameter(torch.zeros(1))
    assert options.param_group({"params": iter([w, w])})["params"] == [w, w]
    with pytest.raises(TypeError, match="pairs of a name and a tensor, got"):
        options.param_group({"params": iter([("name", w, 3)])})
    with pytest.raises(TypeError, match="must be a dictionary with params, got"):
        options.param_group([w])


@dataclasses.dataclass
class Record:
    value: float
    count: int
    mean: np.ndarray
    points: list[float]
    weights: Tensor | None = None
    label: str = ""
    __post_init__ = options.check_fields


def test_a_record_has_plain_numbers_and_arrays():
    found = Record(np.float32(0.5), 3.0, [1, 2], [np.float64(1)], None, "x")
    assert type(found.value) is float and type(found.count) is int and type(found.points[0]) is float
    assert isinstance(found.mean, np.ndarray) and found.weights is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": "x"}, "value must be"),
        ({"count": 1.5}, "count must be a whole number, got 1.5"),
        ({"mean": "abc"}, "mean must be"),
        ({"points": ["x"]}, "an entry of points must be"),
        ({"weights": [1.0]}, "weights must be"),
        ({"label": 3}, "label must be a text"),
    ],
)
def test_a_field_that_is_not_what_it_says_is_named(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Record(**{"value": 0.0, "count": 1, "mean": [0.0], "points": [], **changes})
