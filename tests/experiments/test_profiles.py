from pathlib import Path

import numpy as np
import pytest
import torch

from wideflat.energy.profile import LocalEnergy
from wideflat.experiments import profiles
from wideflat.experiments.profiles import augmenting, kept


def test_a_profile_is_measured_once_and_again_when_asked_otherwise_or_damaged(tmp_path: Path) -> None:
    calls = []

    def measure() -> LocalEnergy:
        calls.append(1)
        return LocalEnergy(sigmas=[0.0, 0.5], mean=[0.0, 0.1], stderr=[0.0, 0.01], baseline=0.02)

    path = tmp_path / "profiles" / "a.json"
    request = {"run": "a", "sigmas": (0.0, 0.5), "max_passes": 2}
    for _ in range(2):
        profile = kept(path, request, measure)
    assert len(calls) == 1
    np.testing.assert_array_equal(profile.mean, [0, 0.1])
    kept(path, {**request, "max_passes": 3}, measure)
    assert len(calls) == 2
    path.write_text(path.read_text()[:-20])
    kept(path, {**request, "max_passes": 3}, measure)
    assert len(calls) == 3


def test_augmentation_follows_torch_s_seed() -> None:
    from wideflat.data import Augmentation, load

    data = load("dress-coat")
    pixels = data.train.images[:4].permute(0, 2, 3, 1).contiguous()
    augment = augmenting(Augmentation(padding=4, flip=True), data)
    torch.manual_seed(0)
    first = augment(pixels)
    torch.manual_seed(0)
    assert torch.equal(first, augment(pixels))
    assert not torch.equal(first, augment(pixels))
    assert first.shape == (4, 1, 28, 28)


@pytest.fixture(scope="module")
def item(tmp_path_factory: pytest.TempPathFactory) -> profiles.Evolution:
    from wideflat.experiments.fig3 import Fig3

    item = Fig3(
        tmp_path_factory.mktemp("fig3"),
        quick=True,
        epochs=6,
        limit_data=60,
        algorithms=("sgd", "rsgd"),
        sigmas=(0.0, 0.25, 0.5),
        max_passes=2,
    )
    item.compute()
    return item


def test_networks_are_measured_along_the_training(item: profiles.Evolution) -> None:
    table = item.table("networks")
    assert table is not None
    assert [(row["algorithm"], row["epoch"], row["part"]) for row in table] == [
        ("sgd", 3, 0.5),
        ("sgd", 6, 1.0),
        ("rsgd", 1, 0.5),
        ("rsgd", 2, 1.0),
    ]
    points = item.table("profiles")
    assert points is not None and len(points) == 4 * 3
    assert points.where(sigma=0.0)["delta_e"].tolist() == [0, 0, 0, 0]
    assert (points.where(sigma=0.5)["stderr"] > 0).all()
    assert points.provenance["conventions"]["augmented"] and points.provenance["conventions"]["batch_norm"] == "eval"


def test_charts_have_epoch_train_and_test_error_in_the_legend(item: profiles.Evolution) -> None:
    charts = item.charts()
    assert [chart.name for chart in charts] == ["fig3-cifar10-resnet18-050", "fig3-cifar10-resnet18-100"]
    networks, points = item.table("networks"), item.table("profiles")
    assert networks is not None and points is not None
    last = networks.where(algorithm="rsgd", part=1.0)
    label = charts[1].series[1].label
    assert label.startswith("rSGD, epoch 2, train ")
    assert label.endswith(f"test {100 * last['test_error'][0]:.2f}%")
    np.testing.assert_allclose(charts[1].series[1].y, 100 * points.where(algorithm="rsgd", part=1.0)["delta_e"])
    rows = item.comparison().rows
    assert rows[0][:3] == ["cifar10-resnet18", "SGD", "0.005"] and rows[1][8].endswith("of 2")
    assert item.write_report().exists()


def test_what_is_measured_is_not_measured_again(item: profiles.Evolution, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "local_energy", lambda *a, **k: pytest.fail("measured again"))
    before = (item.folder / "profiles.csv").read_text()
    item.compute()
    assert (item.folder / "profiles.csv").read_text() == before
    (victim,) = item.folder.glob("profiles/*-sgd-*-final.json")
    victim.write_text("{")
    with pytest.raises(pytest.fail.Exception):
        item.compute()
    assert len(item.table("networks")) == 3  # type: ignore[arg-type] # the damaged one is left out
    assert len(item.charts()[1].series) == 1 and item.comparison().rows[0][1] == "rSGD"
    monkeypatch.undo()
    item.compute()
    assert (item.folder / "profiles.csv").read_text() == before  # the same noise, the same numbers


def test_several_seeds_give_the_error_of_their_mean(item: profiles.Evolution) -> None:
    points = item.table("profiles")
    assert points is not None
    one = points.where(algorithm="sgd", part=1.0)
    two = profiles.Table(one.columns, [list(row) for row in one.rows for _ in range(2)])
    k = two.columns.index("delta_e")
    for number, row in enumerate(two.rows):
        row[k] = row[k] + (0.01 if number % 2 else -0.01)
    sigmas, mean, error = item.curve(two)
    assert sigmas == [0.0, 0.25, 0.5]
    np.testing.assert_allclose(mean, one["delta_e"])
    np.testing.assert_allclose(error, 0.01 * np.sqrt(2) / np.sqrt(2))
    assert item._below(one, one) == "0 (0) of 2"


def test_moments_must_be_parts(tmp_path: Path) -> None:
    from wideflat.experiments.fig5 import Fig5

    with pytest.raises(ValueError, match="parts of the training"):
        Fig5(tmp_path, moments=(0.5, 1.5))
