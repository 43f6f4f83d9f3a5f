"""Where data sets are looked for, the first first."""

from collections.abc import Callable
from pathlib import Path

import pytest

from wideflat import data as wideflat_data
from wideflat.data.cifar import Cifar
from wideflat.data.folders import cache_folder, search_folders


def test_the_order_of_the_folders(
    home: Path, cifar: Cifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_cifar: Callable[..., Path]
) -> None:
    name = cifar.layouts[0].folder
    keras = write_cifar(cifar, home / ".keras" / "datasets" / name)
    assert wideflat_data.find("cifar10") == keras
    here = write_cifar(cifar, Path("data") / name)
    assert wideflat_data.find("cifar10") == here
    cached = write_cifar(cifar, home / ".cache" / "wideflat" / name)
    assert wideflat_data.find("cifar10") == cached
    by_variable = write_cifar(cifar, tmp_path / "env" / name)
    monkeypatch.setenv("WIDEFLAT_DATA", str(tmp_path / "env"))
    assert wideflat_data.find("cifar10") == by_variable
    explicit = write_cifar(cifar, tmp_path / "explicit" / name)
    assert wideflat_data.find("cifar10", tmp_path / "explicit") == explicit
    assert len(wideflat_data.load("cifar10", tmp_path / "explicit").train) == cifar.train_size


def test_the_cache_is_where_the_environment_says(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == home / ".cache" / "wideflat"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "wideflat"
    monkeypatch.setenv("WIDEFLAT_DATA", "~/images")
    assert cache_folder() == search_folders()[0] == home / "images"


def test_a_folder_that_is_given_is_the_only_one(home: Path) -> None:
    assert search_folders("~/mine") == [home / "mine"]
    with pytest.raises(TypeError, match="folder must be"):
        search_folders(3)  # type: ignore[arg-type]
