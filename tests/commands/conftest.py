"""What commands are given: runs, one of everything, a checkpoint of somebody's own network and what builds it."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from wideflat.committee import SETTINGS, train
from wideflat.energy.profile import LocalEnergy
from wideflat.entropy.measure import local_entropy
from wideflat.experiments.fig6 import ITEM as FIG6
from wideflat.training.runs import Run

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "entropy"))  # its committees
from twelve_runs import FINAL, write

BUILDER = """
import torch
from torch import nn

def build():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=g)
    return nn.Sequential(nn.Linear(3, 2)), (x, (x[:, 0] > 0).long())

def wrong():
    return 3
"""


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """The name of the module; weights.pt beside it is the checkpoint."""
    monkeypatch.chdir(tmp_path)
    name = f"my_networks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(BUILDER)
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Linear(3, 2)).state_dict(), tmp_path / "weights.pt")
    return name


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Twelve runs: four algorithms, three seeds each, a learning rate that drops; and their local energies."""
    folder = tmp_path_factory.mktemp("twelve")
    for algorithm, error in FINAL.items():
        for seed in range(3):
            write(folder / f"small-{algorithm}-seed{seed}", algorithm, seed, error + 0.002 * (seed - 1))
    return folder


@pytest.fixture(scope="session")
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
