"""``wideflat local-energy`` on checkpoints, committees and bad input."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wideflat import LocalEnergy, committee_local_energy
from wideflat.cli import main


@pytest.fixture
def project(builder, tmp_path):
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    save_file(weights, tmp_path / "weights.safetensors")
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in weights.items()}}, "wrapped.ckpt")
    return builder


@pytest.mark.parametrize("file", ["weights.pt", "weights.safetensors", "wrapped.ckpt"])
def test_a_checkpoint_with_its_builder(project, tmp_path, capsys, file):
    arguments = ["local-energy", file, "--build", f"{project}:build", "--sigmas", "0.1", "0.5", "--figure", "curve.png"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    profile = LocalEnergy.load(tmp_path / f"{file.rpartition('.')[0]}.local_energy.json")
    assert f"{profile.mean[1]:.5f}" in out and "E(w) =" in out
    assert profile.conventions["examples"] == 64 and (tmp_path / "curve.png").stat().st_size > 0
    assert main([*arguments, "--json", "--seed", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["mean"] == profile.mean.tolist()


def test_layers_and_comparison(project, tmp_path, capsys):
    base = ["local-energy", "weights.pt", "--build", f"{project}:build", "--sigmas", "0.5"]
    assert main([*base, "--out", "a.json"]) == 0
    assert main([*base, "--out", "b.json", "--seed", "1", "--compare", "a.json"]) == 0
    assert "minus a.json" in capsys.readouterr().out
    assert main([*base, "--out", "c.json", "--parameters", "0.weight", "--compare", "a.json"]) == 1  # refused
    assert "not comparable: parameters is '0.weight' for one and 'all'" in capsys.readouterr().out
    assert main([*base, "--out", "d.json", "--layers"]) == 0
    assert not (tmp_path / "d.json").exists() and LocalEnergy.load(tmp_path / "d-0.json").conventions["perturbed"] == 8


def test_committees_are_exact(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    g = torch.Generator().manual_seed(0)
    weights, x = torch.randn(5, 3, 7, generator=g), torch.sign(torch.randn(20, 7, generator=g))
    y = torch.sign(torch.randn(20, generator=g))
    np.savez("solutions.npz", weights=weights.numpy(), inputs=x.numpy(), targets=y.numpy())
    for target in ("solutions.npz", "."):
        assert main(["local-energy", target, "--sigmas", "0.2", "--out", "out.json", "--overwrite"]) == 0
        profile = LocalEnergy.load("out.json")
        exact = committee_local_energy(weights, x, y, [0.2]).numpy()
        assert profile.mean == pytest.approx(exact.mean(0)) and profile.samples == pytest.approx(exact)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["weights.pt"], "give --build module:function"),
        (["weights.pt", "--build", "nowhere"], "must be module:function"),
        (["weights.pt", "--build", "no_such_module:build"], "no_such_module"),
        (["weights.pt", "--build", "PROJECT:nothing"], "has no function nothing"),
    ],
)
def test_a_wrong_builder_is_an_error_of_usage(project, capsys, arguments, message):
    assert main(["local-energy", *(argument.replace("PROJECT", project) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["weights.pt", "--build", "PROJECT:wrong"], "must return (model, data)"),
        (["nothing.pt", "--build", "PROJECT:build"], "there is no checkpoint nothing.pt"),
        (["broken.pt", "--build", "PROJECT:build"], "cannot be read as a checkpoint"),
        (["evil.pt", "--build", "PROJECT:build"], "cannot be read as a checkpoint"),
        (["other.pt", "--build", "PROJECT:build"], "does not fit the model"),
        (["no_such_run"], "there is no no_such_run"),
        (["weights.pt", "--build", "PROJECT:build", "--compare", "none.json"], "none.json"),
    ],
)
def test_bad_input_is_named_without_a_traceback(project, tmp_path, capsys, arguments, message):
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04 not a zip")
    torch.save({"weight": Evil()}, tmp_path / "evil.pt")
    torch.save(nn.Sequential(nn.Linear(4, 2)).state_dict(), tmp_path / "other.pt")
    assert main(["local-energy", *(argument.replace("PROJECT", project) for argument in arguments)]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "executed").exists()


class Evil:
    """What a malicious pickle looks like: it is refused, not executed."""

    def __reduce__(self):
        return (open, ("executed", "w"))


def test_ctrl_c_writes_what_was_measured(project, tmp_path, monkeypatch, capsys):
    from wideflat.energy.profile import Interrupted

    def interrupted(model, data, sigmas, **options):
        raise Interrupted(LocalEnergy(sigmas, [0.1], [0.01], 0.0, complete=False))

    monkeypatch.setattr("wideflat.commands.local_energy.local_energy", interrupted)
    code = main(["local-energy", "weights.pt", "--build", f"{project}:build", "--sigmas", "0.5", "--out", "part.json"])
    assert code == 130 and not LocalEnergy.load(tmp_path / "part.json").complete
    assert "interrupted" in capsys.readouterr().err


def test_a_run_with_the_augmentation_of_its_training(tmp_path, monkeypatch, capsys):
    from wideflat.data import ImageData, ImageSplit
    from wideflat.presets import preset
    from wideflat.training import train

    g = torch.Generator().manual_seed(0)
    part = ImageSplit(torch.randint(256, (48, 3, 32, 32), generator=g).to(torch.uint8), torch.arange(48) % 10)
    images = ImageData.of("generated", tuple("0123456789"), part, part)
    train(
        preset("cifar10-smallconvnet", "sgd").with_epochs(1),
        tmp_path / "run",
        images,
        progress=False,
        tensorboard=False,
    )
    monkeypatch.setattr("wideflat.training.flatness.load", lambda *_, **__: images)
    assert main(["local-energy", str(tmp_path / "run"), "--sigmas", "0", "0.5", "--metric", "loss"]) == 0
    profile = LocalEnergy.load(tmp_path / "run" / "local_energy.json")
    assert profile.conventions["examples"] == 48 and profile.conventions["augmented"]
    assert profile.mean[0] == 0 and profile.mean[1] != 0
    assert main(["local-energy", str(tmp_path / "run"), "--epoch", "7"]) == 1
    assert "snapshot at epoch 7" in capsys.readouterr().err


def test_the_scale_of_the_noise_is_an_option(project, tmp_path, capsys):
    base = ["local-energy", "weights.pt", "--build", f"{project}:build", "--sigmas", "0.5"]
    assert main([*base, "--out", "a.json"]) == 0
    assert main([*base, "--out", "b.json", "--scale", "filter", "--compare", "a.json"]) == 1
    assert "scale is 'filter' for one and 'relative' for the other" in capsys.readouterr().out
    assert LocalEnergy.load("b.json").conventions["scale"] == "filter"
    np.savez("c.npz", weights=np.ones((1, 1, 2)), inputs=np.ones((1, 2)), targets=np.ones(1))
    assert main(["local-energy", "c.npz", "--scale", "layer"]) == 2
    assert "relative noise" in capsys.readouterr().err
