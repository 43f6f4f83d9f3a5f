"""Fashion-MNIST from tiny idx files under the names and in the folders in which users have them."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from wideflat.data.fashion_mnist import FASHION_MNIST, FashionMnist, read_idx
from wideflat.data.published import DataError


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(np.uint8).tobytes()


def arrays() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [
        generator.integers(0, 256, (6, 28, 28)), generator.integers(0, 10, 6),
        generator.integers(0, 256, (3, 28, 28)), generator.integers(0, 10, 3),
    ]  # fmt: skip


def small() -> FashionMnist:
    files = tuple(
        dataclasses.replace(file, size=len(idx(a)), checksum="sha256:" + hashlib.sha256(idx(a)).hexdigest())
        for file, a in zip(FASHION_MNIST.files, arrays(), strict=True)
    )
    return dataclasses.replace(FASHION_MNIST, files=files)  # type: ignore[arg-type]


def write(folder: Path, compressed: bool = True, dotted: bool = False) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for file, array in zip(FASHION_MNIST.files, arrays(), strict=True):
        name = file.name.replace("-idx", ".idx") if dotted else file.name
        path = folder / (name + (".gz" if compressed else ""))
        path.write_bytes(gzip.compress(idx(array)) if compressed else idx(array))
        paths.append(path)
    return paths


@pytest.mark.parametrize("folder", FASHION_MNIST.folders)
@pytest.mark.parametrize(("compressed", "dotted"), [(True, False), (False, False), (False, True)])
def test_the_usual_places_and_names(tmp_path: Path, folder: str, compressed: bool, dotted: bool) -> None:
    write(tmp_path / folder, compressed, dotted)
    data = small()
    place = data.find(tmp_path)
    assert place is not None
    loaded = data.load(place)
    images, labels, test_images, test_labels = arrays()
    assert (loaded.train.images.numpy()[:, 0] == images).all() and loaded.train.targets.tolist() == labels.tolist()
    assert (
        loaded.test.images.numpy()[:, 0] == test_images
    ).all() and loaded.test.targets.tolist() == test_labels.tolist()
    assert loaded.altered == () and loaded.channels == 1 and loaded.image_size == 28


def test_compressed_anew_is_not_altered(tmp_path: Path) -> None:
    for path in write(tmp_path):
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1, mtime=5))
    assert [report.status for report in small().check(tmp_path)] == ["ok"] * 4


def test_every_kind_of_damage_is_named(tmp_path: Path) -> None:
    data = small()
    images, labels, *_ = write(tmp_path)
    whole = images.read_bytes()

    images.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=f"{images} is unreadable: expected a gzip file.*fetch fashion-mnist"):
        data.load(tmp_path, allow_altered=True)
    images.write_bytes(gzip.compress(gzip.decompress(whole)[:-1]))
    with pytest.raises(DataError, match=f"{images} is truncated: expected 4720 bytes, got 4719 bytes"):
        data.load(tmp_path, allow_altered=True)
    content = bytearray(gzip.decompress(whole))
    content[100] ^= 1
    images.write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(DataError, match=f"{images} is altered: expected sha256 .*, got sha256"):
        data.load(tmp_path)
    assert data.load(tmp_path, allow_altered=True).altered == (str(images),)
    content[2] = 9
    images.write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(DataError, match=f"{images} is damaged: expected the idx header 00 00 08, got 00 00 09"):
        data.load(tmp_path, allow_altered=True)
    images.write_bytes(whole)

    content = bytearray(gzip.decompress(labels.read_bytes()))
    content[-1] = 10
    labels.write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(DataError, match="labels-idx1-ubyte is damaged: expected labels from 0 to 9, got 10"):
        data.load(tmp_path, allow_altered=True)
    labels.unlink()
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz is missing"):
        data.load(tmp_path)


def test_find_prefers_what_is_complete(tmp_path: Path) -> None:
    write(tmp_path / "fashion-mnist")[0].unlink()
    assert small().find(tmp_path) == tmp_path / "fashion-mnist"
    write(tmp_path / "FashionMNIST" / "raw")
    assert small().find(tmp_path) == tmp_path / "FashionMNIST" / "raw"
    assert small().find(tmp_path / "nowhere") is None


@pytest.mark.parametrize("content", [b"", b"\0\0\x08", b"\0\0\x08\x02\0\0", bytes([0, 0, 8, 1, 0, 0, 0, 9, 1])])
def test_bad_idx(content: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        read_idx(content)


def test_a_gzip_file_without_end_is_not_unfolded(tmp_path: Path) -> None:
    paths = write(tmp_path)
    paths[0].write_bytes(gzip.compress(bytes(1 << 25), 9))  # 32 KB that are 32 MB
    report = small().check(tmp_path)[0]
    assert report.status == "unreadable" and "more than" in report.actual
