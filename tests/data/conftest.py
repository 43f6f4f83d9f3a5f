"""An empty home, and a tiny CIFAR-10 in the catalogue."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wideflat.data import catalogue
from wideflat.data.cifar import CIFAR10, Cifar


@pytest.fixture(scope="session")
def neighbour() -> Callable[[str], Any]:
    """``neighbour(name)``: a test file beside this as a module; it writes the tiny files."""

    def neighbour(name: str) -> Any:
        specification = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module

    return neighbour


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, cache and working folder, so that nothing of this machine is found."""
    for name in ("home", "work", "env"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("WIDEFLAT_DATA", raising=False)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.fixture
def cifar(neighbour: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cifar:
    small = neighbour("test_cifar").shrink(CIFAR10, tmp_path / "source")
    monkeypatch.setitem(catalogue.CATALOGUE, "cifar10", small)
    return small


@pytest.fixture
def write_cifar(neighbour: Callable[[str], Any]) -> Callable[[Cifar, Path], Path]:
    """``write_cifar(data, folder)``: its tiny files, in its first layout."""

    def write(data: Cifar, folder: Path) -> Path:
        neighbour("test_cifar").write(folder, data, data.layouts[0])
        return folder

    return write
