"""`wideflat report`: one page of all that was found, what is wrong is explained, numbers as JSON."""

import html
import json
import re

import pytest

from wideflat import cli
from wideflat.training.runs import Run


def test_the_page_holds_all_of_it(results, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert cli.main(["report", str(results), "--out", str(page), "--title", "All <of> it"]) == 0
    text = page.read_text()
    for part in (
        "All &lt;of&gt; it",
        "cifar10-&lt;b&gt;net",
        "Local energy",
        "Local entropy",
        "Strength of the coupling",
    ):
        assert part in text
    assert "1 set of solutions" in text
    assert "[QUICK]" in text and "<b>net" not in text and "local-energy.json" in text
    out = capsys.readouterr().out
    assert "not read" in out and str(page) in out
    assert "[QUICK]" in out and "Differences of the means" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere. Give run directories"),
        ("emty", "empty? Give run directories"),
        ("empty", "nothing to report"),
        ("damaged", "nothing to report"),
    ],
)
def test_wrong_paths_are_explained(tmp_path, capsys, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    assert cli.main(["report", str(tmp_path / name), "--out", str(tmp_path / "page.html")]) == cli.FAILED
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert name != "damaged" or "config.json" in error
    assert not (tmp_path / "page.html").exists()


def test_configurations_are_kept_word_for_word(results, tmp_path):
    assert cli.main(["report", str(results / "runs"), "--out", str(tmp_path / "page.html"), "-q"]) == 0
    text = (tmp_path / "page.html").read_text()
    (shown,) = re.findall(r'<summary>Configuration of first</summary><pre tabindex="0">(.*?)</pre>', text, re.DOTALL)
    config = Run.open(results / "runs" / "first").config
    assert json.loads(html.unescape(shown)) == config and config["options"] == {"seed": 7}
    assert config["experiment"]["name"] == "cifar10-<b>net"  # what HTML must escape comes back, too


def test_json_has_numbers_as_numbers(results, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert cli.main(["report", str(results), "--out", str(page), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    (run,) = content["runs"]
    assert (run["test_error_percent"], run["paper_percent"], run["paper_percent_spread"]) == (25.0, None, None)
    assert (run["epochs"], run["epochs_of"], run["seed"]) == (2, 3, 7)
    assert [item["item"] for item in content["experiments"]] == ["fig6"] and content["report"] == str(page)
    (plain, _) = content["experiments"][0]["rows"]
    assert plain["n"] == plain["solved"] == 2 and 0 <= plain["test_error_percent"] <= 100
    assert "local-energy.json" in "".join(content["unread"]) and content["energies"]["flat"]["mean"] == [0.0, 0.1]


def test_a_report_over_twelve_runs_begins_with_what_came_out(folder, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert cli.main(["report", str(folder), "--out", str(page)]) == 0
    text, out = page.read_text(), capsys.readouterr().out
    assert "<h1>On cifar10-smallconvnet esgd (5.0\N{NO-BREAK SPACE}±" in text
    assert "esgd (n = 3)" in text and len(text) < 6e6
    assert "On cifar10-smallconvnet esgd (5.0 ±" in out
