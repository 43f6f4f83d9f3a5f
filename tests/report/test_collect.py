import json

import numpy as np
import pytest
import torch

from wideflat import cli
from wideflat.committee import SETTINGS, train
from wideflat.energy.profile import LocalEnergy
from wideflat.entropy.measure import local_entropy
from wideflat.experiments.fig6 import Fig6
from wideflat.report.collect import collect, summary
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
    setting = SETTINGS["sgd-fast"].but(hidden=3, batch_size=2, lr=1e-3)
    solutions = train(setting, x, y, seeds=range(2), test_inputs=x, test_targets=y, progress=False)
    solutions.save(folder / "solutions.npz")
    local_entropy(solutions.weights, x, y, deltas=[0.1, 0.5]).save(folder / "entropy.npz")
    (folder / "runs" / "first" / "local-energy.json").write_text('{"sigmas": [0], "mean": [')  # cut off
    (folder / "notes.json").write_text('["something else"]')
    np.savez(folder / "other.npz", a=np.zeros(2))
    fig6 = Fig6(folder / "fig6-quick", quick=True, restarts=2, dropouts=(0.0, 0.4), size=20, deltas=(0.1, 1.0))
    fig6.compute()
    return folder


def test_everything_is_found_once(results):
    found = collect([results])
    assert list(found.runs) == ["runs/first"]
    assert list(found.energies) == ["flat"] and list(found.entropies) == ["entropy"]
    assert list(found.solutions) == ["solutions"]
    assert [item.label != "" for item in found.experiments] == [True]
    assert [path.rsplit("/", 1)[1] for path in found.unread] == ["local-energy.json"]


def test_summary_sets_paper_beside_measured(results):
    columns, rows = summary(collect([results]).runs)
    row = dict(zip(columns, rows[0], strict=True))
    assert row["paper %"] == "16.5 ± 0.2" and row["test error %"] == "25.00" and row["epochs"] == "2/3 (unfinished)"


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
    assert "[QUICK]" in text and "<b>net" not in text and "local-energy.json" in text
    out = capsys.readouterr().out
    assert "not read" in out and str(page) in out
    assert "[QUICK]" in out and "Differences of the means" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "does not exist"), ("empty", "nothing to report"), ("damaged", "nothing to report")],
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
    cli.main(["report", str(results / "runs"), "--out", str(tmp_path / "page.html"), "-q"])
    text = (tmp_path / "page.html").read_text()
    assert json.dumps({"seed": 7})[1:-1].replace('"', "&quot;") in text
