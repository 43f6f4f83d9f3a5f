"""Comparing files with what was published."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from wideflat.data.published import DataError, FileReport, PublishedFile, refuse


def test_every_status(tmp_path: Path) -> None:
    path = tmp_path / "file"
    published = PublishedFile("file", 4, "sha256:" + hashlib.sha256(b"data").hexdigest())
    assert published.check(path).status == "missing"
    path.write_bytes(b"data")
    assert published.check(path) == FileReport(str(path), "ok")
    path.write_bytes(b"date")
    assert published.check(path).status == "altered"
    path.write_bytes(b"dates")
    assert published.check(path) == FileReport(str(path), "truncated", "4 bytes", "5 bytes")
    path.unlink()
    path.mkdir()
    assert PublishedFile("file", None, published.checksum).check(path).status == "unreadable"
    assert PublishedFile("file").check_content("x", b"anything").status == "ok"
    assert published.check_content("x", b"data").status == "ok"
    assert published.check_content("x", b"dat").status == "truncated"
    assert published.check_content("x", b"dada").status == "altered"


def test_only_altered_files_can_be_allowed() -> None:
    refuse(FileReport("f", "ok"), "cifar10")
    refuse(FileReport("f", "altered"), "cifar10", allow_altered=True)
    for status in ("missing", "truncated", "unreadable"):
        with pytest.raises(DataError, match=rf"f is {status}.*`wideflat data fetch cifar10`"):
            refuse(FileReport("f", status, "this", "that"), "cifar10", allow_altered=True)
    with pytest.raises(DataError, match=r"f is altered: expected this, got that.*--allow-altered"):
        refuse(FileReport("f", "altered", "this", "that"), "cifar10")
