"""Completion scripts for bash, zsh and fish: commands, their options, and the names that they take."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from wideflat.commands.presets import committee_settings
from wideflat.data.catalogue import CATALOGUE
from wideflat.experiments import ITEMS
from wideflat.experiments import item as find_item
from wideflat.presets import PRESETS

__all__ = ["SHELLS", "options_of", "script"]

#: Words that a command takes besides its options and files.
WORDS: dict[str, Callable[[], list[str]]] = {
    "train": lambda: [*PRESETS, *committee_settings()],
    "presets": lambda: [*PRESETS, *committee_settings()],
    "reproduce": lambda: [*ITEMS, "all"],
    "data": lambda: ["list", "verify", "fetch", *CATALOGUE],
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """What can follow one command.

    Args:
        about: The command in one line.
        words: Names that it takes.
        options: Its options, each with the values that it is limited to (none where it is not).
    """

    about: str
    words: list[str]
    options: dict[str, list[str]]


def script(shell: str, commands: Mapping[str, str]) -> str:
    """The completion script for a shell.

    Args:
        shell: One of :data:`SHELLS`.
        commands: What each command does.
    """
    entries = {name: _entry(name, about) for name, about in commands.items()}
    return SHELLS[shell](entries)


def _entry(name: str, about: str) -> Entry:
    return Entry(about, WORDS[name]() if name in WORDS else [], options_of(name, *ITEMS))


def options_of(name: str, *items: str) -> dict[str, list[str]]:
    """The options of a command, each with the values that it is limited to; of ``reproduce`` with those of items."""
    command = importlib.import_module(f"wideflat.commands.{name.replace('-', '_')}").Command
    kinds = [command, *(find_item(item).options for item in items if name == "reproduce")]
    options: dict[str, list[str]] = {"--help": [], "--quiet": [], "--verbose": []}
    for kind in kinds:
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            if "Positional" not in repr(hints[field.name]) and field.name != "item":
                options[f"--{field.name.replace('_', '-')}"] = _choices(hints[field.name])
    return options


def _choices(hint: Any) -> list[str]:
    """The words of every ``Literal`` within a type."""
    if typing.get_origin(hint) is Literal:
        return [str(word) for word in typing.get_args(hint)]
    parts = typing.get_args(hint)
    return [word for part in parts for word in _choices(part)] if parts else []


def _bash(entries: Mapping[str, Entry]) -> str:
    lines = [
        "_wideflat() {",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words="" k name=""',
        "    for ((k = 1; k < COMP_CWORD; k++)); do",
        '        [[ "${COMP_WORDS[k]}" != -* ]] && { name="${COMP_WORDS[k]}"; break; }',
        "    done",
        '    case "$name" in',
        f'        "") words="{" ".join(entries)} --help --version --completion" ;;',
    ]
    for name, entry in entries.items():
        lines.append(f"        {name})")
        lines.append('            case "$prev" in')
        lines += [f'                {o}) words="{" ".join(v)}" ;;' for o, v in entry.options.items() if v]
        lines.append(f'                *) words="{" ".join([*entry.words, *entry.options])}" ;;')
        lines.append("            esac ;;")
    lines += [
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _wideflat wideflat",
    ]
    return "\n".join(lines)


def _zsh(entries: Mapping[str, Entry]) -> str:
    return f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{_bash(entries)}"


def _fish(entries: Mapping[str, Entry]) -> str:
    lines = []
    for name, entry in entries.items():
        lines.append(f"complete -c wideflat -n __fish_use_subcommand -f -a {name} -d {shlex.quote(entry.about)}")
        seen = f"complete -c wideflat -n '__fish_seen_subcommand_from {name}'"
        if entry.words:
            lines.append(f"{seen} -a {shlex.quote(' '.join(entry.words))}")
        for option, values in entry.options.items():
            chosen = f" -x -a {shlex.quote(' '.join(values))}" if values else ""
            lines.append(f"{seen} -l {re.sub('^--', '', option)}{chosen}")
    return "\n".join(lines)


#: What writes the script of each shell.
SHELLS: dict[str, Callable[[Mapping[str, Entry]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
