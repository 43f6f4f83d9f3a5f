from pathlib import Path

import numpy as np
import pytest

from wideflat.commands.comparisons import compared
from wideflat.energy.profile import LocalEnergy


def profile(mean, metric="error"):
    zeros = np.array([0.0, 0.3])
    return LocalEnergy([0.0, 0.3], mean * zeros, 0.01 * zeros, baseline=0.0, conventions={"metric": metric})


def test_a_comparison_is_a_table_in_words_and_numbers_for_json():
    (found,) = compared(profile(1.0), [Path("b.json")], [profile(0.5)], force=False)
    assert str(found).splitlines()[0] == "minus b.json:" and "0.15000" in str(found)
    record = found.record()
    assert record["with"] == Path("b.json") and list(record["mean"]) == pytest.approx([0.0, 0.15])
    assert not found.refused


def test_a_refusal_says_why_and_what_to_type():
    (found,) = compared(profile(1.0), [Path("b.json")], [profile(0.5, "loss")], force=False)
    assert found.record() == {"with": Path("b.json"), "refused": found.refused}
    assert "metric" in found.refused and "--force" in str(found) and "force=True" not in str(found)
