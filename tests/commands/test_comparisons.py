"""A measurement beside earlier ones: differences with their error bars, or why there are none."""

from pathlib import Path

import pytest

from wideflat.commands.comparisons import Compared, compared
from wideflat.energy.profile import LocalEnergy

PATHS = [Path("a.json"), Path("b.json")]


def profile(mean, metric="error"):
    return LocalEnergy([0.1, 0.3], [mean, 2 * mean], [0.01, 0.02], 0.0, conventions={"metric": metric, "seed": 0})


def test_what_is_refused_says_how_to_force_it_and_the_others_are_compared_all_the_same():
    refused, found = compared(profile(0.5), PATHS, [profile(0.1, metric="loss"), profile(0.2)], force=False)
    assert refused.path == PATHS[0] and "metric" in refused.refused and "--force" in str(refused)
    assert "force=True" not in str(refused) and set(refused.record()) == {"with", "refused"}
    record = found.record()
    assert record["with"] == PATHS[1] and record["mean"].tolist() == pytest.approx([0.3, 0.6])
    assert record["deviations"].tolist() == pytest.approx([0.3 / 0.01 / 2**0.5, 0.6 / 0.02 / 2**0.5], rel=1e-6)


def test_forced_it_is_compared():
    (found,) = compared(profile(0.5), PATHS[:1], [profile(0.1, metric="loss")], force=True)
    assert found.difference is not None and not found.refused


def test_a_table_has_a_row_for_each_sigma_and_the_note_below():
    (found,) = compared(profile(0.5), PATHS[:1], [profile(0.2)], force=False)
    lines = str(found).splitlines()
    assert lines[0] == "minus a.json:" and lines[1].split() == ["sigma", "difference", "stderr", "deviations"]
    assert [line.split()[:2] for line in lines[2:4]] == [["0.1", "0.30000"], ["0.3", "0.60000"]]


def test_every_earlier_result_needs_its_path():
    with pytest.raises(ValueError, match="zip"):
        list(compared(profile(0.5), PATHS, [profile(0.2)], force=False))


def test_of_nothing_there_is_nothing():
    assert list(compared(profile(0.5), [], [], force=False)) == []
    assert str(Compared(Path("x.json"), refused="no")) == "compared with x.json: no"
