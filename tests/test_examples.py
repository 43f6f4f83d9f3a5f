"""Every example runs, on little data, and is short."""

import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
#: What makes each of them short, and what it must print.
SCRIPTS = {
    "plain_loop.py": (["--steps", "3"], "Entropy-SGD: test error"),
    "huggingface_trainer.py": (["--steps", "2"], "loss of the center:"),
    "lightning_module.py": (["--epochs", "1"], "validation error of the center:"),
    "measure_checkpoint.py": (["--steps", "3"], "log Z"),
    "committee.py": (["--restarts", "1", "--patterns", "40"], "local entropy"),
}


def test_there_are_at_most_six_of_at_most_sixty_lines():
    scripts = sorted(path.name for path in FOLDER.glob("*.py"))
    assert scripts == sorted([*SCRIPTS, "torchrun_replicas.py"])
    assert all(len(path.read_text().splitlines()) <= 60 for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs(name, monkeypatch, capsys):
    arguments, printed = SCRIPTS[name]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with warnings.catch_warnings():
        if name in ("huggingface_trainer.py", "lightning_module.py"):
            warnings.simplefilter("ignore")  # of the trainers about themselves
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert printed in capsys.readouterr().out


def test_replicas_run_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(FOLDER / "torchrun_replicas.py"), "--steps", "20"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "test error of the barycenter" in done.stdout
