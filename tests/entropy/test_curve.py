"""The curve: read off between its points, drawn, saved, loaded."""

import numpy as np
import pytest
import torch
from small_committees import committee

import wideflat
from wideflat.entropy import LocalEntropy


def test_phi_between_the_points():
    w, x, y = committee(references=2)
    curve = wideflat.local_entropy(w, x, y, deltas=[0.1, 0.2, 0.4])
    middle = curve.at(0.1)
    assert middle.shape == (2,) and (curve.phi[:, 2] < middle).all() and (middle < curve.phi[:, 0]).all()
    assert curve.at([0.001, 0.1]).shape == (2, 2) and curve.at(0.001).isnan().all()
    curve.converged[0, 1] = False  # then the neighbours are used
    straight = curve.at(curve.relative_distance[0, 1].item())
    assert straight[0] != curve.phi[0, 1] and straight[0].isfinite()


def test_points_that_did_not_converge_are_marked_and_not_drawn():
    w, x, y = committee()
    curve = wideflat.local_entropy(w[0], x, y, deltas=[0.1, 0.3, 1.0])
    curve.converged[1] = False
    assert curve.status.tolist() == ["converged", "not converged", "converged"]
    assert str(curve).splitlines()[2].endswith("not converged")
    assert f"{curve.log_z[1]:.5f}" not in str(curve)
    ax = curve.plot()
    drawn = ax.lines[0].get_ydata()
    assert np.isnan(drawn[1]) and np.isfinite(drawn[[0, 2]]).all()


def test_plot_of_many_references_and_of_samples():
    w, x, y = committee(num_inputs=20, patterns=10, references=2)
    curve = wideflat.local_entropy(w, x, y, [0.5, 1.0], compare=True, particles=50, runs=2, sweeps=3)
    ax = curve.plot(label="bp")
    assert len(ax.lines) == 3 and ax.get_xlabel() == "d / D"
    assert curve.others["sample"].plot(ax) is ax and len(ax.containers) == 2


def test_saved_and_loaded(tmp_path):
    w, x, y = committee(num_inputs=20, patterns=10)
    curve = wideflat.local_entropy(w[0], x, y, [0.5, 1.0], compare=True, particles=50, runs=2, sweeps=3)
    curve.save(tmp_path / "curve.npz")
    again = LocalEntropy.load(tmp_path / "curve.npz")
    for one, other in ((curve, again), *((curve.others[m], again.others[m]) for m in curve.others)):
        for name in ("deltas", "phi", "log_z", "distance", "converged", "training_errors", "iterations", "residual"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert (one.method, one.num_weights, one.on_errors) == (other.method, other.num_weights, other.on_errors)
    content = (tmp_path / "curve.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cut\.npz is not a whole"):
        LocalEntropy.load(tmp_path / "cut.npz")
    np.savez(tmp_path / "other.npz", phi=np.zeros(3))
    with pytest.raises(ValueError, match="is not a curve"):
        LocalEntropy.load(tmp_path / "other.npz")
