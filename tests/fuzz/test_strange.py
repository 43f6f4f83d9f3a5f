"""Every parameter of every public name, in or instead of it something strange: what is refused is refused by us.

    python tests/fuzz/test_strange.py [CASES] [SEED]

This asks for more than `test_arguments.py`: an error must come from a ``raise`` of the package. One that Python or
torch raises in a line of ours is a check that is missing, whatever its type.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import random
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot
import pytest

matplotlib.use("agg")
sys.path.insert(0, str(Path(__file__).parent))
from doors import DOORS
from many import from_the_command_line
from more_doors import MORE_DOORS
from room_doors import ROOM_DOORS
from strange import STRANGE, spoilt
from test_arguments import PACKAGE, SECONDS, TORCH_OPTIMIZERS, Hang, in_time

ALL = {**DOORS, **MORE_DOORS, **ROOM_DOORS}
#: What is called, or is a network: an error inside of it is that of whoever gave it.
CALLED = ("augment", "base", "closure", "criterion", "forward", "function", "inner", "kind", "loss", "make_model")
CALLED += ("measure", "metric", "objective", "outer", "parameters")
#: torch's own optimizers answer for what only they look at.
OF_TORCH = ("lr", "momentum", "weight_decay", "nesterov", "dampening", "foreach", "fused", "maximize")
OF_TORCH += ("params", "param_groups", "state")


@functools.cache
def raising(path: str) -> frozenset[int]:
    """The lines of a file in which it raises."""
    found = (node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.Raise))
    return frozenset(line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def case(number: int, seed: int) -> tuple[str, dict[str, Any]]:
    """A door and what some of its parameters are replaced by, also those that its right arguments leave out."""
    chance = random.Random(f"{seed} strange {number}")
    name = sorted(ALL)[number % len(ALL)]
    right = ALL[name].arguments()
    taken = inspect.signature(ALL[name].function).parameters.values()
    names = set(right) | {p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    names -= {"progress", "checkpoint", "path"}  # a path is written to
    chosen = chance.sample(sorted(names), min(len(names), chance.choice([1, 1, 1, 2, 3])))
    inside = [key in right and chance.random() < 0.35 for key in chosen]
    return name, {
        key: spoilt(right[key], chance) if within else chance.choice(STRANGE)()
        for key, within in zip(chosen, inside, strict=True)
    }


def is_ours(error: BaseException, changes: dict[str, Any]) -> bool:
    """Does a raise of the package raise it? Or what was given: a function, a network, an optimizer of torch?"""
    *others, last = traceback.extract_tb(error.__traceback__)
    kinds = (TypeError, ValueError, RuntimeError, OSError)
    if isinstance(error, kinds) and last.filename.startswith(PACKAGE) and last.lineno in raising(last.filename):
        return True
    if last.filename.startswith(TORCH_OPTIMIZERS) and isinstance(error, (TypeError, ValueError)):
        return True
    if any(frame.filename.startswith(TORCH_OPTIMIZERS) for frame in (*others, last)) and set(changes) & set(OF_TORCH):
        return True
    if "inputs" in changes and not last.filename.startswith(PACKAGE):
        return True
    return any(callable(value) and key in CALLED for key, value in changes.items())


def place_of(error: BaseException) -> str | None:
    """An error and where in the package it came to be; None if it never came to the package."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if frame.filename.startswith(PACKAGE)), None)
    if place is None:
        return None
    return f"{type(error).__name__} at {place.filename}:{place.lineno} ({place.line}): {str(error)[:150]}"


def fault(name: str, changes: dict[str, Any]) -> str | None:
    """What is wrong with how a door takes strange arguments; None if nothing is."""
    door = ALL[name]
    try:
        with in_time(SECONDS), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            arguments = {**door.arguments(), **changes}
            door.use(door.function(**arguments), arguments)
    except Hang:
        return f"no end after {SECONDS} seconds"
    except Exception as error:
        if is_ours(error, changes):
            return None
        return place_of(error)
    finally:
        matplotlib.pyplot.close("all")
    return None


def described(number: int, name: str, changes: dict[str, Any]) -> str:
    def short(value: Any) -> str:
        try:
            return repr(value)[:80].replace("\n", " ")
        except Exception:
            return type(value).__name__

    return f"case {number}: {name}({', '.join(f'{key}={short(value)}' for key, value in changes.items())})"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_what_is_strange_is_refused_by_us(part):
    for number in range(25 * part, 25 * part + 25):
        name, changes = case(number, seed=0)
        assert fault(name, changes) is None, described(number, name, changes)


def one(number: int, seed: int) -> tuple[str, str | None]:
    name, changes = case(number, seed)
    what = fault(name, changes)
    return described(number, name, changes), what


if __name__ == "__main__":
    sys.exit(from_the_command_line("strange cases", one))
