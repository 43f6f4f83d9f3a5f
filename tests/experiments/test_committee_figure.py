import numpy as np
import pytest

from wideflat.committee import SETTINGS
from wideflat.entropy.measure import METHODS
from wideflat.experiments import committee_figure
from wideflat.experiments.committee_figure import Case
from wideflat.experiments.sweep import FolderInUse
from wideflat.files import hold


def test_tables_have_every_solution_and_point(computed):
    restarts, entropy, energy = (computed.table(name) for name in ("restarts", "entropy", "energy"))
    assert len(restarts) == 2 * (3 + 2)
    assert len(entropy) == len(restarts) * 3 and len(energy) == len(restarts) * 2
    assert (restarts["train_errors"] == 0).all()
    assert (restarts["phi_bp"] < 0).all() and (restarts["energy"] > 0).all()
    assert (energy.where(sigma=0)["energy"] == 0).all()
    assert restarts.provenance["settings"]["dropout"]["dropout"] == 0.3


def test_nothing_is_computed_twice(computed, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("computed again")

    before = computed.table("restarts").rows
    monkeypatch.setattr(committee_figure, "train", refuse)
    monkeypatch.setattr(committee_figure, "local_entropy", refuse)
    computed.compute()
    assert computed.table("restarts").rows == before


def test_interrupted_after_one_group_it_can_be_drawn(tmp_path, monkeypatch, small):
    real, calls = committee_figure.train, []

    def once(*arguments, **options):
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(committee_figure, "train", once)
    figure = small(tmp_path, methods=("bp",))
    with pytest.raises(KeyboardInterrupt):
        figure.compute()
    assert figure.write_report().exists()
    assert [row[1] for row in figure.comparison().rows] == ["plain"]


def test_more_restarts_are_added_to_those_that_are_there(tmp_path, monkeypatch, small):
    figure = small(tmp_path, methods=("bp",))
    plain = figure.cases[0].setting
    figure.work.cases = [Case("plain", plain, 2)]
    figure.compute()
    before = {(row["subset"], row["seed"]): row for row in _rows(figure.table("restarts"))}
    seeds, real = [], committee_figure.train
    monkeypatch.setattr(committee_figure, "train", lambda *a, **o: seeds.append(list(o["seeds"])) or real(*a, **o))
    figure.work.cases = [Case("plain", plain, 3)]
    assert all(figure.work.measured(group) is None for group in figure.work.groups())
    figure.compute()
    assert seeds == [[2], [2]]
    after = {(row["subset"], row["seed"]): row for row in _rows(figure.table("restarts"))}
    assert len(after) == 6 and np.isfinite([row["phi_bp"] for row in after.values()]).all()
    for key, row in before.items():
        assert after[key].pop("phi_bp") == pytest.approx(row.pop("phi_bp"), rel=1e-6)  # of another group of references
        assert after[key] == row
    figure.work.cases = [Case("plain", plain, 1)]  # what is there is shown, though fewer were asked for
    figure.compute()
    assert len(figure.table("restarts")) == 6 and len(seeds) == 2


def _rows(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_solutions_of_something_else_are_refused(computed, tmp_path, small):
    other = small(computed.folder, methods=("bp",))
    other.work.cases = [Case("plain", computed.cases[0].setting.replace(gradient_scale=30.0), 3)]
    with pytest.raises(ValueError, match=r"gradient_scale = 100\.0 instead of 30\.0; give another --out"):
        other.compute()
    other = small(computed.folder, methods=("bp",), seed=7)
    with pytest.raises(ValueError, match="other training patterns"):
        other.compute()


def test_curves_at_other_points_are_computed_again(tmp_path, small):
    figure = small(tmp_path, methods=("bp",))
    figure.work.cases = figure.cases[:1]
    figure.compute()
    figure.work.deltas = (0.1, 1.0)
    figure.compute()
    assert set(figure.table("entropy")["delta"]) == {0.1, 1.0}


def test_two_processes_do_not_compute_one_figure(tmp_path, small):
    figure = small(tmp_path)
    with open(tmp_path / "lock", "w") as lock:
        hold(lock)
        with pytest.raises(FolderInUse, match="another process is computing"):
            figure.compute()
    assert not list(tmp_path.glob("*.csv"))


def test_solutions_with_errors_have_no_local_entropy(tmp_path, small):
    figure = small(tmp_path, methods=("bp",))
    figure.work.cases = [Case("hopeless", SETTINGS["sgd-fast"].replace(max_epochs=1), 2)]
    figure.compute()
    restarts = figure.table("restarts")
    assert (restarts["train_errors"] > 0).all() and np.isnan(restarts["phi_bp"]).all()
    assert len(figure.table("entropy")) == 0 and figure.charts()[0].name == "energy-balanced"
    assert figure.comparison().rows[0][7] == "–"
    assert any("No restart of hopeless got rid of all training errors" in text for text in figure.comparison().remarks)


def test_every_method_of_the_local_entropy_can_be_reproduced(tmp_path, small):
    figure = small(tmp_path, methods=tuple(METHODS)[:-1])  # all but the sampler, which takes minutes
    figure.work.cases = [Case("plain", figure.cases[0].setting, 1)]
    figure.work.subsets = 1
    figure.compute()
    (row,) = figure.comparison().records()
    assert {f"phi_{name.replace('-', '_')}_times_1000" for name in figure.work.methods} <= row.keys()
    titles = [chart.title for chart in figure.charts()]
    assert f"Local entropy by {METHODS['ep-vector']}" in titles
