import json

from wideflat.cli import main
from wideflat.presets import ALGORITHMS, COLUMNS, PRESETS, Preset, preset


def test_the_command_prints_the_table(capsys):
    assert main(["presets"]) == 0
    text = capsys.readouterr().out
    for expected in (*PRESETS, *ALGORITHMS, "16.5 ± 0.2", "committee-sgd-fast", "committee-rsgd-slow"):
        assert expected in text


def test_the_command_prints_a_cell_with_what_is_ours(capsys):
    assert main(["presets", "cifar10-resnet18", "--algorithm", "esgd"]) == 0
    text = capsys.readouterr().out
    assert "paper: 12.1 ± 0.3 % test error" in text
    assert "x 0.1 at epochs 16, 25" in text
    gamma = next(line for line in text.splitlines() if line.split()[:1] == ["gamma0"])
    assert gamma.split() == ["gamma0", "0.5", "ours"]
    assert main(["presets", "cifar10-pyramidnet"]) == 0
    assert "not in the paper" in capsys.readouterr().out


def test_the_command_prints_json(capsys):
    assert main(["presets", "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert {row: list(cells) for row, cells in everything["table1"].items()} == {row: list(COLUMNS) for row in PRESETS}
    assert Preset.from_dict(everything["table1"]["cifar10-resnet110"]["esgd"]) == preset("cifar10-resnet110", "esgd")
    assert len(everything["committee"]) == 5
    assert main(["presets", "committee-esgd", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["committee-esgd"]["inner_steps"] == 20
    assert main(["presets", "committee-esgd"]) == 0
    assert "inner_steps" in capsys.readouterr().out


def test_the_command_refuses_unknown_names(capsys):
    assert main(["presets", "cifar10-resnet"]) == 1
    assert "Did you mean 'cifar10-resnet18'?" in capsys.readouterr().err
