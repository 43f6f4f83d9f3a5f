"""``--json`` of every command: one object on standard output, numbers as numbers, and nothing else there."""

import importlib
import importlib.util
import json
import re
import shutil
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

from wideflat import cli
from wideflat.commands.answers import alone_on_stdout, answer, plain
from wideflat.experiments import ITEMS
from wideflat.experiments.experiment import Experiment
from wideflat.experiments.statistics import mean_and_spread

RESULTS = Path(__file__).parents[2] / "results"
_spec = importlib.util.spec_from_file_location("small_world", Path(__file__).parents[1] / "small_world.py")
small_world = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small_world)

OWN = "--data npz:digits.npz --build my_project.nets:network"
TRAIN = f"train cifar10-smallconvnet {OWN} --epochs 1 --batch-size 16"
COMMITTEE = "train committee-sgd-fast --patterns 40 --restarts 2 --set max_epochs=20"
#: The shortest way through each command. A new one needs a line here.
LINES = {
    "demo": [],  # tests/experiments/test_demo.py, which has one that takes seconds
    "presets": ["presets", "presets cifar10-resnet18", "presets committee-esgd"],
    "train": [f"{TRAIN} --out a", f"{TRAIN} --out b --seed 1", f"{COMMITTEE} --out c"],
    "local-energy": [
        "local-energy a --build my_project.nets:network --sigmas 0 0.3 --max-passes 1",
        "local-energy b --build my_project.nets:network --sigmas 0 0.3 --max-passes 1 --compare a/local_energy.json",
        "local-energy b --build my_project.nets:network --sigmas 0.3 --max-passes 1 --layers",
        "local-energy c --sigmas 0 0.1",
    ],
    "local-entropy": ["local-entropy c --deltas 0.1 1 --on-errors drop"],
    "free-entropy": ["free-entropy a --build my_project.nets:network --subset 6 --quick --sigmas 0.3"],
    "card": ["card a --build my_project.nets:network --quick --examples 8"],
    "reproduce": [],  # by item, below
    "report": ["report a b c"],
    "data": ["data list", "data verify dress-coat"],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with data, a network and, after the first lines, runs."""
    folder = tmp_path_factory.mktemp("world")
    small_world.furnish(folder)
    return folder


def one_object(text: str) -> dict:
    """What standard output holds, which must be one JSON object as the standard has it."""

    def refuse(word):
        raise AssertionError(f"{word} is no number of JSON")

    found = json.loads(text, parse_constant=refuse)
    assert isinstance(found, dict) and found
    return found


def texts(value, where="") -> list[tuple[str, str]]:
    """Every text in it, with where it is."""
    if isinstance(value, dict):
        return [pair for name, item in value.items() for pair in texts(item, f"{where}.{name}")]
    if isinstance(value, list):
        return [pair for item in value for pair in texts(item, where)]
    return [(where, value)] if isinstance(value, str) else []


def numbers_as_text(found: dict) -> list[tuple[str, str]]:
    number = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
    pattern = re.compile(rf"{number}( ?%|/\d+)?( (±|\+-) {number}.*)?|[-+]?(nan|inf|infinity)|[-–]", re.I)
    return [(where, text) for where, text in texts(found) if pattern.fullmatch(text)]


def test_every_command_is_asked():
    assert LINES.keys() == cli.COMMANDS.keys()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_the_option(name):
    kind = importlib.import_module(f"wideflat.commands.{name.replace('-', '_')}").Command
    assert typing.get_type_hints(kind)["json"] is bool


@pytest.mark.parametrize("line", [line for lines in LINES.values() for line in lines])
def test_one_object_of_numbers(line, world, monkeypatch, capfd):
    monkeypatch.chdir(world)
    monkeypatch.setenv("HOME", str(world))
    code = cli.main([*line.split(), "--json"])
    said = capfd.readouterr()
    assert code in (0, 1), said.err
    assert not numbers_as_text(one_object(said.out))


#: What makes an item short that has no tables in results/.
SHORT = {
    "fig2": "",
    "fig3": "--sigmas 0 0.5 --max-passes 1",
    "fig5": "--sigmas 0 0.5 --max-passes 1",
}
TABLES = {"volume": "volume-sigma-0.1"}


@pytest.mark.parametrize("name", ITEMS)
def test_every_item_of_reproduce(name, tmp_path, monkeypatch, capfd):
    for dictionary, key, value in small_world.shrink():
        monkeypatch.setitem(dictionary, key, value)
    monkeypatch.setattr(Experiment, "write_report", lambda self: self.folder / "report.html")  # drawing takes seconds
    line = ["reproduce", name, "--out", str(tmp_path), "--json"]
    if name in SHORT:
        small = "--workers 1 --quick --limit-data 32 --epochs 1 --seeds 1 --algorithms sgd"
        line += [*small.split(), *SHORT[name].split()]
    else:
        shutil.copytree(RESULTS / TABLES.get(name, name), tmp_path / name)
        line += ["--redraw"]
    assert cli.main(line) == 0
    found = one_object(capfd.readouterr().out)
    assert not numbers_as_text(found) and found["item"] == name and found["rows"]


def test_all_items_are_one_object(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Experiment, "write_report", lambda self: self.folder / "report.html")
    for name in ("fig1", "fig6"):
        shutil.copytree(RESULTS / name, tmp_path / name)
    assert cli.main(["reproduce", "all", "--out", str(tmp_path), "--json", "--redraw"]) == cli.FAILED
    found = one_object(capfd.readouterr().out)
    assert [item["item"] for item in found["items"]] == ["fig1", "fig6"]
    assert found["failed"].keys() == ITEMS.keys() - {"fig1", "fig6"}


def test_what_else_is_printed_goes_beside_the_object(capsys):
    with alone_on_stdout(True):
        print("on the way")
        answer({"error": np.float32(0.5)})
    said = capsys.readouterr()
    assert json.loads(said.out) == {"error": 0.5} and said.err == "on the way\n"


def test_a_number_is_never_printed_as_text():
    assert plain({"n": np.int64(3), "errors": torch.tensor([0.5, torch.nan]), "gap": "inf"}) == {
        "n": 3,
        "errors": [0.5, None],
        "gap": None,
    }
    for value in (mean_and_spread(np.array([1.0, 2.0])), {1, 2}, object()):
        with pytest.raises(TypeError, match="JSON has no form"):
            plain([value])
