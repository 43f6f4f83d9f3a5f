"""log Z at one sigma: its interval, what is said against it, and a file of it."""

import json
import math

import pytest
from scipy.stats import t as student

from wideflat.volume.volume import FLAGS, Integration


def point(**changes):
    return Integration(**{"sigma": 0.5, "beta": 1.0, "log_z": -4.0, "stderr": 0.5, "dof": 6.0, **changes})


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_the_interval_is_students(level):
    low, high = point().interval(level)
    assert low + high == pytest.approx(-8.0)
    assert high + 4 == pytest.approx(0.5 * student.ppf((1 + level) / 2, 6.0), rel=1e-6)
    assert point(stderr=0.0).interval(level) == (-4.0, -4.0)
    with pytest.raises(ValueError, match="level must be"):
        point().interval(1.5)


def test_every_flag_has_words_and_an_unknown_one_says_so():
    flagged = point(flags={**dict.fromkeys(FLAGS, "3"), "later": "4"})
    assert point().converged and not flagged.converged and not point().reasons
    assert flagged.reasons[0] == f"gap (3): {FLAGS['gap']}"
    assert flagged.reasons[-1] == "later (4): not known to this version"


def test_the_distance_is_in_units_of_the_scale():
    assert point(sigma=0.2, ratio=0.9).relative_distance == pytest.approx(0.2**2 * 0.9 / 2)


def test_what_is_not_finite_goes_through_a_file():
    one = point(lower=-math.inf, gap=math.nan, diagnostics={"tau": [1.0, math.inf]}, flags={"gap": "+9 +- 1"})
    content = json.loads(json.dumps(one.to_dict()), parse_constant=pytest.fail)
    two = Integration.from_dict({**content, "of a later version": 3})
    assert two.lower == -math.inf and math.isnan(two.gap) and two.diagnostics == {"tau": [1.0, math.inf]}
    assert two.to_dict() == one.to_dict()


def test_a_field_that_is_no_number_is_named():
    with pytest.raises(TypeError, match="log_z must be"):
        point(log_z="much")
