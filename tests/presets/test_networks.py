"""Networks by name: a file names those of this package alone, a preset made in Python any function."""

import sys

import pytest

from wideflat import models
from wideflat.presets.networks import NETWORKS, chosen_network, listed_network


def test_every_name_is_that_of_its_function():
    for name, make in NETWORKS.items():
        assert listed_network(name) is chosen_network(name) is make
        if ":" not in name:
            assert make is getattr(models, name)


@pytest.mark.parametrize("name", ["os:system", "torch.nn:Linear", "smalconvnet", "", None, 3])
def test_a_file_names_nothing_else_and_nothing_is_imported(name, tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").write_text("def build(): pass")
    monkeypatch.syspath_prepend(tmp_path)
    for each in (name, "never_imported:build"):
        with pytest.raises(ValueError, match=r"files only name networks of wideflat: densenet121, .*--build"):
            listed_network(each)
    assert "never_imported" not in sys.modules


def test_a_function_of_ones_own_is_imported_when_it_is_chosen(tmp_path, monkeypatch):
    (tmp_path / "my_presets_network.py").write_text("def build():\n    return 'mine'\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert chosen_network("my_presets_network:build")() == "mine"
    for name, message in (
        ("my_presets_network:missing", "there is no function 'missing' in the module 'my_presets_network'"),
        ("my_presets_network:number", "there is no function 'number'"),
        ("no_such_module:build", "the module 'no_such_module' cannot be imported"),
        (":build", "there is no function 'build' in the module ''"),
        ("resnet-18", "Did you mean 'resnet18'"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen_network(name)
