"""The sentence about two cards: computed, with its uncertainty, or refused."""

import numpy as np
import pytest

from wideflat import Card, LocalEnergy
from wideflat.cards.card import Entry


def made(mean, stderr=0.01, title="a", common=0.0, **changed):
    """A card with one profile of two points."""
    covariance = np.diag([stderr**2] * 2) * (1 - common) + common * stderr**2
    profile = LocalEnergy([0.1, 0.3], mean, [stderr] * 2, 0.02, covariance=covariance, conventions={"metric": "error"})
    about = {"architecture": "net", "data": "x", "examples": 10, "batch_norm": "eval", "parameters": "all"}
    return Card(title, {"relative": Entry(profile)}, {**about, **changed})


def test_the_difference_is_that_of_the_mean_over_sigma():
    found = made([0.1, 0.3]).compare(made([0.2, 0.5], title="b"))
    assert found.mean["relative"] == pytest.approx(-0.15)
    assert found.stderr["relative"] == pytest.approx(0.01)  # sqrt(2 (0.01^2 / 2))
    assert str(found) == (
        "Flatter than b: under relative noise its error grows by 15.0 ± 1.0 points less (15.0 standard errors), "
        "averaged over sigma = 0.1 to 0.3. The errors are those of the noise, on the same examples."
    )
    assert str(made([0.2, 0.5]).compare(made([0.1, 0.3]))).startswith("Sharper than a")


def test_common_noise_makes_it_less_certain():
    plain, common = (made([0.1, 0.3], common=c).compare(made([0.1, 0.3], common=c)) for c in (0.0, 1.0))
    assert common.stderr["relative"] == pytest.approx(2**0.5 * plain.stderr["relative"])
    assert str(plain).startswith(
        "No difference in flatness to a is seen: under relative noise its error grows by 0.0 ± 1.0"
    )


@pytest.mark.parametrize("name", ["architecture", "data", "examples", "batch_norm", "parameters"])
def test_other_conventions_are_refused(name):
    with pytest.raises(ValueError, match=f"not comparable: {name} is"):
        made([0.1, 0.3]).compare(made([0.1, 0.3], **{name: "other"}))
    assert made([0.1, 0.3]).compare(made([0.1, 0.3], **{name: "other"}), force=True).mean["relative"] == 0


def test_other_training_errors_and_nothing_in_common_are_refused():
    other = made([0.1, 0.3])
    other["relative"].baseline = 0.5
    with pytest.raises(ValueError, match="values without noise"):
        made([0.1, 0.3]).compare(other)
    other.entries["relative"] = Entry(reason="no")
    with pytest.raises(ValueError, match="no local energy in common"):
        made([0.1, 0.3]).compare(other)


def test_scales_that_disagree():
    a, b = made([0.1, 0.3]), made([0.2, 0.5], title="b")
    a.entries["filter"], b.entries["filter"] = b.entries["relative"], a.entries["relative"]
    assert str(a.compare(b)).startswith("Neither flatter nor sharper than b: the scales disagree")


def test_how_often_a_difference_is_called_one():
    """Of equal minima about one in twenty."""
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(400):
        a, b = (made(0.3 + 0.01 * rng.standard_normal(2)) for _ in range(2))
        seen += not str(a.compare(b)).startswith("No difference")
    assert 8 <= seen <= 34
