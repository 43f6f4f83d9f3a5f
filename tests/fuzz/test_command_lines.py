"""Random command lines: an exit code of ours and a message, no traceback, no hang."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from many import from_the_command_line
from test_arguments import Hang, in_time

from wideflat.cli import COMMANDS, main

#: Words that are right somewhere and wrong elsewhere. Nothing here is both right and long.
WORDS = [
    *("--sigmas", "--noise", "--metric", "--build", "--epoch", "--out", "--compare", "--json", "--figure", "--layers"),
    *("--max-passes", "--batch-size", "--seed", "--device", "--parameters", "--target-stderr", "--data", "--lr", "-v"),
    *("--epochs", "--gamma0", "--replicas", "--help", "--title", "--quick", "--method", "--deltas", "--subset", "-q"),
    *(
        "0",
        "-1",
        "nan",
        "inf",
        "1e300",
        "0.1",
        "9223372036854775808",
        "x",
        "",
        "--",
        "$x$",
        "\u00e9",
        "a:b",
        "torch:nn",
    ),
    *("nowhere", "empty.npz", "broken.json", "run", "weights.pt", "cifar10-smallconvnet", "committee-sgd-fast", "fig9"),
    *("status", "list", "where", "exact", "error", "loss", "meta", "cuda:99", "report.html", "."),
]
#: These do much when they are right: they get no right word to begin with.
HEAVY = {"demo", "reproduce", "train"}


def command_line(number: int, seed: int) -> list[str]:
    """A command and some words, as a function of number and seed."""
    chance = random.Random(f"{seed} command {number}")
    command = sorted(COMMANDS)[number % len(COMMANDS)]
    words = chance.choices(WORDS, k=chance.choice([0, 1, 2, 3, 4]))
    if command in HEAVY:
        words = ["--nonsense", *words] if command == "demo" else [chance.choice(["nowhere", "", "-1"]), *words]
    if command == "data":
        words = [word for word in words if word != "fetch"]
    return [command, *words]


def fault(arguments: list[str]) -> str | None:
    """What is wrong with how a command line ends; None if nothing is."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with in_time(30), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except SystemExit as end:  # of tyro: help, and options that do not exist
        code = end.code if isinstance(end.code, int) else 2
    except Hang:
        return "no end after 30 seconds"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    if code not in (0, 1, 2, 130):
        return f"exit code {code}"
    verbose = "-v" in arguments or "--verbose" in arguments
    if "Traceback" in err.getvalue() and not verbose:
        return err.getvalue()[-300:]
    return None if code == 0 or err.getvalue() or out.getvalue() else f"code {code} without a word"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with files that are not what they seem."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    return tmp_path


def fill(folder: Path) -> None:
    """Files that are not what they seem."""
    (folder / "empty.npz").write_bytes(b"")
    (folder / "broken.json").write_text('{"sigmas": [0.1], "mean": 3')
    (folder / "weights.pt").write_bytes(b"PK\x03\x04nothing")
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "config.json").write_text('{"format": 1, "experiment": {"model": "torch.hub:load"}, "data": 3}')


@pytest.mark.parametrize("part", range(4))
def test_no_command_line_ends_in_a_traceback(folder, part):
    for number in range(25 * part, 25 * part + 25):
        arguments = command_line(number, seed=0)
        assert fault(arguments) is None, arguments


def one(number: int, seed: int) -> tuple[str, str | None]:
    arguments = command_line(number, seed)
    return f"case {number}: wideflat {' '.join(map(repr, arguments))}", fault(arguments)


if __name__ == "__main__":
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        fill(Path(folder))
        code = from_the_command_line("command lines", one, cases=500)
        os.chdir(before)
    sys.exit(code)
