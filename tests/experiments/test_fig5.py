from pathlib import Path

from wideflat.experiments.fig5 import ITEM as FIG5


def test_the_paper_s_experiment(tmp_path: Path) -> None:
    item = FIG5.open(tmp_path)
    assert [cell.name for cell in item.work.cells] == [f"cifar10-resnet110-{a}-seed-0" for a in ("sgd", "rsgd", "esgd")]
    assert item.losses["cifar10-resnet110", "esgd"] == 0.0005


def test_quick_path(tmp_path: Path) -> None:
    item = FIG5.open(
        tmp_path, quick=True, epochs=5, limit_data=40, algorithms=("esgd",), sigmas=(0.0, 0.5), max_passes=1
    )
    item.compute()
    table = item.table("networks")
    assert table is not None and table.unique("part") == [1.0]  # one epoch of L = 5 passes is all of the training
    assert item.comparison().rows[0][:3] == ["cifar10-resnet110", "eSGD", "0.0005"]
