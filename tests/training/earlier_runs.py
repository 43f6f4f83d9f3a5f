"""Runs and results as an earlier version writes them; run as a script in that version to make what the tests read.

    git archive 85c623f | tar -x -C OLD
    PYTHONPATH=OLD:tests/training OMP_NUM_THREADS=1 python tests/training/earlier_runs.py FOLDER

It writes, for each algorithm, FOLDER/runs/ALGORITHM: a training that was stopped by SIGTERM in the middle of an epoch
and of a cycle; FOLDER/finished/ALGORITHM: the same one undisturbed; and FOLDER/results: a local energy, local energies
along a training, a curvature, a local entropy, a table of an experiment. Everything is packed into FOLDER.zip.

Noise has had tails since that version, so what goes on with other noise ends elsewhere: ``esgd`` and ``parle`` are
trained without noise, ``esgd-noise`` with it.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import noisy
import torch
from torch import nn

from wideflat.data import ImageData
from wideflat.presets import preset

ALGORITHMS = ("sgd", "rsgd", "esgd", "rsgdxy", "lookahead", "easgd", "parle", "sam")
#: At which iteration the runs were stopped: 5 are an epoch, and no cycle of theirs ends there.
STOPPED = 7
SIGMAS = (0.0, 0.1, 0.3)


def network(num_classes: int) -> nn.Module:
    """The network of these runs."""
    return noisy.network(num_classes, channels=4, side=3)


def images() -> ImageData:
    return noisy.images(size=8)


def experiment(algorithm: str):
    """What was trained under a name of ``runs``."""
    name, noisy, _ = algorithm.partition("-")
    base = preset("cifar10-smallconvnet", name)
    quiet = {} if noisy or not base.epsilon else {"epsilon": 0.0}
    cell = dataclasses.replace(
        base, model="earlier_runs:network", image_size=8, padding=1, batch_size=16, period=3, **quiet
    )
    return cell.with_epochs(3)


def measured() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A small network and its data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    x = torch.randn(64, 6)
    return model, [(x, x[:, :3].argmax(1))]


def committee() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A committee of three units that gets all of its patterns right."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(3, 60, generator=generator, dtype=torch.float64)
    patterns = torch.randn(24, 60, generator=generator, dtype=torch.float64).sign()
    return weights, patterns, (patterns @ weights.T).sign().sum(1).sign()


def _write_runs(folder: Path) -> None:
    from wideflat.train import Interrupted, Options, Training, train

    once = Training.iterate

    def stopped(self: Training) -> torch.Tensor:
        loss = once(self)
        if self.step == STOPPED:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    for algorithm in (*ALGORITHMS, "esgd-noise"):
        train(experiment(algorithm), folder / "finished" / algorithm, images(), Options(), tensorboard=False)
        Training.iterate = stopped
        with contextlib.suppress(Interrupted):
            train(experiment(algorithm), folder / "runs" / algorithm, images(), Options(), tensorboard=False)
        Training.iterate = once
        run = folder / "runs" / algorithm
        for name in ("environment.jsonl", "events.jsonl", "lock"):  # they name a machine and a place
            (run / name).unlink(missing_ok=True)
        for path in list((run / "checkpoints").glob("step-*5.*")):  # that of the epoch before
            path.unlink()


def _write_results(folder: Path) -> None:
    from wideflat.curvature import curvature
    from wideflat.local_energy import LocalEnergyTrace

    import wideflat
    from wideflat.experiments.table import Table

    folder.mkdir(parents=True)
    model, data = measured()
    sigmas = torch.tensor(SIGMAS)
    wideflat.local_energy(model, data, sigmas, noise="batch", progress=False).save(folder / "local_energy.json")
    trace = LocalEnergyTrace(data, SIGMAS, noise="batch", progress=False)
    trace(model, 3)
    trace.save(folder / "trace.json")
    curvature(model, data, top=1, progress=False).save(folder / "curvature.json")
    wideflat.local_entropy(*committee(), deltas=torch.tensor([0.01, 0.1]), progress=False).save(folder / "curve.npz")
    table = Table(["algorithm", "n", "error"], provenance={"about": "made by hand"})
    table.add(algorithm="sgd", n=3, error=12.5)
    table.add(algorithm="esgd", n=3, error=None)
    table.save(folder / "table.csv")


def main(folder: Path) -> None:
    """Write everything, and pack it."""
    _write_runs(folder)
    _write_results(folder / "results")
    for run in (folder / "finished").iterdir():  # of these the end is all that is wanted
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        shutil.move(run / "model.safetensors", folder / "finished" / f"{run.name}.safetensors")
        shutil.rmtree(run)
        (folder / "finished" / f"{run.name}.json").write_text(json.dumps(rows))
    shutil.make_archive(str(folder), "zip", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
