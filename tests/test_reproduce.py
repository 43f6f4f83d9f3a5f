"""The command ``wideflat reproduce``, on an experiment that takes no time."""

import json

import pytest

from wideflat import cli, experiments
from wideflat.commands import reproduce
from wideflat.experiments.experiment import Comparison, Experiment
from wideflat.experiments.table import Table
from wideflat.report.chart import Chart, Series


class Probe(Experiment):
    name = "fig2"
    title = "Probe <figure>"
    claim = "Nothing."
    quick_means = "less"
    computed = 0
    fail: BaseException | None = None

    def __init__(self, folder, quick=False, seeds=1, **more):
        super().__init__(folder, quick, **more)
        self.seeds = seeds

    def cost(self):
        return f"{self.seeds} seconds"

    def compute(self):
        type(self).computed += 1
        table = Table(["x"], [[1.0], [2.0]], self.provenance())
        table.save(self.folder / "points.csv")
        if self.fail:
            raise self.fail

    def charts(self):
        table = self.table("points")
        return [Chart("points", "Points", "n", "x", [Series("a", [0, 1], table["x"])])] if table else []

    def comparison(self):
        more = [Comparison(["against"], [["itself"]], title="Differences")]
        return Comparison(["paper", "measured"], [[1.5, self.table("points")["x"].mean()]], ["As expected."], more=more)


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.setattr(reproduce, "find", lambda name: Probe)
    monkeypatch.setattr(Probe, "computed", 0)
    monkeypatch.setattr(Probe, "fail", None)
    return Probe


def test_computes_draws_and_compares(probe, tmp_path, capsys):
    assert cli.main(["reproduce", "fig2", "--out", str(tmp_path), "--seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert "fig2: 3 seconds" in out and "1.5" in out and "As expected." in out
    assert "Differences\nagainst\nitself" in out
    page = (tmp_path / "fig2" / "report.html").read_text()
    assert "Probe &lt;figure&gt;" in page and "QUICK" not in page and "itself" in page
    assert (tmp_path / "fig2" / "figures" / "points.png").exists()


def test_quick_is_labelled_everywhere(probe, tmp_path, capsys):
    assert cli.main(["reproduce", "fig2", "--out", str(tmp_path), "--quick"]) == 0
    assert "QUICK, not the paper's experiment: less" in capsys.readouterr().out
    folder = tmp_path / "fig2-quick"
    assert "QUICK" in (folder / "report.html").read_text()
    assert "[QUICK]" in (folder / "figures" / "points.svg").read_text()
    assert Table.load(folder / "points.csv").provenance["label"].startswith("QUICK")


def test_redraw_computes_nothing(probe, tmp_path, capsys):
    assert cli.main(["reproduce", "fig2", "--out", str(tmp_path), "--redraw"]) == cli.FAILED
    assert "holds no tables" in capsys.readouterr().err
    cli.main(["reproduce", "fig2", "--out", str(tmp_path)])
    assert cli.main(["reproduce", "fig2", "--out", str(tmp_path), "--redraw"]) == 0
    assert probe.computed == 1


def test_interruption_leaves_a_report(probe, tmp_path, capsys):
    probe.fail = KeyboardInterrupt()
    assert cli.main(["reproduce", "fig2", "--out", str(tmp_path)]) == cli.INTERRUPTED
    assert (tmp_path / "fig2" / "report.html").exists()
    assert "report:" in capsys.readouterr().out


def test_all_goes_on_after_a_failure(probe, tmp_path, capsys):
    probe.fail = ValueError("CIFAR-10 is not on this disk")
    assert cli.main(["reproduce", "all", "--out", str(tmp_path)]) == cli.FAILED
    assert probe.computed == len(experiments.ITEMS)
    assert "8 of 8 items failed" in capsys.readouterr().err


def test_json(probe, tmp_path, capsys):
    assert cli.main(["reproduce", "fig2", "--out", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["rows"] == [{"paper": 1.5, "measured": 1.5}]


def test_options_of_other_items_are_refused(probe, tmp_path, capsys):
    assert cli.main(["reproduce", "fig2", "--out", str(tmp_path), "--restarts", "3"]) == cli.FAILED
    assert "--restarts does not apply to fig2" in capsys.readouterr().err
    assert probe.computed == 0
