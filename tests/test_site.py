"""The documentation site builds without a warning, holds every public name, and asks nothing of the network."""

import re
import subprocess
import sys
from pathlib import Path

import wideflat

ROOT = Path(__file__).parent.parent


def test_the_site_builds_and_is_whole(tmp_path):
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        str(ROOT / "docs"),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference.html").read_text()
    missing = [
        name for name in wideflat.__all__ if not name.startswith("__") and f'id="wideflat.{name}"' not in reference
    ]
    assert missing == []
    assert r"\mathcal{L}" in (tmp_path / "equations.html").read_text()
    assert "SHOW_SEARCH_SUMMARY: false" in (tmp_path / "_static" / "documentation_options.js").read_text()
    for page in tmp_path.glob("*.html"):
        sources = re.findall(r'(?:src|href)="(https?:[^"]+\.(?:js|css|woff2?))"', page.read_text())
        assert sources == [], page.name


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text()
    listed = set(re.findall(r"^([a-z_]+)$", index, re.MULTILINE))
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} <= listed


def test_every_page_says_first_what_one_can_do_after_it():
    for page in (ROOT / "docs").glob("*.md"):
        title, first, *_ = page.read_text().split("\n\n")
        assert title.startswith("# ") and ("After this page" in first or page.stem == "index"), page.name
