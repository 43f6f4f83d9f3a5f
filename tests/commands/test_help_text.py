"""The help of every command: true defaults, metavars that are words, nothing that leaves a narrow terminal."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from wideflat import cli
from wideflat.commands.help_text import fitted
from wideflat.experiments import ITEMS

PAGES = [[name] for name in cli.COMMANDS] + [["reproduce", name] for name in (*ITEMS, "all")]


def help_of(words, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_no_default_is_none_or_nothing_and_no_metavar_is_a_type_of_text(words, monkeypatch, capsys):
    text = re.sub(r"\s*│\s*", " ", help_of(words, 400, monkeypatch, capsys))
    assert not re.findall(r"\{None\}|default: None|default: \)|default: ''|\bSTR\b|\[\w+ \[\w+ \.\.\.\]\]\]", text)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("words", [[], *PAGES], ids=lambda value: " ".join(value) if isinstance(value, list) else None)
def test_help_stays_in_the_terminal(words, width, monkeypatch, capsys):
    lines = help_of(words, width, monkeypatch, capsys).splitlines() if words else overview(width, monkeypatch, capsys)
    # names that nothing can be broken off from may be longer
    assert not [line for line in lines if len(line) > width and len(line.strip(" │").split()) > 2]


def overview(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["--help"]) == 0
    return capsys.readouterr().out.splitlines()


def test_options_are_explained_in_one_line_of_the_source():
    """The end of a line in a docstring of two would be the end of a line in the help, wherever it happens to be."""
    folders = [Path(cli.__file__).parent / name for name in ("commands", "experiments")]
    classes = [node for path in folders for file in path.glob("*.py") for node in ast.parse(file.read_text()).body]
    options = [node for node in classes if isinstance(node, ast.ClassDef) and re.search("Command|Options$", node.name)]
    assert len(options) > len(cli.COMMANDS)
    for node in options:
        said = [part.value.value for part in node.body[1:] if isinstance(part, ast.Expr)]
        assert not [text for text in said if "\n" in text]


def test_an_example_goes_on_behind_a_backslash():
    text = fitted("About.\n\nExamples:\n  wideflat train x --algorithm esgd --data folder:photos", 40)
    assert text.splitlines()[-2:] == ["  wideflat train x --algorithm esgd \\", "      --data folder:photos"]
    assert all(len(line) <= 40 for line in text.splitlines())


@pytest.mark.parametrize("words", [["demo", "--help"], ["data", "verfy"]])
def test_no_color_is_respected(words, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    seen = []
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        with pytest.raises(SystemExit):
            cli.main(words)
        seen.append("".join(capsys.readouterr()))
    assert "\x1b[" in seen[0] and "\x1b[" not in seen[1]
    assert os.environ["TERM"] == "xterm-256color"
