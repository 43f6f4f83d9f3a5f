from pathlib import Path

from wideflat.experiments.fig3 import ITEM as FIG3
from wideflat.experiments.trainings import Cell
from wideflat.presets import preset


def test_the_paper_s_experiment(tmp_path: Path) -> None:
    item = FIG3.open(tmp_path)
    assert [cell.name for cell in item.work.cells] == [f"cifar10-resnet18-{a}-seed-0" for a in ("sgd", "rsgd", "esgd")]
    cell = Cell(preset("cifar10-resnet18", "sgd"), 0)
    assert item.snapshots(cell) == [16, 48, 96, 128, 160] and item.epochs_of(cell) == [16, 48, 96, 128, None]
    assert item.part(cell, 96) == 0.6
    assert item.sigmas[0] == 0 and item.sigmas[-1] == 0.5
    assert "15 local-energy profiles of 11 points" in item.cost()
