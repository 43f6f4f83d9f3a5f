import pytest

from wideflat.schedules import Schedule


def test_schedules_refuse_nonsense():
    with pytest.raises(ValueError, match="epochs must be a finite number > 0"):
        Schedule(0)
    with pytest.raises(ValueError, match="increasing order"):
        Schedule(10, drops=(5, 3))
    with pytest.raises(ValueError, match="decay_every must be a finite number > 0"):
        Schedule(10, decay=0.9, decay_every=0)
    for wrong in ({"drops": 5}, {"drops": ("x",)}, {"decay": "x"}, {"cosine": "no"}, {"epochs": None}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            Schedule(**{"epochs": 10, **wrong})
    for at, schedule in (("x", Schedule(10)), (1e300, Schedule(10, decay=2.0, decay_every=1e-300))):
        with pytest.raises((TypeError, ValueError), match=r"tau must be|no finite learning rate"):
            schedule(at)
    assert str(Schedule(10, drops=(5,), warmup_epochs=1, warmup_factor=0.1)) == (
        "x 0.1 for 1 epochs, then x 0.1 at epochs 5"
    )
