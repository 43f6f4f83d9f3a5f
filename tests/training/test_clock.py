"""When a training saves and shows something, by a clock that the test turns."""

import types

import pytest

from wideflat.training import clock
from wideflat.training.clock import Clock


@pytest.fixture
def time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def training():
    return types.SimpleNamespace(step=0, epoch=3, at_epoch_end=False, images_per_step=50)


def test_a_state_is_due_after_its_minutes_and_not_again_at_once(time, training):
    found = Clock(training, checkpoint_minutes=2.0)
    time[0] += 119
    assert not found.save_is_due()
    time[0] += 2
    assert found.save_is_due()
    found.saved()
    assert not found.save_is_due()


def test_something_is_shown_twice_a_second_at_most(time, training):
    found, shown = Clock(training, 10.0), []
    for _ in range(20):
        time[0] += 0.125
        shown.append(found.show_is_due())
    assert [k for k, due in enumerate(shown) if due] == [3, 7, 11, 15, 19]


def test_images_a_second_are_those_of_the_iterations_and_evaluation_is_apart(time, training):
    found = Clock(training, 10.0)
    training.step = 8
    time[0] += 4
    found.trained()
    time[0] += 1.5
    row = found.row()
    assert (row["epoch"], row["seconds"], row["images_per_second"], row["evaluation_seconds"]) == (3, 4.0, 100.0, 1.5)
    training.at_epoch_end = True
    found.saved()  # the next epoch begins here
    training.step = 10
    time[0] += 2
    found.trained()
    assert found.row()["images_per_second"] == 50.0
