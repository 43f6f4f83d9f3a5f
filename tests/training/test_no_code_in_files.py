"""A run directory names no code: what lies in it never runs."""

import dataclasses
import importlib
import json
import sys

import pytest
import torch
from small_trainings import QUIET
from torch import nn

from wideflat.cli import main
from wideflat.data import load
from wideflat.experiments.cells import quick_cell
from wideflat.experiments.trainings import forward_operations
from wideflat.presets import Preset, preset
from wideflat.presets.networks import NETWORKS
from wideflat.training import Options, Run, train

HUBCONF = """
from pathlib import Path
Path({mark!r}).write_text("executed")
def network(num_classes=2, **more):
    import torch
    return torch.nn.Linear(1, num_classes)
"""
#: A network of the user's, in a module of the user's.
OWN = """
from torch import nn
def network(num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16, num_classes))
def nothing():
    return 3
"""


def cell(**changes):
    return dataclasses.replace(quick_cell(preset("cifar10-resnet18")), batch_size=32, **changes).with_epochs(1)


def trained(out, **changes):
    return train(cell(**changes), out, load("dress-coat"), Options(limit_data=64), **QUIET)


@pytest.fixture
def hostile(tmp_path):
    """A finished run whose configuration names torch.hub.load of a folder with a hubconf.py."""
    run, mark = trained(tmp_path / "run"), tmp_path / "mark"
    (run.path / "hubconf.py").write_text(HUBCONF.format(mark=str(mark)))
    config = json.loads((run.path / "config.json").read_text())
    config["experiment"]["model"] = "torch.hub:load"
    config["experiment"]["model_arguments"] = [
        *(["repo_or_dir", str(run.path)], ["model", "network"], ["source", "local"], ["trust_repo", True])
    ]
    (run.path / "config.json").write_text(json.dumps(config))
    return run.path, mark


@pytest.mark.parametrize("command", ["local-energy", "free-entropy"])
def test_a_command_does_not_run_what_a_configuration_names(hostile, capsys, command):
    path, mark = hostile
    assert main([command, str(path)]) == 1
    assert "files only name networks of wideflat" in capsys.readouterr().err
    assert not mark.exists()


def test_a_report_of_it_is_written_without_running_it(hostile, tmp_path):
    path, mark = hostile
    assert main(["report", str(path), "--out", str(tmp_path / "report.html")]) == 0
    assert not mark.exists()


def test_nothing_in_python_runs_it_either(hostile):
    path, mark = hostile
    read = Preset.from_dict(Run.open(path).config["experiment"])
    for use in (
        Run.open(path).load_model,
        Run.open(path).build_model,
        read.build_model,
        lambda: read.with_stem("cifar"),
        lambda: forward_operations(read),
        dataclasses.replace(read, lr=1.0).build_model,  # made from what was read: as little trusted
    ):
        with pytest.raises(ValueError, match="files only name networks of wideflat"):
            use()
    assert not mark.exists()


def test_the_list_is_of_networks_and_of_all_that_presets_name():
    from wideflat.presets import PRESETS

    assert {each.model for row in PRESETS.values() for each in row.values()} <= set(NETWORKS)
    assert cell().model in NETWORKS  # of the reduced forms, in runs of every version
    assert "kaiming_normal" not in NETWORKS
    with pytest.raises(ValueError, match="do not fit smallconvnet"):
        Preset.from_dict(cell(model="smallconvnet", model_arguments=(("nonsense", 1),)).to_dict()).build_model()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's in the current folder, and a preset of the user's that names its network."""
    monkeypatch.chdir(tmp_path)
    name = f"own_{abs(hash(tmp_path)) % 10**9}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield name
    sys.modules.pop(name, None)


def test_a_network_of_ones_own_is_trained_and_loaded_by_whoever_names_it(own, capsys):
    mine = {"model": f"{own}:network", "model_arguments": ()}
    run, again = trained("run", **mine), trained("run", **mine)  # the user's preset: finished already
    weights = run.load_model().state_dict()
    torch.testing.assert_close(again.load_model().state_dict(), weights, rtol=0, atol=0)
    read = Run.open("run")
    with pytest.raises(ValueError, match=r"own_.* was named by a file.*--build module:function"):
        read.load_model()
    build = importlib.import_module(own).network
    torch.testing.assert_close(read.load_model(build=build).state_dict(), weights, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"build must return a torch\.nn\.Module, got 3"):
        read.load_model(build=lambda: 3)
    with pytest.raises(ValueError, match="does not fit the network of run"):
        read.load_model(build=lambda: nn.Linear(1, 1))
    base = ["local-energy", "run", "--sigmas", "0.1", "--max-passes", "1"]
    assert main([*base, "--build", f"{own}:network"]) == 0
    few = ["--quick", "--sigmas", "0.1", "--subset", "8"]
    assert main(["free-entropy", "run", *few, "--build", f"{own}:network"]) in (0, 1)  # measured, converged or not
    capsys.readouterr()
    assert main([*base, "--build", f"{own}:nothing"]) == 1
    assert "build must return a torch.nn.Module" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "3", '{"format": "x"}', "[" * 100_000, '{"experiment": 3}', "{}"])
def test_a_configuration_of_another_kind_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(RuntimeError, match=r"config\.json"):
        Run.open(tmp_path).load_model()
