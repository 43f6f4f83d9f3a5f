import numpy as np
import pytest

from wideflat.commands.findings import _committees, _entropy_series, collect, summary
from wideflat.experiments.table1 import ITEM as TABLE1
from wideflat.training.runs import Run


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


def test_solutions_of_one_file_share_a_curve(results):
    curve = collect([results]).entropies["entropy"]
    series = _entropy_series("committee", curve.relative_distance, curve.phi, np.array([[True, True], [True, False]]))
    assert series.legend == "committee (n = 1 to 2)" and list(series.counts) == [2, 1]
    both = 1e3 * np.asarray(curve.phi)[:, 0]
    assert series.y[0] == pytest.approx(both.mean()) and series.error[0] == pytest.approx(both.std(ddof=1))
    assert series.y[1] == pytest.approx(1e3 * float(curve.phi[0, 1]))


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
