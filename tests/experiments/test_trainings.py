import fcntl
import threading
from pathlib import Path

import pytest

from wideflat.experiments import trainings
from wideflat.experiments.table1 import ITEM as TABLE1
from wideflat.experiments.trainings import Cell, forward_operations, training_cost
from wideflat.interruption import Interrupted
from wideflat.presets import preset
from wideflat.training.runs import Run

SMALL = {"epochs": 2, "limit_data": 40, "seeds": 1, "algorithms": ("sgd",)}


def test_moments_are_epochs_and_none_comes_twice() -> None:
    cell = Cell(preset("cifar10-resnet18", "esgd").with_epochs(4), 0)
    assert cell.moments((0.1, 0.3, 0.6, 1.0)) == [1, 2, 4]


def test_operations_of_a_convolution_are_counted_by_hand() -> None:
    # SmallConvNet at 32x32: 28^2 x 20 x 75, 10^2 x 50 x 500, 1250 x 500, 500 x 10 multiply-adds.
    by_hand = 2 * (784 * 20 * 75 + 100 * 50 * 500 + 1250 * 500 + 500 * 10)
    assert forward_operations(preset("cifar10-smallconvnet")) == by_hand
    assert forward_operations(preset("tinyimagenet-resnet50").with_stem("cifar")) > 1e9


def test_the_cost_says_how_it_is_estimated_and_what_is_left(tmp_path: Path) -> None:
    item = TABLE1.open(tmp_path, rows=("cifar10-smallconvnet", "cifar10-resnet18"))
    assert item.cost().startswith("40 trainings") and "three forward passes" in item.cost()  # 2 rows x 4 x 5 seeds
    quick = TABLE1.open(tmp_path / "quick", quick=True, **SMALL)
    assert quick.cost().startswith("1 training,")
    quick.compute()
    assert quick.cost() == training_cost([]) == "all trainings are finished."


def test_finished_runs_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TABLE1.open(tmp_path, quick=True, **SMALL).compute()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*.jsonl")}
    assert before
    monkeypatch.setattr(trainings, "train", lambda *a, **k: pytest.fail("trained again"))
    TABLE1.open(tmp_path, quick=True, **SMALL).compute()
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*.jsonl")}


def test_an_interrupted_training_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SMALL, "epochs": 3, "algorithms": ("sgd", "rsgd")}
    undisturbed, disturbed = (
        TABLE1.open(tmp_path / "a", quick=True, **settings),
        TABLE1.open(tmp_path / "b", True, **settings),
    )
    undisturbed.compute()
    real, calls = trainings.train, []

    def interrupted_once(experiment, path, data, options, **more):  # type: ignore[no-untyped-def]
        calls.append(experiment.algorithm)
        if len(calls) > 1:
            return real(experiment, path, data, options, **more)

        def stop(training, row):  # type: ignore[no-untyped-def]
            if row["epoch"] == 2:
                raise Interrupted("stopped by the test")

        return real(experiment, path, data, options, **{**more, "on_epoch": stop})

    monkeypatch.setattr(trainings, "train", interrupted_once)
    with pytest.raises(Interrupted):
        disturbed.compute()
    table = disturbed.table("cells")
    assert table is not None and len(table) == 0  # what is there is drawn, and nothing is made up
    assert disturbed.charts() == [] and disturbed.comparison().rows == []
    assert disturbed.write_report().exists()
    disturbed.compute()
    assert calls == ["sgd", "sgd", "rsgd"]
    for column in ("test_error", "train_loss"):
        assert disturbed.table("cells")[column].tolist() == undisturbed.table("cells")[column].tolist()  # type: ignore[index]


def test_another_experiment_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    TABLE1.open(tmp_path, quick=True, **SMALL).compute()
    with pytest.raises(ValueError, match=r"holds another experiment: epochs is 2 there and 4 here, schedule\."):
        TABLE1.open(tmp_path, quick=True, **{**SMALL, "epochs": 4}).compute()
    with pytest.raises(ValueError, match=r"options\.limit_data is 40 there and 60 here"):
        TABLE1.open(tmp_path, quick=True, **{**SMALL, "limit_data": 60}).compute()


def test_processes_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "WAIT", 0.05)
    settings = {**SMALL, "algorithms": ("sgd", "rsgd")}
    item = TABLE1.open(tmp_path, quick=True, **settings)
    first = item.work.cells[0]
    folder = item.work.trainings.folder / first.name
    folder.mkdir(parents=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115 # held until the timer releases it
    fcntl.flock(lock, fcntl.LOCK_EX)
    order: list[str] = []
    real = trainings.train

    def train(experiment, path, *rest, **more):  # type: ignore[no-untyped-def]
        run = real(experiment, path, *rest, **more)
        order.append(experiment.algorithm)
        if len(order) == 1:
            threading.Timer(0.2, lock.close).start()
        return run

    monkeypatch.setattr(trainings, "train", train)
    item.compute()
    assert order == ["rsgd", "sgd"]  # the one in use elsewhere comes last
    assert len(item.table("cells")) == 2  # type: ignore[arg-type]


def test_a_training_that_diverges_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainings.train

    def train(experiment, *rest, **more):  # type: ignore[no-untyped-def]
        if experiment.algorithm == "sgd":
            raise trainings.Diverged("the training loss is nan")
        return real(experiment, *rest, **more)

    monkeypatch.setattr(trainings, "train", train)
    item = TABLE1.open(tmp_path, quick=True, **{**SMALL, "algorithms": ("sgd", "rsgd")})
    item.compute()
    assert item.table("cells").unique("algorithm") == ["rsgd"]  # type: ignore[union-attr]
    assert any("diverged: the training loss is nan" in remark for remark in item.comparison().remarks)


def test_wrong_choices_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    for options, words in (
        ({"rows": ("cifar10-resnet19",)}, "Did you mean 'cifar10-resnet18'"),
        ({"algorithms": ("adam",)}, "algorithm must be one of sgd"),
        ({"seeds": 0}, "seeds must be >= 1"),
        ({"epochs": -3}, "epochs must be >= 1"),
        ({"limit_data": -1}, "limit_data must be >= 1"),
        ({"limit_data": 0}, "limit_data must be >= 1"),
    ):
        with pytest.raises(ValueError, match=words):
            TABLE1.open(tmp_path, **options)  # type: ignore[arg-type]


def test_runs_can_be_shared_between_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wideflat.experiments.fig4 import ITEM as FIG4

    rows = {"rows": ("cifar10-smallconvnet",), "runs": tmp_path / "runs"}
    TABLE1.open(tmp_path / "table1", quick=True, **SMALL, **rows).compute()  # type: ignore[arg-type]
    monkeypatch.setattr(trainings, "train", lambda *a, **k: pytest.fail("trained again"))
    figure = FIG4.open(tmp_path / "fig4", quick=True, sigmas=(0.0, 0.5), **SMALL, **rows)  # type: ignore[arg-type]
    figure.compute()
    assert len(figure.table("profiles")) == 2  # type: ignore[arg-type]
    assert Run.open(next((tmp_path / "runs").iterdir())).result() is not None
