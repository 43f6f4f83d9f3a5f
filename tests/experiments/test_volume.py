"""``wideflat reproduce volume`` on tiny networks, trained once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wideflat.experiments import volume
from wideflat.experiments.table import Table
from wideflat.experiments.volume import ITEM, NETWORKS, agreement, read_volume

SMALL: dict[str, Any] = {"epochs": 6, "limit_data": 60, "algorithms": ("sgd", "esgd"), "sigma": 0.05, "subset": 20}


@pytest.fixture(scope="module")
def item(tmp_path_factory: pytest.TempPathFactory) -> Any:
    item = ITEM.open(tmp_path_factory.mktemp("volume"), quick=True, **SMALL)
    item.compute()
    return item


def test_every_network_has_both_measures_and_its_errors(item: Any) -> None:
    table = item.table("networks")
    assert table is not None and table.unique("algorithm") == ["sgd", "esgd"]
    for row in table:
        found = read_volume(item.volumes.entropy_file(row["network"]))
        assert found is not None and row["log_z"] == found.log_z[0] and row["stderr"] == found.stderr[0]
        assert row["examples"] == 20 and row["low"] < row["log_z"] < row["high"] and 0 <= row["test_error"] <= 1
        assert row["loss_energy"] == pytest.approx(found.local_energy[0][0]) and np.isfinite(row["delta_e"])
    assert len({read_volume(item.volumes.entropy_file(name)).conventions["data"] for name in table["network"]}) == 1  # type: ignore[union-attr]
    lambdas = item.table("lambda")
    assert lambdas is not None and set(lambdas.unique("network")) == set(table.unique("network"))


def test_page_and_charts(item: Any) -> None:
    names = [chart.name for chart in item.charts()]
    assert names == ["volume-test-error", "volume-local-energy-of-the-error", "volume-lambda"]
    comparison = item.comparison()
    assert [row[0] for row in comparison.rows] == sorted(
        item.table("networks")["network"],
        key=lambda name: -float(item.table("networks").where(network=name)["log_z"][0]),
    )
    record = item.record(item.write_report())
    assert isinstance(record["rows"][0]["log_z"], float) and "QUICK" in record["label"]


def test_what_is_measured_is_not_measured_again(item: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume, "free_entropy", lambda *a, **k: pytest.fail("measured again"))
    before = (item.folder / "networks.csv").read_text()
    item.compute()
    assert (item.folder / "networks.csv").read_text() == before
    other = ITEM.open(item.folder, quick=True, **{**SMALL, "sigma": 0.1})  # another request
    with pytest.raises(pytest.fail.Exception):
        other.compute()


def test_runs_can_be_given(item: Any, tmp_path: Path) -> None:
    options = {"sigma": 0.05, "subset": 20, "samples": 8, "seed": 0}
    other = ITEM.open(tmp_path, models=item.trainings.folder, **options)
    assert "finished runs" in other.cost()
    other.compute()
    ours, theirs = item.table("networks"), other.table("networks")
    assert sorted(theirs["log_z"]) == pytest.approx(sorted(ours["log_z"]), rel=1e-6)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        ITEM.open(tmp_path, models=tmp_path / "nowhere").compute()
    with pytest.raises(ValueError, match="not measured in pieces"):
        other.compute_piece("one")


def test_agreement_counts_what_is_told_apart() -> None:
    table = Table(NETWORKS)
    for log_z, test_error, delta_e, converged in (
        (-2.0, 0.10, 0.30, True),
        (-8.0, 0.20, 0.31, True),  # its local energy is not told apart from the first one's
        (-9.0, 0.15, 0.50, True),  # its log Z is not told apart from the second one's
        (-50.0, 0.01, 0.01, False),  # no value
    ):
        errors = {"stderr": 0.5, "delta_e_stderr": 0.02, "loss_energy_stderr": 0.1}
        table.add(
            log_z=log_z, test_error=test_error, delta_e=delta_e, loss_energy=-log_z, converged=converged, **errors
        )
    rows = {row[0]: row for row in agreement(table).rows}
    assert rows["test error"][1:3] == [2, "2/2"]
    assert rows["local energy of the error"][1:3] == [1, "1/1"]
    assert rows["local energy of the loss"][1:3] == [2, "2/2"]
    assert rows["test error"][3].numbers["value"] == pytest.approx(0.5)  # type: ignore[attr-defined]
