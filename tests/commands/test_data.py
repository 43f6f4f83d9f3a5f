"""``wideflat data`` from the command line."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from wideflat.cli import main
from wideflat.data import catalogue
from wideflat.data.cifar import CIFAR10


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny CIFAR-10; nothing else is found on this machine."""
    path = Path(__file__).parent.parent / "data" / "test_cifar.py"
    specification = importlib.util.spec_from_file_location("tiny_cifar", path)
    assert specification is not None and specification.loader is not None
    writer = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(writer)
    monkeypatch.setitem(catalogue.CATALOGUE, "cifar10", writer.shrink(CIFAR10, tmp_path / "data"))
    monkeypatch.setenv("WIDEFLAT_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "data")
    return tmp_path / "data"


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "--data", str(root)]) == 0
    out = capsys.readouterr().out
    assert f"cifar10        {root / 'cifar-10-batches-bin'}" in out
    assert "cifar100       not found" in out and "dress-coat     embedded" in out
    assert f"looked in: {root}" in out
    assert "wideflat data fetch cifar100 tiny-imagenet fashion-mnist" in out


def test_list_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "cifar10", "Tiny_ImageNet", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in out["data"]] == ["cifar10", "tiny-imagenet"]
    assert out["data"][1] == {
        "name": "tiny-imagenet", "title": "Tiny ImageNet", "found": None, "download_bytes": 248_100_043,
    }  # fmt: skip
    assert out["looked_in"][0].endswith("empty")


def test_verify_is_content_when_all_is_well(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", "--data", str(root)]) == 0
    out = capsys.readouterr().out
    assert out.count(" ok\n") == 7 and "to mend" not in out


def test_verify_names_altered_and_truncated_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / "cifar-10-batches-bin"
    content = bytearray((folder / "data_batch_2.bin").read_bytes())
    content[-1] ^= 1
    (folder / "data_batch_2.bin").write_bytes(content)
    (folder / "test_batch.bin").write_bytes(content[:-1])
    assert main(["data", "verify", "cifar10", "--data", str(root)]) == 1
    out = capsys.readouterr().out
    assert f"{folder / 'data_batch_2.bin'} is altered: expected sha256 " in out
    assert f"{folder / 'test_batch.bin'} is truncated: expected 12292 bytes, got 12291 bytes" in out
    assert f"to mend: wideflat data fetch cifar10 --data {root}" in out
    assert main(["data", "verify", "cifar10", "--data", str(root), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert sorted(file["status"] for file in report["files"]) == ["altered", "ok", "ok", "ok", "ok", "truncated"]


def test_verify_of_what_is_not_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", "cifar100", "--data", str(root)]) == 1
    assert f"CIFAR-100 was not found in {root}" in capsys.readouterr().out


def test_fetch(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["data", "fetch"]) == 2
    assert "say which data sets" in capsys.readouterr().err
    monkeypatch.setattr("wideflat.commands.data.fetch", lambda name, folder, progress: Path(f"{folder}/{name}"))
    assert main(["data", "fetch", "cifar10", "cifar100", "--data", "there"]) == 0
    assert capsys.readouterr().out == "cifar10: there/cifar10\ncifar100: there/cifar100\n"
    assert main(["data", "fetch", "cifar10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"fetched": {"cifar10": "None/cifar10"}}


def test_unknown_names_are_refused_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", "cifar-1000"]) == 2
    assert "Did you mean 'cifar100'?" in capsys.readouterr().err


def test_on_a_terminal_too(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["data", "list", "--data", str(root)]) == 0
    assert "not found" in capsys.readouterr().out


def test_every_file_has_a_checksum() -> None:
    for data in catalogue.CATALOGUE.values():
        for file in data.downloads:
            assert file.checksum and file.url.startswith("http") and file.size
    assert dataclasses.is_dataclass(catalogue.CATALOGUE["cifar10"])


@pytest.mark.parametrize(("place", "said"), [("nowhere", "no folder nowhere"), ("folder:photos", "data of your own")])
@pytest.mark.parametrize("action", ["list", "verify"])
def test_data_that_cannot_be_looked_at_are_not_well(
    action: str, place: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", action, "--data", place]) == 2
    assert said in capsys.readouterr().err
