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
    assert main(["presets", "cifar10-resnet"]) == 2
    assert "Did you mean 'cifar10-resnet18'?" in capsys.readouterr().err


def test_the_command_says_in_what_the_program_differs(capsys):
    assert main(["presets", "cifar10-smallconvnet", "--algorithm", "rsgd"]) == 0
    text = capsys.readouterr().out
    printed, coded = text.split("with --as-coded, as in the authors' program:")
    assert "weight_decay          0.0001" in printed and "program" not in printed.split("ours, not the paper's")[0]
    rows = {line.split()[0]: line.split()[1] for line in coded.strip().splitlines()}
    assert (rows["weight_decay"], rows["gamma0"], rows["gamma_clock"]) == ("0.0003", "0.002", "epoch")
    assert main(["presets", "cifar10-smallconvnet", "--algorithm", "rsgd", "--as-coded"]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.split()[:1] == ["weight_decay"])
    assert row.split() == ["weight_decay", "0.0003", "program"]
    assert "the authors' program's, not the paper's:" in text
    assert main(["presets", "tinyimagenet-densenet", "--algorithm", "sgd"]) == 0
    assert "nothing of this cell is known to differ" in capsys.readouterr().out
    assert main(["presets", "cifar10-resnet18", "--algorithm", "sam", "--as-coded"]) == 2
    assert "must be one of sgd, rsgd, esgd, rsgdxy" in capsys.readouterr().err


def test_every_value_that_is_ours_is_marked(capsys):
    """What the paper does not print, beside the rest that test_table1 checks."""
    for row, algorithm, field in [
        ("cifar10-smallconvnet", "rsgd", "gamma_factor"),
        ("cifar10-resnet110", "rsgdxy", "gamma_factor"),
        ("cifar10-resnet110", "rsgd", "nesterov"),
        ("cifar100-efficientnet", "rsgd", "gamma_factor"),
        ("cifar100-efficientnet", "sgd", "optimizer"),
        ("cifar10-resnet18", "sgd", "model_arguments"),
        ("cifar10-resnet18", "rsgd", "batch_norm"),
        ("cifar10-resnet18", "rsgd", "start"),
    ]:
        assert main(["presets", row, "--algorithm", algorithm]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert next(words for words in lines if words[:1] == [field])[-1] == "ours", (row, algorithm, field)
