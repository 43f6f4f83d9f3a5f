import html
import json
import re

import numpy as np
import pytest
import torch

from wideflat import cli
from wideflat.commands.findings import _committees, _entropy_series, collect, summary
from wideflat.committee import SETTINGS, train
from wideflat.energy.profile import LocalEnergy
from wideflat.entropy.measure import local_entropy
from wideflat.experiments.fig6 import ITEM as FIG6
from wideflat.experiments.table1 import ITEM as TABLE1
from wideflat.training.runs import Run


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with one of everything, and some things that are damaged or not ours."""
    folder = tmp_path_factory.mktemp("results")
    about = {"name": "cifar10-<b>net", "algorithm": "rsgd", "epochs": 3, "paper_error": 16.5, "paper_spread": 0.2}
    run = Run.create(folder / "runs" / "first", {"experiment": about, "options": {"seed": 7}})
    with run.locked():
        for epoch in (1, 2):
            row = {"epoch": epoch, "passes": 3 * epoch, "train_loss": 1 / epoch, "train_error": 0.4 / epoch}
            run.append("metrics", {**row, "test_error": 0.5 / epoch, "gamma": 10.0**epoch, "distance": 0.1})
    LocalEnergy(sigmas=[0.0, 0.5], mean=[0.0, 0.1], stderr=[0.0, 0.01], baseline=0.02).save(folder / "flat.json")
    x = torch.tensor([[1.0, 1.0, -1.0], [1.0, -1.0, 1.0], [-1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
    y = torch.tensor([1.0, 1.0, -1.0, -1.0])
    setting = SETTINGS["sgd-fast"].replace(hidden=3, batch_size=2, lr=1e-3)
    solutions = train(setting, x, y, seeds=range(2), test_inputs=x, test_targets=y, progress=False)
    solutions.save(folder / "solutions.npz")
    local_entropy(solutions.weights, x, y, deltas=[0.1, 0.5]).save(folder / "entropy.npz")
    (folder / "runs" / "first" / "local-energy.json").write_text('{"sigmas": [0], "mean": [')  # cut off
    (folder / "notes.json").write_text('["something else"]')
    np.savez(folder / "other.npz", a=np.zeros(2))
    fig6 = FIG6.open(
        folder / "fig6-quick", quick=True, restarts=2, subsets=1, dropouts=(0.0, 0.4), size=20, deltas=(0.1, 1.0)
    )
    fig6.compute()
    return folder


def test_everything_is_found_once(results):
    found = collect([results])
    assert list(found.runs) == ["runs/first"]
    assert list(found.energies) == ["flat"] and list(found.entropies) == ["entropy"]
    assert list(found.solutions) == ["solutions"]
    assert [item.label != "" for item in found.experiments] == [True]
    assert [path.rsplit("/", 1)[1] for path in found.unread] == ["local-energy.json"]


def test_summary_sets_paper_beside_measured_only_where_that_is_fair(results):
    columns, rows = summary(collect([results]).runs)
    row = dict(zip(columns, rows[0], strict=True))
    assert row["paper %"] == "–" and row["test error %"] == "25.00" and row["epochs"] == "2/3 (unfinished)"


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


def test_solutions_of_one_file_share_a_curve(results):
    curve = collect([results]).entropies["entropy"]
    series = _entropy_series("committee", curve.relative_distance, curve.phi, np.array([[True, True], [True, False]]))
    assert series.legend == "committee (n = 1 to 2)" and list(series.counts) == [2, 1]
    both = 1e3 * np.asarray(curve.phi)[:, 0]
    assert series.y[0] == pytest.approx(both.mean()) and series.error[0] == pytest.approx(both.std(ddof=1))
    assert series.y[1] == pytest.approx(1e3 * float(curve.phi[0, 1]))


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


def test_an_experiment_is_shown_with_the_options_it_was_computed_with(tmp_path):
    """Not with the defaults of its item: another length or fewer images must be said."""
    small = {"epochs": 1, "limit_data": 30, "seeds": 1, "algorithms": ("sgd",), "rows": ("cifar10-smallconvnet",)}
    item = TABLE1.open(tmp_path / "table1-quick", quick=True, **small)
    item.compute()
    (found,) = collect([tmp_path]).experiments
    assert "1 epochs on 30 Dress-vs-Coat images" in found.label == item.label
    assert found.comparison() == item.comparison()
    table = item.table("cells")
    table.provenance = {"item": "table1", "label": "", "options": {"epochs": 7, "nonsense": 1}}
    table.save(tmp_path / "another" / "cells.csv")
    (found,) = collect([tmp_path / "another"]).experiments
    assert any("7 epochs of the baseline" in remark for remark in found.comparison().remarks)
    table.provenance = {"item": "table1", "label": "QUICK"}  # as written before options were recorded
    table.save(tmp_path / "another" / "cells.csv")
    assert len(collect([tmp_path / "another"]).experiments[0].comparison().rows) == 1


def test_committee_runs_are_called_by_their_setting_where_that_tells_them_apart(tmp_path):
    for name, setting in (("a", "sgd-fast"), ("b", "esgd"), ("c", "esgd")):
        Run.create(tmp_path / name, {"experiment": {"name": f"committee-{setting}", "hidden": 9}})
    assert _committees(collect([tmp_path]).runs) == {"a": "committee-sgd-fast"}
