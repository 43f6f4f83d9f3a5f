"""The command ``wideflat reproduce``, on an experiment that takes no time."""

import dataclasses
import json

import pytest

from wideflat import cli, experiments
from wideflat.commands import reproduce
from wideflat.experiments.experiment import Comparison, Experiment
from wideflat.experiments.statistics import mean_and_spread
from wideflat.experiments.table import Table
from wideflat.report.chart import Chart, Series


class ProbeWork:
    """Writes a table, then fails if it is told to."""

    computed = 0
    fail: BaseException | None = None

    def __init__(self, experiment):
        self.experiment = experiment

    def cost(self):
        return f"{getattr(self.experiment.options, 'seeds', 1)} seconds"

    def compute(self, experiment, workers=None):
        type(self).computed += 1
        Table(["x"], [[1.0], [2.0]], experiment.provenance()).save(experiment.folder / "points.csv")
        if self.fail:
            raise self.fail

    def compute_piece(self, name):
        raise NotImplementedError


class Probe(Experiment):
    def __init__(self, item, folder, options, quick=False):
        super().__init__(item, folder, options, quick)
        self.work = ProbeWork(self)

    def charts(self):
        table = self.table("points")
        return [Chart("points", "Points", "n", "x", [Series("a", [0, 1], table["x"])])] if table else []

    def comparison(self):
        mean = mean_and_spread(self.table("points")["x"])
        more = [Comparison(["against"], [["itself"]], title="Differences")]
        return Comparison(["paper", "measured"], [[1.5, mean]], ["As expected."], more=more)


@pytest.fixture
def probe(monkeypatch):
    def find(name):
        return dataclasses.replace(
            experiments.item(name), title="Probe <figure>", claim="Nothing.", quick_means="less", make=Probe
        )

    monkeypatch.setattr(reproduce, "find_item", find)
    monkeypatch.setattr(ProbeWork, "computed", 0)
    monkeypatch.setattr(ProbeWork, "fail", None)
    return ProbeWork


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
    assert f"{len(experiments.ITEMS)} of {len(experiments.ITEMS)} items failed" in capsys.readouterr().err


def test_json_has_numbers_as_numbers(probe, tmp_path, capsys):
    assert cli.main(["reproduce", "fig2", "--out", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["rows"] == [{"paper": 1.5, "measured": 1.5, "measured_spread": pytest.approx(0.5**0.5)}]
    assert content["more"] == {"Differences": [{"against": "itself"}]}


def test_options_of_other_items_are_refused(probe, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["reproduce", "fig2", "--out", str(tmp_path), "--restarts", "3"])
    assert end.value.code == cli.USAGE and "--restarts" in capsys.readouterr().err
    assert probe.computed == 0


def test_an_item_s_help_shows_its_own_options(capsys):
    for item, own, others in (
        ("fig7", ("--widths", "--dropouts", "--quick", "--workers"), ("--restarts", "--moments", "--rows")),
        ("fig1", ("--slow-restarts", "--methods"), ("--rows", "--widths", "--epochs")),
        ("table1", ("--rows", "--seeds"), ("--sigmas", "--restarts")),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["reproduce", item, "--help"])
        text = capsys.readouterr().out
        assert end.value.code == 0 and "None" not in text
        assert all(flag in text for flag in own) and not any(f" {flag} " in text for flag in others)


def test_the_list_of_items_is_in_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in (*experiments.ITEMS, "all"))


@pytest.mark.parametrize("line", ["--out {} --quick fig2 --seeds 3", "fig2 --seeds 3 --quick --out {}"])
def test_what_all_items_share_may_stand_before_the_item(probe, tmp_path, capsys, line):
    assert cli.main(["reproduce", *line.format(tmp_path).split()]) == 0
    assert "fig2: 3 seconds" in capsys.readouterr().out and (tmp_path / "fig2-quick" / "report.html").exists()


def test_all_takes_the_options_of_every_item():
    names = {field.name for field in dataclasses.fields(reproduce.AllOptions)}
    for name in experiments.ITEMS:
        assert names >= {field.name for field in dataclasses.fields(experiments.item(name).options)}


def test_every_flag_of_the_command_before_is_there():
    """The options that `wideflat reproduce` had when all items shared them."""
    before = (
        "out quick redraw json data allow_altered seed seeds rows algorithms epochs limit_data models restarts "
        "slow_restarts settings subsets draws methods align gradient_scale size deltas dropouts batch_sizes "
        "weight_decays dataset widths lr target_loss sigma realisations noise sigmas moments target_stderr max_passes "
        "runs device workers retries engine slurm_options"
    )
    now = {field.name for kind in (reproduce.Command, reproduce.AllOptions) for field in dataclasses.fields(kind)}
    added = {"subset", "chains", "samples"}  # of volume
    assert now - {"item"} == set(before.split()) | added


def test_wrong_choices_are_errors_of_usage(tmp_path, capsys):
    for line, words in (
        ("table1 --rows cifar10-resnet19", "Did you mean 'cifar10-resnet18'"),
        ("table1 --limit-data 0", "limit_data must be >= 1"),
        ("fig1 --settings adam", "settings must be some of"),
        ("fig7 --realisations 1", "realisations must be >= 2"),
        ("fig3 --moments 2", "parts of the training"),
    ):
        assert cli.main(["reproduce", *line.split(), "--out", str(tmp_path)]) == cli.USAGE
        assert words in capsys.readouterr().err
