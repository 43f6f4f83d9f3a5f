"""``wideflat train committee-...``."""

import json

from wideflat.cli import main


def test_the_command_trains_committee_machines(tmp_path, capsys):
    from wideflat.committee import Solutions

    arguments = ["train", "committee-sgd-fast", "--restarts", "2", "--patterns", "20", "--out", str(tmp_path / "run")]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["restarts"] == 2
    solutions = Solutions.load(tmp_path / "run" / "solutions.npz")
    assert solutions.seeds == [0, 1] and len(solutions.inputs) == 20
    assert not (tmp_path / "run" / "checkpoint.npz").exists()
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "finished already" in out and "next: wideflat local-entropy" in out and all(solutions.solved)
    assert main([*arguments, "--seed", "1"]) == 1
    assert "options.seed is 0 there and 1 here" in capsys.readouterr().err
    assert main([*arguments, "--set", "dropout=0.3"]) == 1
    assert "dropout is 0.0 there and 0.3 here" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "other"), "--set", "dropout=0.3", "max_epochs=2"]) == 0
    other = Solutions.load(tmp_path / "other" / "solutions.npz")
    assert other.setting.dropout == 0.3 and not all(other.solved)
    assert "next: wideflat local-energy" in capsys.readouterr().out  # errors keep Belief Propagation from converging
