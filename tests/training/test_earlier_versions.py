"""What commit 85c623f wrote goes on and is read; `earlier_runs.py` made it there."""

import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import wideflat
from wideflat.energy.series import LocalEnergyTrace
from wideflat.experiments.table import Table
from wideflat.hessian.curvature import Curvature, curvature
from wideflat.training import Options, Training, train

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the network of the runs is named by its module
import earlier_runs  # noqa: E402

sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    with zipfile.ZipFile(HERE / "written_by_85c623f.zip") as archive:
        archive.extractall(folder)
    return folder


def resumed(run, algorithm, monkeypatch):
    """The run when it is finished here, and the iterations that were made for it."""
    made, iterate = [], Training.iterate

    def counted(training):
        made.append(training.step)
        return iterate(training)

    monkeypatch.setattr(Training, "iterate", counted)
    quiet = {"tensorboard": False, "progress": False}
    return train(earlier_runs.experiment(algorithm), run, earlier_runs.images(), Options(), **quiet), made


@pytest.mark.parametrize("algorithm", earlier_runs.ALGORITHMS)
def test_a_run_begun_and_stopped_there_ends_here_as_it_would_have_there(written, tmp_path, monkeypatch, algorithm):
    path = shutil.copytree(written / "runs" / algorithm, tmp_path / algorithm)
    run, made = resumed(path, algorithm, monkeypatch)
    assert made[0] == earlier_runs.STOPPED, "it began anew"
    weights = load_file(run.path / "model.safetensors")
    there = load_file(written / "finished" / f"{algorithm}.safetensors")
    assert weights.keys() == there.keys()
    for name, value in there.items():  # bit for bit where they were made; other processors round otherwise
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    rows, expected = run.metrics(), json.loads((written / "finished" / f"{algorithm}.json").read_text())
    assert len(rows) == len(expected) > 0
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() >= other.keys()
        for key, value in other.items():
            assert row[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


def test_with_noise_it_goes_on_with_the_noise_of_today(written, tmp_path, monkeypatch):
    """The state is read; the numbers to come have tails, so the end is near the old one, not on it."""
    path = shutil.copytree(written / "runs" / "esgd-noise", tmp_path / "run")
    run, made = resumed(path, "esgd-noise", monkeypatch)
    assert made[0] == earlier_runs.STOPPED
    weights = load_file(run.path / "model.safetensors")
    for name, value in load_file(written / "finished" / "esgd-noise.safetensors").items():
        torch.testing.assert_close(weights[name], value, rtol=0.05, atol=0.05)


def test_another_experiment_does_not_go_on_in_such_a_run(written, tmp_path):
    path = shutil.copytree(written / "runs" / "sgd", tmp_path / "run")
    with pytest.raises(ValueError, match="holds another experiment"):
        train(earlier_runs.experiment("rsgd"), path, earlier_runs.images(), Options(), progress=False)


def test_a_profile_is_read_and_measured_again(written):
    there = wideflat.LocalEnergy.load(written / "results" / "local_energy.json")
    model, data = earlier_runs.measured()
    sigmas = torch.tensor(earlier_runs.SIGMAS)
    here = wideflat.local_energy(model, data, sigmas, noise="batch", max_passes=2, progress=False)
    assert there.mean[1:].any()
    torch.testing.assert_close(torch.as_tensor(there.mean), torch.as_tensor(here.mean))
    torch.testing.assert_close(torch.as_tensor(there.stderr), torch.as_tensor(here.stderr))
    assert not there.compare(here).mean.any()


def test_profiles_along_a_training_are_read(written):
    profiles = LocalEnergyTrace.load(written / "results" / "trace.json")
    alone = wideflat.LocalEnergy.load(written / "results" / "local_energy.json")
    assert list(profiles) == [3] and (profiles[3].mean == alone.mean).all()


def test_a_curvature_is_read_and_measured_again(written):
    there = Curvature.load(written / "results" / "curvature.json")
    here = curvature(*earlier_runs.measured(), top=1, progress=False)
    assert there.eigenvalues == pytest.approx(here.eigenvalues, rel=1e-3)


def test_a_local_entropy_is_read_and_computed_again(written):
    there = wideflat.LocalEntropy.load(written / "results" / "curve.npz")
    here = wideflat.local_entropy(*earlier_runs.committee(), deltas=torch.tensor([0.01, 0.1]), progress=False)
    assert there.converged.all() and (there.phi < 0).all()
    torch.testing.assert_close(torch.as_tensor(there.phi), torch.as_tensor(here.phi), rtol=1e-8, atol=1e-8)


def test_a_table_is_read(written):
    table = Table.load(written / "results" / "table.csv")
    assert list(table) == [{"algorithm": "sgd", "n": 3, "error": 12.5}, {"algorithm": "esgd", "n": 3, "error": None}]
    assert table.provenance == {"about": "made by hand"}
