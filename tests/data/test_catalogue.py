"""Finding by name, the order of the folders, and downloads from a server on this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wideflat import data as wideflat_data
from wideflat.data import catalogue
from wideflat.data.cifar import Cifar
from wideflat.data.fashion_mnist import FashionMnist
from wideflat.data.published import DataError


def test_names() -> None:
    for name in ("fashion-mnist", "FashionMNIST", "fashion_mnist"):
        assert catalogue.specification(name).name == "fashion-mnist"
    assert catalogue.specification("tinyimagenet").name == "tiny-imagenet"
    with pytest.raises(ValueError, match=r"no data set 'cifar11'; there are cifar10, .* Did you mean 'cifar10'"):
        wideflat_data.load("cifar11")


def test_the_embedded_set_is_always_there(home: Path) -> None:
    data = wideflat_data.load("dress-coat")
    assert data.train.targets.bincount().tolist() == [344, 3583]
    assert data.test.targets.bincount().tolist() == [74, 603]
    assert sorted(data.train.images.unique().tolist()) == [0, 255]
    assert [report.status for report in wideflat_data.check("dress-coat")] == ["ok"]


def test_missing_everywhere_says_where_and_what_to_do(home: Path, cifar: Cifar, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        wideflat_data.load("cifar10")
    for part in (
        str(home / ".cache" / "wideflat"),
        str(home / ".keras" / "datasets"),
        "$WIDEFLAT_DATA",
        "`wideflat data fetch cifar10`",
    ):
        assert part in str(caught.value)
    with pytest.raises(
        DataError, match=f"was not found in {tmp_path / 'env'}\\. .*fetch cifar10 --data {tmp_path / 'env'}`"
    ):
        wideflat_data.load("cifar10", tmp_path / "env")


class Server:
    """Serves a folder; answers the first ``failures`` requests with an error, counts all."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        self.failures = 0
        outer = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments: object) -> None:
                super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

            def do_GET(self) -> None:
                outer.requests.append(self.path)
                if outer.failures > 0:
                    outer.failures -= 1
                    self.send_error(503)
                else:
                    super().do_GET()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two tries
    (tmp_path / "source").mkdir(exist_ok=True)
    served = Server(tmp_path / "source")
    yield served
    served.close()


@pytest.fixture
def served_cifar(cifar: Cifar, server: Server, monkeypatch: pytest.MonkeyPatch) -> Cifar:
    layouts = tuple(
        dataclasses.replace(layout, archive=dataclasses.replace(layout.archive, url=server.url + layout.archive.name))
        for layout in cifar.layouts
    )
    served = dataclasses.replace(cifar, layouts=layouts)
    monkeypatch.setitem(catalogue.CATALOGUE, "cifar10", served)
    return served


def test_fetch_downloads_checks_unpacks_and_mends(
    home: Path, served_cifar: Cifar, server: Server, tmp_path: Path
) -> None:
    server.failures = 2
    place = wideflat_data.fetch("cifar10", tmp_path / "new", progress=False)
    assert place == tmp_path / "new" / "cifar-10-batches-bin"
    assert len(server.requests) == 3, "two failures, then the file"
    assert len(wideflat_data.load("cifar10", tmp_path / "new").train) == served_cifar.train_size

    damaged = place / "data_batch_3.bin"
    damaged.write_bytes(b"short")
    with pytest.raises(DataError, match=r"data_batch_3.bin is truncated.*wideflat data fetch cifar10"):
        wideflat_data.load("cifar10", tmp_path / "new")
    wideflat_data.fetch("cifar10", tmp_path / "new", progress=False)
    assert len(server.requests) == 3, "the archive is there: nothing is downloaded again"
    assert len(wideflat_data.load("cifar10", tmp_path / "new").train) == served_cifar.train_size

    (tmp_path / "new" / "cifar-10-binary.tar.gz").write_bytes(b"rubbish")
    wideflat_data.fetch("cifar10", tmp_path / "new", progress=False)
    assert len(server.requests) == 4, "a wrong archive is replaced"


def test_fetch_goes_to_the_cache_by_default(home: Path, served_cifar: Cifar) -> None:
    assert wideflat_data.fetch("cifar10", progress=False) == home / ".cache" / "wideflat" / "cifar-10-batches-bin"
    assert len(wideflat_data.load("cifar10").test) == served_cifar.test_size


def test_a_server_that_never_answers_or_sends_another_file(
    home: Path, served_cifar: Cifar, server: Server, tmp_path: Path
) -> None:
    server.failures = 99
    with pytest.raises(
        DataError, match=r"cifar-10-binary.tar.gz could not be downloaded from http://127.*Run the command again"
    ):
        wideflat_data.fetch("cifar10", tmp_path / "new", progress=False)
    assert len(server.requests) == 4
    server.failures = 0
    (tmp_path / "source" / "cifar-10-binary.tar.gz").write_bytes(b"another file")
    with pytest.raises(DataError, match="could not be downloaded"):
        wideflat_data.fetch("cifar10", tmp_path / "new", progress=False)
    assert not list((tmp_path / "new").glob("*.tar.gz"))


def test_fetch_of_several_files(
    home: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbour: Callable[[str], Any]
) -> None:
    writer = neighbour("test_fashion_mnist")
    paths = writer.write(tmp_path / "source")
    small: FashionMnist = writer.small()
    downloads = tuple(
        dataclasses.replace(
            file, size=None, checksum="md5:" + hashlib.md5(path.read_bytes()).hexdigest(), url=server.url + path.name
        )
        for file, path in zip(small.downloads, paths, strict=True)
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "fashion-mnist", dataclasses.replace(small, downloads=downloads))
    assert wideflat_data.fetch("fashion-mnist", progress=False) == home / ".cache" / "wideflat" / "fashion-mnist"
    assert len(wideflat_data.load("fashion-mnist").train) == 6
    assert len(server.requests) == 4


def test_loading_never_downloads(home: Path, served_cifar: Cifar, server: Server) -> None:
    with pytest.raises(DataError, match="was not found"):
        wideflat_data.load("cifar10")
    assert server.requests == []
