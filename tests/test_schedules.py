import pytest

from wideflat.schedules import Schedule


def test_schedules_refuse_nonsense():
    with pytest.raises(ValueError, match="epochs must be > 0"):
        Schedule(0)
    with pytest.raises(ValueError, match="increasing order"):
        Schedule(10, drops=(5, 3))
    with pytest.raises(ValueError, match="decay_every must be > 0"):
        Schedule(10, decay=0.9, decay_every=0)
    assert str(Schedule(10, drops=(5,), warmup_epochs=1, warmup_factor=0.1)) == (
        "x 0.1 for 1 epochs, then x 0.1 at epochs 5"
    )
