"""Tables on screens that are too narrow for them."""

import re
import sys

import pytest

from wideflat import cli
from wideflat.report.terminal import on_screen, print_table

COLUMNS = ["setting", "test error %", "paper against measured, in points"]
ROWS = [["committee-sgd-fast", "8.80 ± 0.31", "+0.12 (-0.31 to +0.55)"], ["committee-esgd", "6.70 ± 0.02", ""]]


@pytest.fixture
def screen(monkeypatch):
    """Makes standard output a screen of so many columns."""

    def of(width):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return of


@pytest.mark.parametrize("width", [40, 60, 66, 80, 120])
def test_no_entry_is_cut_and_no_line_is_too_long(screen, capsys, width):
    screen(width)
    print_table(COLUMNS, ROWS, title="Test errors")
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert all(word in text for row in ROWS for entry in row for word in entry.split()) and "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_lines_go_on_under_their_last_column(screen, capsys):
    line = "rsgd       Replicated-SGD, as many passes over the data as the baseline in all"
    assert on_screen([line]) == line  # a pipe
    screen(60)
    first, second = on_screen([line]).split("\n")
    assert second.startswith(" " * 11) and f"{first} {second.strip()}" == line


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize(
    "words", [[], ["cifar10-resnet18"], ["cifar10-smallconvnet", "--as-coded"], ["committee-esgd"]]
)
def test_presets_fit_the_screen(screen, capsys, words, width):
    screen(width)
    assert cli.main(["presets", *words]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width
