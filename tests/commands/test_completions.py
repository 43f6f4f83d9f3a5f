"""Completion scripts, tried in the shells themselves where they are installed."""

import shutil
import subprocess

import pytest

from wideflat.cli import COMMANDS
from wideflat.commands.completions import SHELLS, script


def completed(line):
    """What bash offers at the end of a command line."""
    *words, last = line.split(" ")
    array = " ".join(f'"{word}"' for word in [*words, last])
    asked = f'COMP_WORDS=({array}); COMP_CWORD={len(words)}; _wideflat; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script('bash', COMMANDS)}\n{asked}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("wideflat rep", ["reproduce", "report"]),
        ("wideflat train cifar10-small", ["cifar10-smallconvnet"]),
        ("wideflat train committee-rsgd-f", ["committee-rsgd-fast"]),
        ("wideflat -q train x --algorithm es", ["esgd"]),
        ("wideflat reproduce fig7 --target-l", ["--target-loss"]),
        ("wideflat data fetch tiny", ["tiny-imagenet"]),
        ("wideflat presets cifar10-resnet1", ["cifar10-resnet18", "cifar10-resnet110"]),
    ],
)
def test_bash_offers_names_and_options(line, offered):
    assert completed(line) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_takes_its_script_and_it_names_everything(shell, tmp_path):
    path = tmp_path / "completion"
    path.write_text(script(shell, COMMANDS))
    text = path.read_text()
    assert all(word in text for word in (*COMMANDS, "cifar10-smallconvnet", "fig7", "tiny-imagenet", "max-passes"))
    if shutil.which(shell):
        assert subprocess.run([shell, "-n", str(path)], capture_output=True).returncode == 0
