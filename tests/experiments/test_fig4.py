from pathlib import Path

import pytest

from wideflat.experiments.fig4 import ITEM as FIG4


def test_the_paper_s_experiment(tmp_path: Path) -> None:
    names = [cell.name for cell in FIG4.open(tmp_path).work.cells]
    assert names == [
        *("cifar100-efficientnet-sgd-seed-0", "cifar100-efficientnet-rsgd-seed-0"),
        *("cifar100-pyramidnet-sgd-seed-0", "cifar100-pyramidnet-rsgd-seed-0"),
        *(f"tinyimagenet-resnet50-{name}-seed-0" for name in ("sgd", "rsgd", "esgd")),
        *(f"tinyimagenet-densenet-{name}-seed-0" for name in ("sgd", "rsgd", "esgd")),
    ]
    other = FIG4.open(tmp_path, rows=("cifar10-smallconvnet",))
    assert [cell.preset.algorithm for cell in other.work.cells] == ["sgd", "rsgd", "esgd"]


def test_quick_path_with_every_row(tmp_path: Path) -> None:
    item = FIG4.open(
        tmp_path, quick=True, epochs=2, limit_data=40, algorithms=("sgd",), sigmas=(0.0, 0.5), max_passes=1
    )
    item.compute()
    assert len(item.charts()) == 4
    rows = item.comparison().rows
    assert [row[2] for row in rows] == ["0.07", "0.08", "0.04", "0.1"] and rows[0][7] != "-"
    assert "[QUICK]" in item.write_report().read_text()


@pytest.mark.slow
def test_quick_as_the_command_runs_it(tmp_path: Path) -> None:
    item = FIG4.open(tmp_path, quick=True)
    item.compute()
    assert len(item.comparison().rows) == 10
