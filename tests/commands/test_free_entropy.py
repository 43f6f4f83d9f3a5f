"""``wideflat free-entropy`` on checkpoints, when it is stopped, and on bad input."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from wideflat import FreeEntropy
from wideflat.cli import main
from wideflat.commands.answers import plain
from wideflat.data import ImageData, ImageSplit
from wideflat.volume.network_energy import Network


@pytest.fixture
def project(builder):
    return ["free-entropy", "weights.pt", "--build", f"{builder}:build", "--sigmas", "0.3"]


def test_a_checkpoint_with_its_builder(project, tmp_path, capsys):
    assert main([*project, "--figure", "lambda.png"]) == 0
    out = capsys.readouterr().out
    found = FreeEntropy.load(tmp_path / "weights.free_entropy.json")
    assert "lambda(beta) = beta <V> at sigma = 0.3" in out and "----" in out  # log Z > 0
    assert f"{found.log_z[0]:.2f}" in out and "n = 64" in out and (tmp_path / "lambda.png").stat().st_size > 0
    assert not (tmp_path / "weights.free_entropy.unfinished.pt").exists()
    compared = ["--compare", "weights.free_entropy.json"]
    assert main([*project, "--subset", "20", "--out", "b.json", "--json", *compared]) == 1
    record = json.loads(capsys.readouterr().out)
    (refused,) = [each["refused"] for each in record["compared"]]
    assert "not comparable: examples is 20 for one and 64 for the other" in refused and "--force" in refused
    assert record["conventions"]["examples"] == 20
    assert main([*project, "--out", "c.json", *compared]) == 0
    assert "minus weights.free_entropy.json" in capsys.readouterr().out


def test_in_the_report(project, tmp_path, capsys):
    assert main([*project, "--json"]) == 0
    capsys.readouterr()
    assert main(["report", ".", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    found = FreeEntropy.load(tmp_path / "weights.free_entropy.json")
    assert record["volumes"] == {"weights.free_entropy": plain(found.to_dict())} and not record["unread"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Free entropy" in page and f"{found.log_z[0]:.2f}" in page and found.about().split(";")[0] in page


def test_ctrl_c_and_the_same_command_again(project, tmp_path, capsys, monkeypatch):
    assert main([*project, "--out", "whole.json"]) == 0
    gradient, calls = Network.gradient, [0]

    def limited(self, *arguments):
        calls[0] += 1
        if calls[0] == 30:
            raise KeyboardInterrupt
        return gradient(self, *arguments)

    monkeypatch.setattr(Network, "gradient", limited)
    assert main([*project, "--out", "part.json"]) == 130
    assert "goes on from part.unfinished.pt" in capsys.readouterr().err and not (tmp_path / "part.json").exists()
    assert main([*project, "--out", "part.json"]) == 0
    whole, part = (FreeEntropy.load(tmp_path / name) for name in ("whole.json", "part.json"))
    assert np.array_equal(whole.log_z, part.log_z) and np.array_equal(whole.stderr, part.stderr)


def test_time_is_over(project, tmp_path, capsys):
    assert main([*project, "--minutes", "0"]) == 1
    assert "not finished" in capsys.readouterr().err and (tmp_path / "weights.free_entropy.unfinished.pt").exists()


def test_quick(project, capsys):
    assert main([*project, "--quick"]) == 0
    assert "only the bracket was asked for" in capsys.readouterr().out


def test_bad_input(project, tmp_path, capsys):
    for arguments, code, words in (
        (["free-entropy", "weights.pt"], 2, "give --build module:function"),
        ([*project[:3], project[3].replace("build", "wrong")], 1, "must return (model, data)"),
        (["free-entropy", "nowhere"], 1, "there is no nowhere"),
        ([*project, "--compare", "missing.json"], 1, "missing.json"),
        ([*project, "--measure", "error"], 1, "on_errors"),
    ):
        assert main(arguments) == code
        assert words in capsys.readouterr().err
    np.savez(tmp_path / "solutions.npz", weights=np.ones(3))
    assert main(["free-entropy", "solutions.npz"]) == 2
    assert "wideflat local-entropy" in capsys.readouterr().err


def test_a_run_of_wideflat_train(tmp_path, capsys, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (20, 3, 32, 32), generator=generator).to(torch.uint8)
    split = ImageSplit(pixels, torch.randint(10, (20,), generator=generator))
    data = dataclasses.replace(
        ImageData.of("cifar10", tuple(map(str, range(10))), split, split), name="cifar10", source="nowhere"
    )
    for place in ("wideflat.data.load", "wideflat.training.flatness.load"):  # whoever has imported it already, or not
        monkeypatch.setattr(place, lambda name, folder=None, allow_altered=False: data)
    monkeypatch.chdir(tmp_path)
    train = ["train", "cifar10-smallconvnet", "--epochs", "1", "--batch-size", "20", "--no-tensorboard", "--out", "run"]
    assert main([*train, "-q"]) == 0
    assert main(["free-entropy", "run", "--sigmas", "0.02", "--subset", "8", "--quick", "-q"]) == 0
    found = FreeEntropy.load(tmp_path / "run" / "free_entropy.json")
    assert found.conventions["examples"] == 8 and "SmallConvNet" in found.conventions["architecture"]
    assert found.lower[0] <= found.upper[0] + 3 * found.points[0].upper_stderr
