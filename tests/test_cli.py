import dataclasses
import os
import signal
import subprocess
import sys
import types
import warnings

import pytest

import wideflat
from wideflat import cli
from wideflat.commands import UsageError
from wideflat.experiments import ITEMS


@pytest.fixture
def command(monkeypatch):
    """A command ``wideflat probe`` whose behaviour the test sets."""

    @dataclasses.dataclass
    class Command:
        """Probe.

        Examples:
            wideflat probe --number 3
        """

        number: int = 0

        def run(self):
            return module.behaviour(self)

    module = types.SimpleNamespace(Command=Command, behaviour=lambda self: 0)
    monkeypatch.setitem(cli.COMMANDS, "probe", "a probe")
    monkeypatch.setitem(sys.modules, "wideflat.commands.probe", module)
    return module


def raising(error):
    def behaviour(self):
        raise error

    return behaviour


def test_overview_lists_every_command(capsys):
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"wideflat {wideflat.__version__}\n"


def test_unknown_command_suggests_the_nearest(capsys):
    assert cli.main(["trian"]) == cli.USAGE
    assert "Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["train", "cifar10-smallconvnet", "--algorithm", "esdg"], "esgd"),
        (["reproduce", "fgi1"], "fig1"),
        (["data", "verfy"], "verify"),
        (["train", "committee-sgd-fast", "--set", "droput=0.3"], "dropout"),
        (["train", "cifar10-smallconvnet", "--lrr", "1"], "--lr"),
        (["reproduce", "fig1", "--restrts", "3"], "--restarts"),
        (["reproduce", "--jsn", "fig1"], "--json"),
        (["reproduce", "fig1", "--settings", "sdg-fast"], "sgd-fast"),
        (["reproduce", "table1", "--algorithms", "esdg"], "esgd"),
        (["reproduce", "table1", "--rows", "cifar10-smallcovnet"], "cifar10-smallconvnet"),
        (["presets", "cifar10-resnet18", "--algorithm", "esdg"], "esgd"),
    ],
)
@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_word_that_is_none_of_those_possible_suggests_the_nearest(arguments, word, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == cli.USAGE and "you mean" in said and word in said.rsplit("you mean", 1)[1]


@pytest.mark.parametrize("name", [*cli.COMMANDS, *(f"reproduce {item}" for item in ITEMS)])
def test_a_misspelt_option_of_every_command_and_item_suggests_the_nearest(name, capsys):
    given = {"demo": [], "data": [], "report": [], "presets": []}.get(name, [] if "reproduce" in name else ["x"])
    with pytest.raises(SystemExit) as end:
        cli.main([*name.split(), *given, "--jsno"])
    said = capsys.readouterr().err
    assert end.value.code == cli.USAGE
    assert said == (
        f"wideflat: {name} has no option --jsno. Did you mean --json?\n`wideflat {name} --help` lists its options\n"
    )


def test_help_shows_the_examples(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["probe", "--help"])
    assert end.value.code == 0
    assert "wideflat probe --number 3" in capsys.readouterr().out


def test_exit_code_of_the_command(command):
    command.behaviour = lambda self: self.number
    assert cli.main(["probe", "--number", "3"]) == 3


@pytest.mark.parametrize(
    "error", [ValueError("period must be >= 1, got 0"), OSError("no space"), RuntimeError("in use")]
)
def test_errors_are_messages_and_not_tracebacks(command, capsys, error):
    command.behaviour = raising(error)
    assert cli.main(["probe"]) == cli.FAILED
    assert capsys.readouterr().err == f"wideflat: {error}\n"
    assert cli.main(["probe", "--verbose"]) == cli.FAILED
    assert "Traceback" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named_with_its_neighbour(command, tmp_path, capsys):
    (tmp_path / "local_energy.json").touch()
    command.behaviour = lambda self: (tmp_path / "local_enrgy.json").read_text()
    assert cli.main(["probe"]) == cli.FAILED
    there = tmp_path / "local_energy.json"
    assert capsys.readouterr().err == f"wideflat: there is no {tmp_path}/local_enrgy.json; did you mean {there}?\n"


def test_interruption(command, capsys):
    command.behaviour = raising(KeyboardInterrupt())
    assert cli.main(["probe"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_sigterm_is_ctrl_c_for_every_command(command, capsys):
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # without the command line's answer nothing happens
    try:
        command.behaviour = lambda self: os.kill(os.getpid(), signal.SIGTERM)
        assert cli.main(["probe"]) == 130
        assert "interrupted" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, before)


def test_warnings_are_one_line(command, capsys):
    def behaviour(self):
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn("the last state is damaged")
        return 0

    command.behaviour = behaviour
    cli.main(["probe"])
    assert capsys.readouterr().err == "wideflat: warning: the last state is damaged\n"


def test_quiet_silences_progress(command):
    seen = []
    command.behaviour = lambda self: seen.append(cli.Progress.silent)
    cli.main(["probe", "-q"])
    cli.main(["probe"])
    assert seen == [True, False]


def test_flags_after_two_dashes_are_left_alone():
    arguments = ["probe", "-q", "--", "-q"]
    assert cli._take(arguments, "-q") and arguments == ["probe", "--", "-q"]


def test_python_m_wideflat_runs_the_same_command():
    done = subprocess.run([sys.executable, "-m", "wideflat", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"wideflat {wideflat.__version__}\n"


def test_completion_covers_every_command(capsys):
    assert cli.main(["--completion", "bash"]) == cli.OK
    script = capsys.readouterr().out
    assert all(name in script for name in cli.COMMANDS) and "--target-stderr" in script


def test_shells_without_a_script_are_refused(capsys):
    assert cli.main(["--completion", "tcsh"]) == cli.USAGE
    assert "takes one of bash, zsh" in capsys.readouterr().err
    cli.main(["--help"])
    assert "tcsh" not in capsys.readouterr().out


def test_errors_of_usage_have_their_own_exit_code(command, capsys):
    command.behaviour = raising(UsageError("--number must be >= 1, got 0"))
    assert cli.main(["probe"]) == cli.USAGE
    assert capsys.readouterr().err == "wideflat: --number must be >= 1, got 0\n"


@pytest.mark.parametrize(
    "line",
    [
        "train cifar10-resnet19",
        "train committee-adam",
        "train committee-sgd-fast --restarts 0",
        "train committee-sgd-fast --set foo=1",
        "demo --restarts 0",
        "data verify nonsense",
        "local-entropy solutions.npz --first 0",
    ],
)
def test_a_wrong_command_line_is_exit_code_2(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == cli.USAGE
    assert capsys.readouterr().err.startswith("wideflat: ")
    assert not list(tmp_path.iterdir())
