"""Records that were written before are opened alike, and refused alike where they are something else."""

import numpy as np
import pytest

from wideflat import LocalEnergy
from wideflat.cards.card import Card
from wideflat.checks.records import parts_of
from wideflat.hessian.eigenvalues import Spectrum
from wideflat.landscape.shift import ShiftProfile
from wideflat.landscape.slices import Slice
from wideflat.volume.volumes import FreeEntropy


@pytest.mark.parametrize("kind", [Card, FreeEntropy, LocalEnergy, ShiftProfile, Slice, Spectrum])
@pytest.mark.parametrize("content", [None, [1], {}, {"format": 2}, {"format": np.ones(2)}, {"format": "1"}], ids=str)
def test_what_is_no_record_of_format_1_is_refused(kind, content):
    with pytest.raises(ValueError, match=r"expected a .* of format 1, got"):
        kind.from_dict(content)


def test_the_kind_is_asked_for_and_stays_a_part():
    record = {"format": 1, "kind": "card", "mean": [[1, 2]]}
    parts = parts_of("card", record, ["mean"], kind="card")
    assert parts["kind"] == "card" and "format" not in parts and parts["mean"].shape == (1, 2)
    assert record["format"] == 1 and record["mean"] == [[1, 2]]  # as they were
    with pytest.raises(ValueError, match="got a record of the kind 'card'"):
        parts_of("volume", record, kind="volume")
    with pytest.raises(ValueError, match=r"not a whole card.*stderr"):
        parts_of("card", record, ["stderr"])
