"""The command line: finds the command that was typed, reads its options with tyro, turns errors into messages."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import wideflat
from wideflat.commands import UsageError
from wideflat.commands.help_text import (
    as_wide_as_the_screen,
    fitted,
    joined,
    screen_width,
    with_the_nearest_word,
    without_colours_if_asked,
)
from wideflat.interruption import terminated_like_interrupted
from wideflat.progress import Progress

__all__ = ["COMMANDS", "main"]

#: What each command does, in one line. The module of a command is ``wideflat.commands.<name with underscores>``.
COMMANDS: dict[str, str] = {
    "demo": "the main job on embedded data: train, measure, report",
    "presets": "every cell of Table 1 and every setting of Appendix B.1, with the paper's number",
    "train": "train a preset with any of the algorithms",
    "local-energy": "how fast the training error grows around a solution, for any network",
    "local-entropy": "the volume of good solutions around a solution of a committee machine",
    "free-entropy": "the volume of good weights around those of any network, with a stated error",
    "card": "everything one asks of a minimum, measured in one call, on one page",
    "reproduce": "a table or figure of the paper",
    "report": "one self-contained HTML page from runs",
    "data": "what data is on disk, where it is looked for, its checksums",
}

NEEDS_MORE = "the command line needs more packages: pip install 'wideflat[experiments]'"

SHARED = "Every command takes -q/--quiet (no progress) and -v/--verbose (where a warning or error came from)."

EXIT_CODES = "Exit codes: 0 done, 1 the work failed, 2 the command line was wrong, 130 interrupted (Ctrl-C, SIGTERM)."

#: Exit codes: done, the work failed, the command line was wrong, interrupted (128 + SIGINT, after SIGTERM too).
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Errors that tell the user what to do (``TypeError``, ``ValueError``, ``OSError``, ``RuntimeError``) are printed
    without a traceback; ``--verbose`` shows it. Those about the command line itself
    (:class:`wideflat.commands.UsageError`) have an exit code of their own.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    quiet, verbose = _take(arguments, "-q", "--quiet"), _take(arguments, "-v", "--verbose")
    before, Progress.silent = Progress.silent, quiet
    try:
        return _run(arguments, verbose)
    finally:  # whoever calls this from Python hears other progress afterwards
        Progress.silent = before


def _run(arguments: list[str], verbose: bool) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return OK
    if arguments[0] in ("-V", "--version"):
        print(f"wideflat {wideflat.__version__}")
        return OK
    if arguments[0] == "--completion":
        return _completion(arguments[1:])
    name = arguments[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return _complain(f"there is no command {name!r}.{hint} Run `wideflat --help` for the list.", USAGE)
    try:
        import tyro
    except ModuleNotFoundError:
        return _complain(NEEDS_MORE, FAILED)
    try:
        kind = _command(name)
        # The docstring is given as it stands: by itself tyro leaves its examples out.
        about = joined(f"{inspect.getdoc(kind)}\n\n{SHARED}")
        wanted = any(flag in arguments for flag in ("-h", "--help"))
        nearest = with_the_nearest_word(name, arguments[1:], _options)
        with without_colours_if_asked(), as_wide_as_the_screen(wanted), nearest:
            command = tyro.cli(kind, prog=f"wideflat {name}", description=about, args=arguments[1:])
        from wideflat.commands.answers import alone_on_stdout  # imports torch

        answered = alone_on_stdout(getattr(command, "json", False))
        with warnings.catch_warnings(), terminated_like_interrupted(), answered:
            if not verbose:
                warnings.showwarning = _show_warning
            return int(command.run() or OK)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (TypeError, ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        if verbose:
            traceback.print_exc()
        return _complain(_words(error), USAGE if isinstance(error, UsageError) else FAILED)


def _words(error: Exception) -> str:
    """What an error says; of a file that is not there, with the neighbour that may be meant."""
    if isinstance(error, FileNotFoundError) and error.filename:
        from wideflat.files import missing  # imports torch

        return missing(error.filename)
    return str(error) or type(error).__name__


def _overview() -> str:
    width, margin = screen_width(), max(map(len, COMMANDS), default=0) + 4
    listed = [
        textwrap.fill(f"  {name:<{margin - 4}}  {text}", width, subsequent_indent=" " * margin)
        for name, text in COMMANDS.items()
    ]
    lines = [
        "usage: wideflat COMMAND [OPTIONS]",
        "",
        "Find wide flat minima of neural networks, and measure how wide and flat they are.",
        "",
        *listed,
        "",
        "  wideflat COMMAND --help                options of one command, with examples",
        "  wideflat --completion bash|zsh|fish    a completion script for your shell",
        "  wideflat --version                     the version",
        "",
        SHARED,
        EXIT_CODES,
    ]
    return fitted("\n".join(lines), width)


def _command(name: str) -> Callable[..., Any]:
    return importlib.import_module(f"wideflat.commands.{name.replace('-', '_')}").Command


def _options(name: str, *items: str) -> list[str]:
    """Imported only where something is wrong: it knows all experiments."""
    completions = importlib.import_module("wideflat.commands.completions")
    known = [item for item in items if item in completions.ITEMS]
    return list(completions.options_of(name, *(known or completions.ITEMS)))


def _take(arguments: list[str], *flags: str) -> bool:
    """Remove flags that every command shares, up to a ``--``; says whether one was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument not in flags]
    arguments[:end] = kept
    return len(kept) < end


def _completion(arguments: list[str]) -> int:
    """Print a completion script that covers all commands."""
    try:
        completions = importlib.import_module("wideflat.commands.completions")
    except ModuleNotFoundError:
        return _complain(NEEDS_MORE, FAILED)
    if len(arguments) != 1 or arguments[0] not in completions.SHELLS:
        return _complain(f"--completion takes one of {', '.join(completions.SHELLS)}", USAGE)
    print(completions.script(arguments[0], COMMANDS))
    return OK


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"wideflat: warning: {message}", file=sys.stderr)


def _complain(message: str, code: int) -> int:
    print(f"wideflat: {message}", file=sys.stderr)
    return code
