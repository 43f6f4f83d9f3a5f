"""A network of Figure 7: what its run says of it, and its profile from its file."""

from typing import Any

import pytest
import torch
from torch import nn

from wideflat.experiments.networks import Measurement, Network
from wideflat.training import flatness
from wideflat.training.runs import Run


def test_it_is_what_its_run_says(item: Any) -> None:
    cell = item.work.cells[0]
    run = Run.open(item.work.trainings.folder / cell.name)
    result = run.result()
    assert result is not None
    profile = flatness.LocalEnergy.load(item.folder / "profiles" / f"{cell.name}.json")
    network = Network.of_run(cell.preset, run, profile)
    assert (network.name, network.epochs, network.test_error) == (cell.name, 2, result["test_error"])
    assert (network.dropout, network.batch_size, network.lr) == (0.0, 10, cell.preset.lr)


def test_a_network_of_others_is_measured_once_and_again_for_another_request(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network, images = nn.Linear(3, 2), (torch.randn(20, 3), torch.randint(2, (20,)))
    settings: dict[str, Any] = {"noise": "batch", "realisations": 2, "seed": 0, "device": "cpu"}
    measurement = Measurement(tmp_path, 0.5, **settings)
    profile = measurement.of_network("theirs", network, images)
    assert profile.sigmas.tolist() == [0.5] and measurement.file("theirs").exists()
    monkeypatch.setattr("wideflat.experiments.networks.local_energy", lambda *a, **k: pytest.fail("measured again"))
    assert measurement.of_network("theirs", network, images).mean.tolist() == profile.mean.tolist()
    monkeypatch.undo()
    again = Measurement(tmp_path, 0.4, **settings).of_network("theirs", network, images)
    assert again.sigmas.tolist() == [0.4] and measurement.file("theirs").exists()
