"""Results that are kept as JSON: read as they were saved, whatever is not finite in them; nothing else is one."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from wideflat.checks.options import check_fields
from wideflat.saved import Saved


@dataclass(repr=False)
class Line(Saved):
    _WHAT, _ARRAYS = "line", ("x", "y")
    x: np.ndarray
    y: np.ndarray
    baseline: float
    conventions: dict[str, Any] = field(default_factory=dict)
    __post_init__ = check_fields


def line():
    return Line(np.array([0.0, 1.0]), np.array([[0.1, math.nan], [-math.inf, 1 / 3]]), 0.5, {"metric": "loss"})


def test_it_is_read_bit_for_bit_and_the_file_is_json_for_everybody(tmp_path):
    line().save(tmp_path / "line.json")
    json.loads((tmp_path / "line.json").read_text(), parse_constant=pytest.fail)  # no NaN, which others cannot read
    found = Line.load(tmp_path / "line.json")
    assert type(found) is Line and found.conventions == {"metric": "loss"} and found.baseline == 0.5
    np.testing.assert_array_equal(found.y, line().y)


def test_a_file_of_an_earlier_version_that_has_nan_in_it_is_read(tmp_path):
    (tmp_path / "old.json").write_text('{"format": 1, "x": [0.0], "y": [NaN], "baseline": 0.5, "conventions": {}}')
    assert math.isnan(Line.load(tmp_path / "old.json").y[0])


@pytest.mark.parametrize(
    "content",
    ['{"format": 1, "x": [0.0]}', '{"format": 2}', "[1]", '{"format": 1, "x": 1', '{"format": 1, "x": "a", "y": []}'],
)
def test_what_is_none_is_said_with_its_name(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match=r"other\.json is not a whole line: "):
        Line.load(tmp_path / "other.json")


def test_a_write_that_fails_leaves_the_last_one(tmp_path):
    line().save(tmp_path / "line.json")
    before = (tmp_path / "line.json").read_text()
    broken = line()
    broken.conventions["a set"] = {1}
    with pytest.raises(TypeError):
        broken.save(tmp_path / "line.json")
    assert (tmp_path / "line.json").read_text() == before


def test_a_number_beside_the_arrays_that_json_does_not_know_is_not_written(tmp_path):
    found = line()
    found.conventions["seconds"] = math.nan
    with pytest.raises(ValueError, match="JSON compliant"):
        found.save(tmp_path / "line.json")
    assert not list(tmp_path.iterdir())
