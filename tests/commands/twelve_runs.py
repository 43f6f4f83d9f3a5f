"""Twelve runs as a training leaves them, with local energies: four algorithms, three seeds each, a rate that drops."""

import numpy as np
from torch import nn

from wideflat.energy.profile import LocalEnergy
from wideflat.training.runs import Run

FINAL = {"sgd": 0.20, "rsgd": 0.18, "esgd": 0.15, "ema": 0.20}


def write(path, algorithm, seed, error, epochs=300, train=50_000, name="cifar10-smallconvnet", passes=300):
    about = {"name": name, "algorithm": algorithm, "epochs": epochs, "dataset": "cifar10", "model": "smallconvnet"}
    about |= {"paper_error": 16.5, "paper_spread": 0.2, "batch_size": 128}
    data = {"name": "cifar10", "train": train, "test": 10_000}
    run = Run.create(path, {"experiment": about, "options": {"seed": seed, "limit_data": None}, "data": data})
    with run.locked():
        for epoch in range(1, 11):
            row = {
                "epoch": 30 * epoch,
                "lr": 0.1 if epoch < 6 else 0.01,
                "train_loss": 2 / epoch,
                "train_error": 0.5 / epoch,
            }
            run.append("metrics", {**row, "test_error": error + 0.5 / epoch, "passes": passes * epoch / 10})
        result = {"epoch": epochs, "train_error": 0.01, "test_error": error}
        run.save_model(nn.Linear(1, 1), result)
    sigmas = np.linspace(0, 0.5, 6)
    conventions = {"metric": "error", "architecture": "SmallConvNet", "data": "a"}
    profile = LocalEnergy(sigmas, error * sigmas**2, 0.001 + 0 * sigmas, baseline=0.01, conventions=conventions)
    profile.save(path / "local_energy.json")


def runs(folder):
    return {path.parent.name: Run.open(path.parent) for path in sorted(folder.glob("*/config.json"))}
