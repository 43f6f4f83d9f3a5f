"""Wrong arguments at every public door: an error in our own words or a result; no crash, no hang, no raw error.

python tests/fuzz/test_arguments.py [CASES] [SEED]
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from doors import DOORS
from many import from_the_command_line
from rubbish import rubbish

import wideflat

PACKAGE = str(Path(wideflat.__file__).parent)
#: torch checks the parameters of every optimizer itself, in words that its users know.
TORCH_CHECKS = str(Path(torch.optim.__file__).parent / "optimizer.py")
TORCH_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
SECONDS = 20


class Hang(BaseException):
    """A call did not end in time."""


@contextlib.contextmanager
def in_time(seconds: int):
    """Raise `Hang` after so many seconds of the processor, or ten times as many on the wall."""

    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop), signal.signal(signal.SIGPROF, stop)
    signal.alarm(10 * seconds)  # by the clock on the wall, which a busy machine makes run fast
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGPROF, before[1])


def case(number: int, seed: int) -> tuple[str, dict[str, object]]:
    """A door and which of its arguments are replaced by what, as a function of number and seed."""
    chance = random.Random(f"{seed} {number}")
    name = sorted(DOORS)[number % len(DOORS)]
    names = sorted(DOORS[name].arguments())
    chosen = chance.sample(names, min(len(names), chance.choice([1, 1, 1, 2])))
    values = rubbish()
    return name, {argument: chance.choice(values) for argument in chosen if argument != "progress"}


def fault(name: str, changes: dict[str, object]) -> str | None:
    """What is wrong with how a door takes wrong arguments; None if nothing is."""
    door = DOORS[name]
    try:
        with in_time(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = {**door.arguments(), **changes}
            door.use(door.function(**arguments), arguments)
    except Hang:
        return f"no end after {SECONDS} seconds"
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        if any(isinstance(value, nn.Module) and argument != "model" for argument, value in changes.items()):
            return None  # a function of the user's, called as the door says: its own error is the best
        if name == "SAM" and set(changes) & {"lr"} and last.filename.startswith(TORCH_OPTIMIZERS):
            return None  # an argument of the optimizer inside, which it answers for itself
        if last.filename.startswith(PACKAGE) or last.filename == TORCH_CHECKS or last.filename == __file__:
            return None
        return f"{type(error).__name__} from {last.filename}:{last.lineno}: {str(error)[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def describe(number: int, name: str, changes: dict[str, object]) -> str:
    return f"case {number}: {name}({', '.join(f'{key}={value!r}'[:80] for key, value in changes.items())})"


@pytest.mark.parametrize("name", sorted(DOORS))
def test_right_arguments_pass(name):
    door, arguments = DOORS[name], DOORS[name].arguments()
    door.use(door.function(**arguments), arguments)


@pytest.mark.parametrize("part", range(10))
def test_wrong_arguments_are_refused_in_our_words(part):
    for number in range(20 * part, 20 * part + 20):
        name, changes = case(number, seed=0)
        assert fault(name, changes) is None, describe(number, name, changes)


def one(number: int, seed: int) -> tuple[str, str | None]:
    name, changes = case(number, seed)
    return describe(number, name, changes), fault(name, changes)


if __name__ == "__main__":
    sys.exit(from_the_command_line("cases", one))
