"""The result: on disk, drawn, compared."""

import json
import math

import numpy as np
import pytest

from wideflat import LocalEnergy

CONVENTIONS = {"measure": "local energy", "metric": "error", "parameters": "all", "batch_norm": "eval"}


def profile(mean=(0.0, 0.1), baseline=0.02, **changes):
    fields = {"sigmas": [0.0, 0.5], "mean": list(mean), "stderr": [0.0, 0.01], "baseline": baseline}
    return LocalEnergy(**{**fields, "conventions": dict(CONVENTIONS), **changes})


def test_a_profile_survives_the_disk(tmp_path):
    there = profile(
        degrees_of_freedom=[math.inf, 5.5], samples=[[0.0, 0.1], [0.0, math.nan]], evaluations=[0, 20], complete=False
    )
    there.save(tmp_path / "profile.json")
    back = LocalEnergy.load(tmp_path / "profile.json")
    for name in ("sigmas", "mean", "stderr", "degrees_of_freedom", "covariance", "evaluations", "samples"):
        np.testing.assert_array_equal(getattr(back, name), getattr(there, name))
    assert back.conventions == there.conventions and back.complete is False and back.baseline == 0.02
    json.loads((tmp_path / "profile.json").read_text(), parse_constant=pytest.fail)  # no NaN: any reader can read it


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "sigmas": [0]}'])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ValueError, match=r"p\.json is not a whole local-energy profile"):
        LocalEnergy.load(tmp_path / "p.json")


def test_intervals_widen_with_few_degrees_of_freedom():
    narrow, wide = profile().interval(0.95)[1], profile(degrees_of_freedom=[1, 1]).interval(0.95)[1]
    assert narrow[1] - narrow[0] == pytest.approx(2 * 1.96 * 0.01, rel=1e-3)
    assert wide[1] - wide[0] == pytest.approx(2 * 12.706 * 0.01, rel=1e-3)
    assert profile(degrees_of_freedom=[1, 1]).interval()[0].tolist() == [0, 0]
    with pytest.raises(ValueError, match="between 0 and 1"):
        profile().interval(95)


def test_the_spread_over_perturbations_is_that_of_the_samples():
    samples = np.array([[0.0, 0.1], [0.0, 0.2], [0.0, 0.6]])
    assert profile(samples=samples).spread[1] == pytest.approx(samples[:, 1].std(ddof=1))
    with pytest.raises(ValueError, match='only known with noise="pass"'):
        _ = profile().spread


def test_comparing():
    difference = profile((0.0, 0.1)).compare(profile((0.0, 0.15)))
    assert difference.mean.tolist() == pytest.approx([0, -0.05])
    assert difference.stderr[1] == pytest.approx(0.01 * math.sqrt(2))
    assert difference.deviations[1] == pytest.approx(-0.05 / 0.01 / math.sqrt(2)) and difference.deviations[0] == 0


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (profile(conventions={**CONVENTIONS, "batch_norm": "batch"}), "batch_norm is 'eval' for one and 'batch'"),
        (profile(conventions={**CONVENTIONS, "parameters": "weights"}), "parameters is 'all' for one and 'weights'"),
        (profile(conventions={**CONVENTIONS, "architecture": "other"}), "architecture"),
        (profile(baseline=0.1), "nearly the same training error"),
    ],
)
def test_what_is_not_comparable_is_refused_unless_forced(other, reason):
    with pytest.raises(ValueError, match=reason):
        profile().compare(other)
    assert profile().compare(other, force=True).mean.tolist() == [0, 0]


def test_other_sigmas_are_refused_even_when_forced():
    with pytest.raises(ValueError, match="the sigmas differ"):
        profile().compare(profile(sigmas=[0.0, 0.4]), force=True)


def test_plot_and_print():
    import matplotlib.pyplot as plt

    ax = profile().plot(label="network")
    assert ax.get_xlabel() == r"$\sigma$" and len(ax.containers) == 1
    assert profile(samples=np.array([[0, 0.1], [0, 0.3]])).plot(ax, spread=True) is ax
    plt.close(ax.figure)
    conventions = {"metric": "loss", "architecture": "Net, 7 parameters", "noise": "batch", "batch_norm": None}
    assert str(profile(conventions=conventions)).endswith("loss of Net, 7 parameters; noise: batch")
    assert "0.10000" in str(profile()) and "not complete" in str(profile(complete=False))
