"""docs/paper_to_code.md is complete, and every name in it is there."""

import importlib
import re
from pathlib import Path

import pytest

from wideflat.experiments import ITEMS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "paper_to_code.md").read_text()
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in TEXT.splitlines()
    if line.startswith("|") and "---" not in line
]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[-1])})
OF_THE_PAPER = [
    *(f"Eq. {number}" for number in range(1, 13)), "Algorithm 1", "Algorithm 2", "Sec. 4", "App. A", "App. B.1",
    "App. B.2", "App. B.3", "App. C", "App. C.1", "App. C.2", "Table 1",
    *(f"Figure {number}" for number in range(1, 8)),
]  # fmt: skip


def resolve(name):
    """What a dotted name means, from the longest module that it begins with."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


@pytest.mark.parametrize("concept", OF_THE_PAPER)
def test_every_part_of_the_paper_has_a_row(concept):
    assert any(re.search(rf"{re.escape(concept)}(?!\d)", row[0]) for row in ROWS)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name):
    if name.startswith("wideflat "):  # a command
        words = name.split()
        importlib.import_module(f"wideflat.commands.{words[1].replace('-', '_')}")
        if words[1] == "reproduce":
            assert set(words[2].split("\\|")) <= set(ITEMS)
    elif "/" in name:
        assert (ROOT / name).exists()
    else:
        assert name.startswith("wideflat."), "names are given in full"
        resolve(name)
