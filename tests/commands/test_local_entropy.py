"""`wideflat local-entropy`: a run's curve, compared, as JSON, interrupted; files that are wrong."""

import json

import numpy as np
import pytest
from small_committees import committee, interrupt_after

from wideflat.cli import main
from wideflat.entropy import LocalEntropy


@pytest.fixture
def solutions(tmp_path):
    w, x, y = committee(num_inputs=20, patterns=10, references=2)
    run = tmp_path / "run"
    run.mkdir()
    np.savez(run / "solutions.npz", weights=w.numpy(), inputs=x.numpy(), targets=y.numpy())
    return run


def test_a_run_directory(solutions, capsys):
    figure = solutions / "curve.svg"
    assert main(["local-entropy", str(solutions), "--deltas", "0.1", "1", "--figure", str(figure)]) == 0
    printed = capsys.readouterr().out
    assert "2 solutions" in printed and "relaxed Belief Propagation" in printed and "converged (2 of 2)" in printed
    assert LocalEntropy.load(solutions / "local_entropy.npz").phi.shape == (2, 2)
    assert figure.read_text().startswith("<?xml")


def test_comparison_as_json(solutions, tmp_path, capsys):
    options = ["--deltas", "0.5", "--first", "1", "--compare", "--json", "--particles", "50", "--runs", "2"]
    out = tmp_path / "out.npz"
    file = solutions / "solutions.npz"
    assert main(["local-entropy", str(file), *options, "--sweeps", "3", "--out", str(out)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["status"] == [["converged"]] and set(record["others"]) == {"tap", "ep", "ep-vector", "sample"}
    assert record["others"]["sample"]["log_z_stderr"][0][0] > 0
    assert out.exists()
    again = [*options[:-6], "--compare", "--sweeps", "3", "--out", str(out), "--overwrite"]
    assert main(["local-entropy", str(file), *again]) == 0
    assert "log Z by method" in capsys.readouterr().out


def test_ctrl_c_leaves_a_whole_result_alone(solutions, monkeypatch, capsys):
    options = ["local-entropy", str(solutions), "--deltas", "0.1", "1"]
    assert main(options) == 0
    interrupt_after(monkeypatch, 1)
    assert main([*options, "--figure", str(solutions / "part.png")]) == 130
    printed = capsys.readouterr()
    assert "not computed" in printed.out and "interrupted" in printed.err and "not converge" not in printed.err
    assert LocalEntropy.load(solutions / "local_entropy.npz").converged.all()
    part = LocalEntropy.load(solutions / "local_entropy-2.interrupted.npz")
    assert part.converged.tolist() == [[True, False], [True, False]]
    assert (solutions / "part.png").exists()


def test_training_errors_are_said(solutions, capsys):
    with np.load(solutions / "solutions.npz") as archive:
        arrays = dict(archive)
    arrays["targets"][0] *= -1
    np.savez(solutions / "solutions.npz", **arrays)
    main(["local-entropy", str(solutions), "--deltas", "0.5"])
    assert "2 of them have training errors (up to 1)" in capsys.readouterr().out


def test_wrong_files(tmp_path, capsys):
    assert main(["local-entropy", str(tmp_path)]) == 1
    assert "there is no" in capsys.readouterr().err
    np.savez(tmp_path / "solutions.npz", weights=np.ones((3, 4)))
    assert main(["local-entropy", str(tmp_path)]) == 1
    assert "has no array inputs and no targets" in capsys.readouterr().err
    (tmp_path / "solutions.npz").write_bytes(b"PK\x03\x04 not a zip")
    assert main(["local-entropy", str(tmp_path)]) == 1
    assert "not a whole .npz file" in capsys.readouterr().err
    np.savez(tmp_path / "evil.npz", weights=np.array([{}]), inputs=np.ones((2, 2)), targets=np.ones(2))
    assert main(["local-entropy", str(tmp_path / "evil.npz")]) == 1
    assert "pickle" in capsys.readouterr().err
