"""CIFAR from tiny files in the true formats: both layouts, archives, and every way in which a file can be wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from wideflat.data.cifar import CIFAR10, CIFAR100, Cifar, Layout
from wideflat.data.published import DataError, PublishedFile

RECORDS = 4  # images in each file


def records(k: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(k)
    return generator.integers(0, 256, (RECORDS, 3072), dtype=np.uint8), generator.integers(0, classes, RECORDS)


def write(folder: Path, data: Cifar, layout: Layout) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k, file in enumerate(layout.files):
        pixels, labels = records(k, len(data.classes))
        if layout.kind == "binary":
            prefix = np.zeros((RECORDS, data.label_bytes), np.uint8)
            prefix[:, -1] = labels
            np.concatenate([prefix, pixels], axis=1).tofile(folder / file.name)
        else:
            batch = {
                b"batch_label": b"one",
                data.label_key.encode(): labels.tolist(),
                b"data": pixels,
                b"filenames": [],
                b"coarse_labels": [0] * RECORDS,
            }
            (folder / file.name).write_bytes(pickle.dumps(batch, protocol=2))


def pack(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)


def shrink(data: Cifar, root: Path) -> Cifar:
    """The data set with a few images in each file; sizes and checksums are those of files written under ``root``."""
    layouts = []
    for layout in data.layouts:
        folder = root / layout.folder
        write(folder, data, layout)
        pack(folder, root / layout.archive.name)

        def published(file: PublishedFile, path: Path, sized: bool = True) -> PublishedFile:
            content = path.read_bytes()
            checksum = "sha256:" + hashlib.sha256(content).hexdigest()
            return dataclasses.replace(file, size=len(content) if sized else None, checksum=checksum)

        sized = layout.kind == "binary"
        layouts.append(
            dataclasses.replace(
                layout,
                archive=published(layout.archive, root / layout.archive.name),
                train=tuple(published(file, folder / file.name, sized) for file in layout.train),
                test=tuple(published(file, folder / file.name, sized) for file in layout.test),
            )
        )
    first = layouts[0]
    return dataclasses.replace(
        data, layouts=tuple(layouts), train_size=RECORDS * len(first.train), test_size=RECORDS * len(first.test)
    )


@pytest.fixture(params=[CIFAR10, CIFAR100], ids=lambda data: data.name)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Cifar, Path]:
    root = tmp_path / "data"
    return shrink(request.param, root), root


def only(root: Path, tmp_path: Path, name: str) -> Path:
    """A folder with nothing but one of the things under ``root``."""
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.move(root / name, alone / name)
    return alone


def assert_is_the_data(data: Cifar, loaded: object) -> None:
    count = len(data.layouts[0].train)
    pixels, labels = zip(
        *(records(k, len(data.classes)) for k in range(count + len(data.layouts[0].test))), strict=True
    )
    for part, files in ((loaded.train, slice(0, count)), (loaded.test, slice(count, None))):  # type: ignore[attr-defined]
        expected = np.concatenate(pixels[files]).reshape(-1, 3, 32, 32)
        assert (part.images.numpy() == expected).all()
        assert part.targets.tolist() == np.concatenate(labels[files]).tolist()
        assert part.images.dtype == torch.uint8
        assert part.images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("number", [0, 1], ids=["binary", "python"])
@pytest.mark.parametrize("form", ["folder", "itself", "archive"])
def test_every_layout_gives_the_same_images(small: tuple[Cifar, Path], tmp_path: Path, number: int, form: str) -> None:
    data, root = small
    layout = data.layouts[number]
    name = layout.archive.name if form == "archive" else layout.folder
    alone = only(root, tmp_path, name)
    place = data.find(alone / name if form == "itself" else alone)
    assert place == alone / name
    loaded = data.load(place)
    assert_is_the_data(data, loaded)
    assert loaded.altered == () and loaded.num_classes == len(data.classes) and loaded.name == data.name


@pytest.mark.parametrize("where", ["cifar10/{}", "{}-target/{}"])
def test_folders_of_others(tmp_path: Path, where: str) -> None:
    data = shrink(CIFAR10, tmp_path / "data")
    place = tmp_path / "elsewhere" / where.format(*[data.layouts[1].folder] * 2)
    place.parent.mkdir(parents=True)
    shutil.move(tmp_path / "data" / data.layouts[1].folder, place)
    assert data.find(tmp_path / "elsewhere") == place


def test_the_published_sizes_follow_from_the_format() -> None:
    for data in (CIFAR10, CIFAR100):
        binary = data.layouts[0]
        assert sum(file.size or 0 for file in binary.train) == data.train_size * (data.label_bytes + 3072)
        assert sum(file.size or 0 for file in binary.test) == data.test_size * (data.label_bytes + 3072)
        for layout in data.layouts:
            for file in (*layout.files, layout.archive):
                kind, _, digest = file.checksum.partition(":")
                assert len(digest) == {"sha256": 64, "md5": 32}[kind] and int(digest, 16) > 0
    assert len(set(CIFAR100.classes)) == 100 and list(CIFAR100.classes) == sorted(CIFAR100.classes)


def test_a_complete_layout_is_preferred(small: tuple[Cifar, Path]) -> None:
    data, root = small
    assert data.find(root) == root / data.layouts[0].folder
    (root / data.layouts[0].folder / data.layouts[0].train[0].name).unlink()
    assert data.find(root) == root / data.layouts[1].folder
    assert data.find(root / "nowhere") is None


@pytest.mark.parametrize("number", [0, 1], ids=["binary", "python"])
def test_missing_files_are_named(small: tuple[Cifar, Path], tmp_path: Path, number: int) -> None:
    data, root = small
    layout = data.layouts[number]
    alone = only(root, tmp_path, layout.folder)
    lost = alone / layout.folder / layout.test[-1].name
    lost.unlink()
    place = data.find(alone)
    assert place is not None
    with pytest.raises(DataError, match=f"{lost} is missing.*wideflat data fetch {data.name}"):
        data.load(place, allow_altered=True)
    assert [report.status for report in data.check(place)].count("missing") == 1


def test_truncated_files_are_refused_whatever_is_allowed(small: tuple[Cifar, Path]) -> None:
    data, root = small
    file = data.layouts[0].train[0]
    path = root / data.layouts[0].folder / file.name
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=f"{path} is truncated: expected {file.size} bytes, got {file.size - 5} bytes"):
        data.load(path.parent, allow_altered=True)


@pytest.mark.parametrize("number", [0, 1], ids=["binary", "python"])
def test_altered_files_are_an_error_unless_allowed(small: tuple[Cifar, Path], number: int) -> None:
    data, root = small
    layout = data.layouts[number]
    path = root / layout.folder / layout.train[0].name
    content = bytearray(path.read_bytes())
    at = content.index(records(0, len(data.classes))[0][0, :8].tobytes()) if number == 0 else None
    if at is not None:
        content[at] ^= 1
        path.write_bytes(content)
    else:
        batch = pickle.loads(content)
        batch[b"data"][0, 0] ^= 1
        path.write_bytes(pickle.dumps(batch, protocol=2))
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = layout.train[0].checksum.partition(":")[2]
    with pytest.raises(
        DataError, match=f"{path} is altered: expected sha256 {expected}, got sha256 {actual}.*allow-altered"
    ):
        data.load(path.parent)
    loaded = data.load(path.parent, allow_altered=True)
    assert loaded.altered == (str(path),)
    assert [report.status for report in data.check(path.parent)] == ["altered"] + ["ok"] * (len(layout.files) - 1)


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_pixels_and_labels_decide_not_how_they_were_packed(
    small: tuple[Cifar, Path], tmp_path: Path, packed: bool
) -> None:
    data, root = small
    layout = data.layouts[1]
    for file in layout.files:
        path = root / layout.folder / file.name
        batch = pickle.loads(path.read_bytes())
        path.write_bytes(pickle.dumps(batch | {b"filenames": ["of others"]}, protocol=2))
    pack(root / layout.folder, root / layout.archive.name)
    alone = only(root, tmp_path, layout.archive.name if packed else layout.folder)
    place = data.find(alone)
    assert place is not None and {report.status for report in data.check(place)} == {"ok"}
    assert_is_the_data(data, data.load(place))
    if packed:
        with tarfile.open(alone / layout.archive.name) as tar:
            tar.extractall(tmp_path / "out", filter="data")
        broken = tmp_path / "out" / layout.folder / layout.train[0].name
        batch = pickle.loads(broken.read_bytes())
        batch[b"data"][0, 0] ^= 1
        broken.write_bytes(pickle.dumps(batch, protocol=2))
        pack(broken.parent, alone / layout.archive.name)
        assert [report.status for report in data.check(place)] == ["altered"] + ["ok"] * (len(layout.files) - 1)


def test_labels_out_of_range_are_found(small: tuple[Cifar, Path]) -> None:
    data, root = small
    path = root / data.layouts[0].folder / data.layouts[0].train[0].name
    content = bytearray(path.read_bytes())
    content[2 * (data.label_bytes + 3072) + data.label_bytes - 1] = 200
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path} is damaged: expected labels from 0 to .* got 200 in record 2"):
        data.load(path.parent, allow_altered=True)


@pytest.mark.parametrize(
    "batch",
    [
        {b"data": np.zeros((4, 3071), np.uint8), b"labels": [0] * 4, b"fine_labels": [0] * 4},
        {b"data": np.zeros((4, 3072), np.uint8), b"labels": [0] * 3, b"fine_labels": [0] * 3},
        {b"data": np.zeros((4, 3072), np.uint8)},
        [1, 2],
        {b"data": 3, b"labels": ["a"], b"fine_labels": ["a"]},
    ],
)
def test_pickles_of_another_shape_are_refused(small: tuple[Cifar, Path], batch: object) -> None:
    data, root = small
    path = root / data.layouts[1].folder / data.layouts[1].train[0].name
    path.write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match=f"{path} is damaged: expected a pickle with data"):
        data.load(path.parent, allow_altered=True)


def test_a_malicious_pickle_does_not_run(small: tuple[Cifar, Path], tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "victim",))

    data, root = small
    path = root / data.layouts[1].folder / data.layouts[1].train[0].name
    path.write_bytes(pickle.dumps(Attack(), protocol=2))
    with pytest.raises(DataError, match="asks for"):
        data.load(path.parent, allow_altered=True)
    assert not (tmp_path / "victim").exists()


def test_damaged_archives_are_named(small: tuple[Cifar, Path]) -> None:
    data, root = small
    archive = root / data.layouts[0].archive.name
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"{archive} is truncated"):
        data.load(archive)
    archive.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    with pytest.raises(DataError, match=f"{archive} is altered"):
        data.load(archive)
    with pytest.raises(DataError, match=rf"{archive} is (damaged|missing)"):
        data.load(archive, allow_altered=True)


def test_an_archive_without_a_file_says_which(small: tuple[Cifar, Path]) -> None:
    data, root = small
    layout = data.layouts[0]
    (root / layout.folder / layout.test[0].name).unlink()
    archive = root / layout.archive.name
    pack(root / layout.folder, archive)
    loose = dataclasses.replace(layout.archive, size=None)
    data = dataclasses.replace(data, layouts=(dataclasses.replace(layout, archive=loose),))
    with pytest.raises(DataError, match=f"{layout.test[0].name} in {archive} is missing"):
        data.load(archive, allow_altered=True)


def test_too_few_images_are_noticed(small: tuple[Cifar, Path]) -> None:
    data, root = small
    more = dataclasses.replace(data, train_size=data.train_size + 1)
    with pytest.raises(DataError, match=f"expected {data.train_size + 1} train images, got {data.train_size}"):
        more.load(root / data.layouts[0].folder)
    less = dataclasses.replace(data, train_size=data.train_size - 1)
    with pytest.raises(DataError, match="at most"):
        less.load(root / data.layouts[0].folder)


def test_an_archive_that_unfolds_is_refused(small: tuple[Cifar, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    data, root = small
    monkeypatch.setattr("wideflat.data.cifar._ARCHIVE", 1 << 24)
    layout = data.layouts[0]
    (root / layout.folder / "readme.html").write_bytes(bytes(1 << 25))
    pack(root / layout.folder, root / layout.archive.name)
    unsized = dataclasses.replace(layout, archive=dataclasses.replace(layout.archive, size=None))
    data = dataclasses.replace(data, layouts=(unsized, *data.layouts[1:]))
    with pytest.raises(DataError, match=r"readme.html has 33554432 bytes"):
        data.load(root / layout.archive.name, allow_altered=True)
