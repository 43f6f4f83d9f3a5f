import json
import math

import numpy as np
import pytest

import wideflat
from wideflat.volume.volume import Integration
from wideflat.volume.volumes import FreeEntropy


def entropy(log_z=-4.0, **change):
    point = Integration(0.5, 1.0, log_z, 0.5, 20.0, lower=-9.0, upper=-2.0, beta_low=0.1, ratio=0.9, phi=-0.01)
    point.betas, point.llc, point.llc_stderr = [0.1, 0.5, 1.0], [0.5, 1.0, 2.0], [0.1, 0.1, 0.2]
    point.up, point.down, point.prior_mean, point.prior_stderr = [0.5, 1.1, 2.1], [0.5, 0.9, 1.9], 9.0, 1.0
    conventions = {
        "measure": "loss",
        "beta": 1.0,
        "scale": "relative",
        "parameters": "all",
        "examples": 100,
        "at_w": 0.1,
    }
    return FreeEntropy([point], {**conventions, **change})


def test_saved_and_loaded(tmp_path):
    one = entropy()
    one.points[0].gap_stderr, one.points[0].lower = math.nan, -math.inf
    one.save(tmp_path / "entropy.json")
    two = FreeEntropy.load(tmp_path / "entropy.json")
    assert str(two) == str(one) and two.to_dict() == one.to_dict() and math.isnan(two.points[0].gap_stderr)
    json.loads((tmp_path / "entropy.json").read_text(), parse_constant=pytest.fail)
    (tmp_path / "entropy.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a whole free entropy"):
        FreeEntropy.load(tmp_path / "entropy.json")


def test_compared():
    difference = entropy(-4.0).compare(entropy(-6.0))
    assert difference.mean.tolist() == [2.0] and difference.stderr[0] == pytest.approx(0.5 * math.sqrt(2))
    assert difference.deviations[0] == pytest.approx(2 / 0.5 / math.sqrt(2)) and "0.1" in difference.note
    with pytest.raises(ValueError, match="examples is 100 for one and 50 for the other"):
        entropy().compare(entropy(examples=50))
    refused = entropy()
    refused.points[0].flags = {"gap": "+9 +- 1"}
    with pytest.raises(ValueError, match=r"not converged at sigma = 0.5"):
        entropy().compare(refused)
    assert entropy().compare(refused, force=True).mean.tolist() == [0.0]


def test_looked_at():
    found = entropy()
    found.points[0].flags = {"gap": "+9 +- 1"}
    text = str(found)
    assert "no: gap" in text and "chains from above and from below disagree" in text and "n = 100" in text
    assert "&lt;" not in text and "<table>" in found._repr_html_()
    assert found.local_energy[0].tolist() == [0.09] and found.llc[0].value.tolist() == [0.5, 1.0, 2.0]
    ax = found.plot()
    assert ax.get_xscale() == "log" and "not converged" in ax.get_legend().get_texts()[0].get_text()
    assert np.isclose(found.relative_distance[0], 0.5 * 0.25 * 0.9)


def test_the_names_that_users_rely_on():
    assert wideflat.FreeEntropy is FreeEntropy and callable(wideflat.free_entropy)
    for name in ("log_z", "stderr", "dof", "lower", "upper", "gap", "quadrature", "phi", "llc", "converged", "reasons"):
        assert hasattr(entropy(), name)
