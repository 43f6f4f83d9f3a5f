from pathlib import Path

import torch

from wideflat.experiments.cells import CellOptions, Cells, Choice, quick_cell
from wideflat.presets import preset

CHOICE = Choice.of(("cifar10-resnet18",), seeds=5, quick_seeds=2)


def test_what_is_not_chosen_is_the_item_s() -> None:
    usual = Cells(CellOptions(), CHOICE, Path("nowhere"), quick=False)
    assert (usual.rows, usual.seeds, usual.epochs, usual.trainings.limit_data) == (("cifar10-resnet18",), 5, None, None)
    quick = Cells(CellOptions(), CHOICE, Path("nowhere"), quick=True)
    assert (quick.seeds, quick.epochs, quick.trainings.limit_data) == (2, 12, 400)
    assert [cell.name for cell in quick.all[:4]] == [
        *(f"quick-cifar10-resnet18-{name}-seed-0" for name in ("sgd", "rsgd", "esgd")),
        "quick-cifar10-resnet18-sgd-seed-1",
    ]
    chosen = Cells(CellOptions(seed=7, seeds=1, algorithms=("esgd",), epochs=16), CHOICE, Path("nowhere"), quick=False)
    assert [(cell.seed, cell.preset.epochs) for cell in chosen.all] == [(7, 3)]  # 32 epochs of 160, a tenth
    assert "16 epochs of the baseline" in chosen.deviations()[0]


def test_the_reduced_form_keeps_the_settings_of_its_row() -> None:
    cell, quick = preset("cifar10-resnet110", "rsgd"), quick_cell(preset("cifar10-resnet110", "rsgd"))
    assert (quick.lr, quick.period, quick.num_replicas) == (cell.lr, cell.period, cell.num_replicas)
    assert quick.model == "wideflat.experiments.cells:quick_network"  # in the configuration of runs: must not move
    assert quick.build_model()(torch.zeros(2, 1, 28, 28)).shape == (2, 2)


def test_networks_are_kept_for_the_figures_that_follow_them() -> None:
    cells = Cells(CellOptions(seeds=1), CHOICE, Path("nowhere"), quick=False)
    assert cells.snapshots(cells.all[0]) == [16, 48, 96, 128, 160]
    others = Cells(CellOptions(seeds=1, rows=("cifar10-smallconvnet",)), CHOICE, Path("nowhere"), quick=False)
    assert others.snapshots(others.all[0]) == []
