"""Many cases of a fuzzer, from the command line: CASES and SEED, another seed every time where none is given."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

__all__ = ["from_the_command_line"]

#: A case by number and seed: how it is told, and what is wrong with how it ended; None if nothing is.
Case = Callable[[int, int], tuple[str, str | None]]


def from_the_command_line(what: str, case: Case, cases: int = 5000) -> int:
    """Go through the cases that are asked for and print the faults; 1 if there was one."""
    words = [int(word) for word in sys.argv[1:]]
    cases, seed = (words + [cases, random.SystemRandom().randrange(10**6)][len(words) :])[:2]
    print(f"{cases} {what} of seed {seed}", flush=True)
    bad = 0
    for number in range(cases):
        print(f"\r{number}", end="", file=sys.stderr, flush=True)  # what a crash leaves to be read
        told, fault = case(number, seed)
        if fault is not None:
            bad += 1
            print(f"{told}\n    {fault}", flush=True)
    print(f"{cases} {what} of seed {seed}: {bad} faults")
    return int(bad > 0)
