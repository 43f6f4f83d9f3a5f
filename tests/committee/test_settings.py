import math

import pytest

from wideflat.committee import SETTINGS, changes_from


def test_the_settings_are_those_of_the_appendix():
    fast = SETTINGS["rsgd-fast"]
    assert list(SETTINGS) == ["sgd-fast", "sgd-slow", "rsgd-fast", "rsgd-slow", "esgd"]
    assert (fast.lr, fast.num_replicas, fast.gamma0, fast.gamma1) == (1e-4, 10, 2e-3, 2e-3)
    assert all(s.hidden == 9 and s.batch_size == 100 and s.gradient_scale == 100 for s in SETTINGS.values())
    esgd = SETTINGS["esgd"]
    assert (esgd.inner_lr, esgd.inner_steps, esgd.epsilon, esgd.alpha) == (5e-3, 20, 1e-6, 0.75)


def test_schedules_grow_by_the_epoch_and_stop_at_their_limit():
    setting = SETTINGS["sgd-slow"].replace(tanh_beta_max=3.0)
    assert setting.tanh_beta(0) == 0.5
    assert setting.tanh_beta(100) == pytest.approx(0.5 * 1.001**100)
    assert setting.tanh_beta(10_000) == 3.0
    assert SETTINGS["rsgd-fast"].gamma(1000) == pytest.approx(2e-3 * 1.002**1000)
    assert math.isfinite(SETTINGS["rsgd-fast"].gamma(10**7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 8}, "odd"),
        ({"algorithm": "adam"}, 'algorithm must be "sgd", "rsgd" or "esgd"'),
        ({"stop": "distance"}, 'stop of sgd must be "errors"'),
        ({"lr": 0.0}, "lr must be a finite number > 0, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number >= 1"),
        ({"num_replicas": 3}, "num_replicas is for rsgd"),
        ({"dropout": 1.5}, "dropout"),
        ({"omega1": -1.0}, "omega1 must be a finite number >= 0"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"max_epochs": 2**31}, "max_epochs must be at most"),
        ({"polish_epochs": -1}, "polish_epochs must be a whole number >= 0"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SETTINGS["sgd-fast"].replace(**changes)
    with pytest.raises(ValueError, match="rsgd needs num_replicas"):
        SETTINGS["rsgd-fast"].replace(num_replicas=1)
    with pytest.raises(ValueError, match="esgd needs inner_lr"):
        SETTINGS["esgd"].replace(inner_lr=0.0)


def test_what_an_algorithm_has():
    kinds = {name: (setting.replicated, setting.has_inner_loop) for name, setting in SETTINGS.items()}
    assert kinds == {
        "sgd-fast": (False, False),
        "sgd-slow": (False, False),
        "rsgd-fast": (True, False),
        "rsgd-slow": (True, False),
        "esgd": (False, True),
    }
    assert [setting.passes for setting in SETTINGS.values()] == [1, 1, 1, 1, 20]
    assert [setting.passes_per_epoch for setting in SETTINGS.values()] == [1, 1, 10, 10, 20]


@pytest.mark.parametrize("text", ["dropout", "colour=blue", "algorithm=esgd", "align=perhaps", "max_epochs=3.5"])
def test_changes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=r"NAME=VALUE|is true or false|is a whole number"):
        changes_from([text])
