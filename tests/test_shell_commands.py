"""Every shell command of README, docs and of the commands' own help is run, or at least read by the real parser.

Blocks marked ``sh`` are run line by line, each in a folder of its own, in a world where data and presets are small
(`small_world`). Commands inside of sentences are read: no option, preset, algorithm or item in them can be wrong. A new
command in a document is found by itself; what cannot be run is below, by name, with its reason.
"""

import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import tyro

from wideflat import cli
from wideflat.commands import train

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`(wideflat [^`]+)`")
_spec = importlib.util.spec_from_file_location("small_world", Path(__file__).with_name("small_world.py"))
small_world = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small_world)

#: What is not run, by how it begins or by a word in it, and why. It is read all the same.
NOT_RUN = {
    "make": "installs, or runs these very tests; its targets are looked up",
    "pip": "installs; the extras are looked up, and tools/check_wheel.py installs them",
    "npm": "asks a registry",
    "python tools/cifar10_from_npm.py": "needs what npm fetched",
    "wideflat data verify cifar10": "needs what the authors' page or npm has",
    "wideflat data fetch": "downloads",
    "torchft_lighthouse": "a service that does not end",
    "srun": "needs a Slurm cluster",
    "--engine": "needs a Slurm cluster",
    "--lighthouse": "needs three machines and the service",
    "--nnodes": "needs two machines",
    "public_data/": "needs the networks of the PGDL competition",
}
SMALL_VGG = ["--dropouts", "0", "0.5", "--batch-sizes", "16", "--weight-decays", "0", "--widths", "4", "4", "4"]
#: Options that make a command short which no smaller data do; the last of an option counts.
SHORTER = {
    "train committee-": ["--restarts", "2", "--patterns", "40"],
    "train --fault-tolerant": ["--epochs", "1", "--data", "npz:digits.npz"],  # its jobs are other processes
    "local-energy": ["--max-passes", "1"],
    "free-entropy": ["--subset", "6", "--quick"],
    "local-entropy": ["--deltas", "0.1"],
    "reproduce fig1": ["--quick", "--restarts", "1", "--size", "40", "--settings", "sgd-fast"],
    "reproduce fig6": ["--quick", "--restarts", "1", "--size", "40"],
    "reproduce table1": ["--workers", "1", "--limit-data", "32"],
    "reproduce fig2": ["--workers", "1", "--limit-data", "32", "--epochs", "1"],
    "reproduce fig4": ["--workers", "1", "--limit-data", "32", "--epochs", "1", "--seeds", "1"],
    "reproduce fig7 --models": ["--workers", "1", "--quick", "--realisations", "2"],
    "reproduce fig7": [
        "--workers",
        "1",
        "--quick",
        "--realisations",
        "2",
        "--epochs",
        "1",
        "--limit-data",
        "32",
        *SMALL_VGG,
    ],
    "reproduce volume --models": ["--workers", "1", "--quick", "--subset", "8"],
    "reproduce volume": ["--workers", "1", "--quick", "--subset", "8", "--epochs", "1", "--seeds", "1"],
}
#: Documents whose commands take longer than all others together.
LONG = {"docs/clusters.md", "docs/local_entropy.md", "docs/reproduce.md", "docs/training.md"}
#: Words that stand for something of the reader's.
PLACEHOLDERS = {
    "RUN": "runs/x", "PRESET": "cifar10-smallconvnet", "ROW": "cifar10-smallconvnet", "ITEM": "fig1", "NAME": "ema",
    "COMMAND": "train", "DIR": "data", "FILE": "weights.pt", "FILE.npz": "weights.npz", "S": "1", "DATA": "data",
}  # fmt: skip


def commands(text: str) -> list[str]:
    """The commands of a shell block: without comments, lines that go on joined, `a && b` apart."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    bare = [shlex.join(shlex.split(line, comments=True)).replace("'&&'", "&&") for line in lines]
    return [part.strip() for line in bare for part in line.split("&&") if part.strip()]


def blocks() -> dict[str, list[str]]:
    """The commands of every shell block, by document and line."""
    found = {}
    for document in DOCUMENTS:
        text = document.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found[f"{document.relative_to(ROOT)}:{line}"] = commands(match.group(1))
    return found


def printed() -> list[tuple[str, str]]:
    """(where, command) of every shell block."""
    return [(where, command) for where, lines in blocks().items() for command in lines]


def mentioned() -> list[tuple[str, str]]:
    """(document, command) of the commands inside of sentences, and of the examples in the commands' help."""
    found = [(d.name, span) for d in [*DOCUMENTS, ROOT / "CHANGELOG.md"] for span in SPAN.findall(d.read_text())]
    for name in cli.COMMANDS:
        path = ROOT / "wideflat" / "commands" / f"{name.replace('-', '_')}.py"
        found += [(path.name, line) for line in re.findall(r"^ +((?:wideflat|torchrun) .+)$", path.read_text(), re.M)]
    return sorted(set(found))


def words_of(command: str) -> list[str]:
    """The words after `wideflat`, without what stands for something of the reader's."""
    command = re.sub(r"[\[\]]", "", command).replace("\\|", "|").replace("committee-...", "committee-sgd-fast")
    command = re.split(r" {2,}", command)[0]  # in help texts words of explanation stand apart
    words = [PLACEHOLDERS.get(word, word) for word in (w.split("|")[0] for w in shlex.split(command)) if word]
    if "-m" in words:
        words = ["wideflat", *words[words.index("-m") + 2 :]]
    return words[1:]


def read(words: list[str]) -> None:
    """Let the real parser read a command of wideflat, and look its names up."""
    if words[0].startswith("-"):
        assert words[0] in ("--help", "--version", "--completion")
        return
    assert words[0] in cli.COMMANDS, f"there is no command {words[0]}"
    if len(words) == 1 or words[-1] == "--help":
        return
    fragment = words[0] == "train" and words[1].startswith("--")  # an option that a sentence speaks of
    words = [words[0], "cifar10-smallconvnet", *words[1:]] if fragment else words
    module = importlib.import_module(f"wideflat.commands.{words[0].replace('-', '_')}")
    try:
        command = tyro.cli(module.Command, args=words[1:])
    except SystemExit as end:
        pytest.fail(f"wideflat {' '.join(words)}: exit code {end.code}")
    if fragment:
        return
    if words[0] == "train" and not command.preset.startswith("committee-"):
        dataclasses.replace(command, build=None)._cell()  # refuses presets, algorithms and values that there are not
    elif words[0] == "train":
        assert command.preset in train.committee_settings()
    elif words[0] == "reproduce":
        assert set(getattr(command.item, "rows", None) or ()) <= set(train.PRESETS)
        assert set(getattr(command.item, "algorithms", None) or ()) <= set(train.ALGORITHMS)


@pytest.mark.parametrize(("document", "command"), [*printed(), *mentioned()])
def test_every_command_is_one_that_there_is(document, command):
    if re.match(r"wideflat |.* -m wideflat ", command):
        read(words_of(command))
    elif command.startswith("make "):
        assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M)
    elif command.startswith("pip install"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", command)))) <= set(extras)
    elif command.startswith("python "):
        assert (ROOT / command.split()[1]).exists()
    else:
        assert not_run(command), f"{command} is neither known nor listed as one that cannot be run"


def not_run(command: str) -> bool:
    """Whether the list says so."""
    return any(command.startswith(key) or f" {key}" in command for key in NOT_RUN)


def test_the_list_of_what_is_not_run_has_nothing_else_in_it():
    assert all(any(not_run_by(key, command) for _, command in printed()) for key in NOT_RUN)


def not_run_by(key: str, command: str) -> bool:
    return command.startswith(key) or f" {key}" in command


def shortened(words: list[str]) -> list[str]:
    """A command with the options that make it short."""
    line = " ".join(words)
    for key, more in SHORTER.items():
        first, _, word = key.partition(" --")
        if line.startswith(first) and (not word or f"--{word}" in words):
            return [*words, *more]
    return words


def run(command: str) -> int:
    """Run a command of wideflat here; what torchrun starts, in processes of its own. Its exit code."""
    words = shlex.split(command)
    if words[0] != "torchrun":
        return cli.main(shortened(words[1:]))
    script = [str(Path(__file__).with_name("small_world.py")), *words[words.index("wideflat") + 1 :]]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1 : words.index("-m")]]
    return subprocess.run([*launcher, *script], timeout=250, check=False).returncode


def parameters() -> list:
    found = [where for where, lines in blocks().items() if not all(map(not_run, lines))]
    return [pytest.param(where, marks=[pytest.mark.slow] if where.split(":")[0] in LONG else []) for where in found]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", parameters())
def test_the_commands_of_a_block_run_one_after_the_other(where, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    small_world.furnish(tmp_path)
    for dictionary, key, value in small_world.shrink():
        monkeypatch.setitem(dictionary, key, value)
    for command in blocks()[where]:
        if "--models runs/" in command:  # of the reader's own
            assert all(run(f"wideflat -q train cifar10-smallconvnet --seed {seed}") == 0 for seed in range(3))
        if not not_run(command):
            code = run(command)
            assert code == 0, f"{command} ended with {code}: {capfd.readouterr().err[-2000:]}"
