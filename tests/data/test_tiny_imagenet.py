"""Tiny ImageNet from a tiny tree of real JPEG files: folder, zip file, and the cache under every interruption."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import multiprocessing
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wideflat.data.published import DataError
from wideflat.data.tiny_imagenet import TINY_IMAGENET, TinyImageNet

CLASSES, PER_CLASS, TEST, SIZE = 3, 5, 4, 8
WNIDS = ["n03", "n01", "n02"]  # not sorted, as in the true file
TINY = dataclasses.replace(
    TINY_IMAGENET, num_classes=CLASSES, per_class=PER_CLASS, test_size=TEST, image_size=SIZE, chunk=4,
    archive=dataclasses.replace(TINY_IMAGENET.archive, size=None, checksum=""),
)  # fmt: skip


def jpeg(seed: int, grey: bool = False) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE) if grey else (SIZE, SIZE, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return out.getvalue()


def tree() -> dict[str, bytes]:
    files = {
        "wnids.txt": "\n".join(WNIDS).encode(),
        "words.txt": b"n00\tother\nn01\tgoldfish, Carassius auratus\nn02\tfrog\nn03\tbus\n",
        "val/val_annotations.txt": "".join(f"val_{k}.JPEG\t{WNIDS[k % 3]}\t0\t0\t7\t7\n" for k in range(TEST)).encode(),
        "test/images/test_0.JPEG": jpeg(0),
    }
    for c, wnid in enumerate(WNIDS):
        for k in range(PER_CLASS):
            files[f"train/{wnid}/images/{wnid}_{k}.JPEG"] = jpeg(10 * c + k, grey=k == 2)  # some are grey
    for k in range(TEST):
        files[f"val/images/val_{k}.JPEG"] = jpeg(100 + k)
    return files


def write_folder(root: Path, files: dict[str, bytes] | None = None) -> Path:
    place = root / TINY.folder
    for name, content in (files or tree()).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


def write_zip(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(root / TINY.archive.name, "w") as archive:
        archive.writestr("tiny-imagenet-200/", "")
        for name, content in tree().items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    return root / TINY.archive.name


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WIDEFLAT_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoded"


def decoded(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).transpose(2, 0, 1)


def assert_is_the_data(loaded: object) -> None:
    files, order = tree(), sorted(WNIDS)
    assert loaded.classes == ("goldfish, Carassius auratus", "frog", "bus")  # type: ignore[attr-defined]
    train = [f"train/{wnid}/images/{wnid}_{k}.JPEG" for wnid in order for k in range(PER_CLASS)]
    test = [f"val/images/val_{k}.JPEG" for k in range(TEST)]
    for part, names in ((loaded.train, train), (loaded.test, test)):  # type: ignore[attr-defined]
        assert (part.images.numpy() == np.stack([decoded(files[name]) for name in names])).all()
    assert loaded.train.targets.tolist() == [k for k in range(3) for _ in range(PER_CLASS)]  # type: ignore[attr-defined]
    assert loaded.test.targets.tolist() == [order.index(WNIDS[k % 3]) for k in range(TEST)]  # type: ignore[attr-defined]
    pixels = loaded.train.images.double() / 255  # type: ignore[attr-defined]
    torch.testing.assert_close(torch.tensor(loaded.mean).double(), pixels.mean((0, 2, 3)), rtol=1e-6, atol=1e-7)  # type: ignore[attr-defined]


def test_folder_and_zip_give_the_same_images(tmp_path: Path) -> None:
    for place in (write_folder(tmp_path / "a"), write_zip(tmp_path / "b")):
        assert TINY.find(place.parent) == place and TINY.find(place) == place
        assert_is_the_data(TINY.load(place))


def test_a_validation_part_sorted_into_classes_is_found(tmp_path: Path) -> None:
    files = tree()
    for k in range(TEST):
        files[f"val/{WNIDS[k % 3]}/images/val_{k}.JPEG"] = files.pop(f"val/images/val_{k}.JPEG")
    place = write_folder(tmp_path, files)
    assert TINY.load(place).test.targets.tolist() == [2, 0, 1, 2]


def test_decoded_once_and_memory_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_folder(tmp_path)
    TINY.load(place)
    monkeypatch.setattr(TinyImageNet, "_pixels", lambda *a: pytest.fail("decoded again"))
    loaded = TINY.load(place)
    assert_is_the_data(loaded)
    assert loaded.train.images.is_contiguous(memory_format=torch.channels_last)
    assert [report.status for report in TINY.check(place)] == ["ok", "ok", "ok"]


def test_a_changed_source_is_decoded_again(tmp_path: Path) -> None:
    place = write_zip(tmp_path)
    TINY.load(place)
    files = tree()
    files["train/n01/images/n01_0.JPEG"] = jpeg(999)
    with zipfile.ZipFile(place, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    assert (TINY.load(place).train.images[0].numpy() == decoded(jpeg(999))).all()


@pytest.mark.parametrize("stop", range(0, CLASSES * PER_CLASS + TEST, 3))
def test_an_interrupted_decoding_goes_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    place = write_folder(tmp_path)
    count = 0
    real = TinyImageNet._pixels

    def failing(self: TinyImageNet, *arguments: object) -> np.ndarray:
        nonlocal count
        count += 1
        if count > stop:
            raise KeyboardInterrupt
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(TinyImageNet, "_pixels", failing)
    with pytest.raises(KeyboardInterrupt):
        TINY.load(place)
    assert not list(cache.glob("*/index.json"))
    done, count = 4 * (stop // 4) if stop < 15 else 15, 0
    stop = 10**6
    assert_is_the_data(TINY.load(place))
    assert count == CLASSES * PER_CLASS + TEST - done, "whole chunks are not decoded again"
    assert not list(cache.glob("*/*.part")) and not list(cache.glob("*/journal.json"))


@pytest.mark.parametrize("damage", ["chunk", "short", "gone", "journal"])
def test_damage_between_interruption_and_resumption(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    place = write_folder(tmp_path)
    real = TinyImageNet._pixels

    def failing(self: TinyImageNet, source: object, name: str, content: bytes) -> np.ndarray:
        if name.endswith("n03_3.JPEG"):
            raise KeyboardInterrupt
        return real(self, source, name, content)  # type: ignore[arg-type]

    monkeypatch.setattr(TinyImageNet, "_pixels", failing)
    with pytest.raises(KeyboardInterrupt):
        TINY.load(place)
    monkeypatch.setattr(TinyImageNet, "_pixels", real)
    (part,) = cache.glob("*/train.npy.part")
    content = bytearray(part.read_bytes())
    if damage == "chunk":
        content[300] ^= 255
        part.write_bytes(content)
    elif damage == "short":
        part.write_bytes(content[:200])
    elif damage == "gone":
        part.unlink()
    else:
        (part.parent / "journal.json").write_text('{"fingerprint": ')
    assert_is_the_data(TINY.load(place))


def test_a_damaged_cache_is_named_and_not_loaded(tmp_path: Path, cache: Path) -> None:
    place = write_folder(tmp_path)
    TINY.load(place)
    (file,) = cache.glob("*/train.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        DataError, match=f"{file} .* is altered: expected sha256 .* in chunk 3, got .* Remove the folder"
    ):
        TINY.load(place)
    assert "altered" in [report.status for report in TINY.check(place)]
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match="is truncated"):
        TINY.load(place)
    file.unlink()
    with pytest.raises(DataError, match="is missing"):
        TINY.load(place)


def test_missing_and_damaged_sources_are_named(tmp_path: Path) -> None:
    for number, (name, content, message) in enumerate(
        [
            ("train/n02/images/n02_4.JPEG", None, "n02_4.JPEG is missing"),
            ("val/images/val_3.JPEG", None, "val_3.JPEG is missing"),
            ("val/val_annotations.txt", None, "val_annotations.txt is missing"),
            ("wnids.txt", b"n01\nn02", "wnids.txt is damaged: expected 3 classes, got 2"),
            (
                "val/val_annotations.txt",
                b"val_0.JPEG\tn77\t0\t0\t1\t1\n",
                "expected a known class, got 'n77' in line 1",
            ),
            ("val/val_annotations.txt", b"val_0.JPEG\tn01\t0\t0\t1\t1\n", "expected 4 lines, got 1"),
            ("train/n02/images/n02_1.JPEG", jpeg(11)[:-100], "n02_1.JPEG is damaged: expected a JPEG file"),
            ("train/n02/images/n02_1.JPEG", b"", "n02_1.JPEG is damaged: expected a JPEG file of 0 bytes"),
        ]
    ):
        files = tree()
        if content is None:
            del files[name]
        else:
            files[name] = content
        place = write_folder(tmp_path / str(number), files)
        with pytest.raises(DataError, match=message) as caught:
            TINY.load(place)
        assert "wideflat data fetch tiny-imagenet" in str(caught.value)


def test_wrong_size_of_an_image(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (SIZE, SIZE + 1)).save(out, "JPEG")
    place = write_folder(tmp_path, {**tree(), "val/images/val_0.JPEG": out.getvalue()})
    with pytest.raises(DataError, match=r"val_0\.JPEG is damaged: expected 8x8 pixels, got 8x9"):
        TINY.load(place)


def test_damaged_zip_files(tmp_path: Path) -> None:
    place = write_zip(tmp_path)
    content = place.read_bytes()
    published = dataclasses.replace(
        TINY.archive, size=len(content), checksum="sha256:" + hashlib.sha256(content).hexdigest()
    )
    strict = dataclasses.replace(TINY, archive=published)
    assert_is_the_data(strict.load(place))
    place.write_bytes(content[:-7])
    with pytest.raises(DataError, match=f"{place} is truncated: expected {len(content)} bytes"):
        strict.load(place, allow_altered=True)
    damaged = bytearray(content)
    damaged[content.index(b"n01_1.JPEG") + 200] ^= 255
    place.write_bytes(damaged)
    with pytest.raises(DataError, match="is altered"):
        strict.load(place)
    with pytest.raises(DataError, match=r"n01_1\.JPEG in .* is damaged"):
        strict.load(place, allow_altered=True)
    place.write_bytes(b"PK" + bytes(len(content) - 2))
    with pytest.raises(DataError, match="expected a zip file"):
        strict.load(place, allow_altered=True)


def _load(place: Path, queue: multiprocessing.Queue) -> None:
    queue.put(hashlib.sha256(TINY.load(place).train.images.numpy().tobytes()).hexdigest())


def test_two_processes_make_one_cache(tmp_path: Path, cache: Path) -> None:
    place = write_folder(tmp_path)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_load, args=(place, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    digests = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(digests) == 1
    assert json.loads(next(cache.glob("*/index.json")).read_text())["classes"][1] == "frog"


def test_published_numbers() -> None:
    data = TINY_IMAGENET
    assert (data.num_classes, data.per_class, data.test_size, data.image_size) == (200, 500, 10_000, 64)
    assert data.archive.size == 248_100_043


def test_an_enormous_image_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (8000, 8000)).save(out, "PNG")  # 200 KB that are 192 MB
    files = {**tree(), "val/images/val_1.JPEG": out.getvalue()}
    with pytest.raises(DataError, match=r"val_1.JPEG is damaged: expected 8x8 pixels, got 8000x8000"):
        TINY.load(write_folder(tmp_path, files))


def test_a_format_that_runs_other_programs_is_refused(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "EPS")
    files = {**tree(), "val/images/val_1.JPEG": out.getvalue()}
    with pytest.raises(DataError, match=r"val_1.JPEG is damaged: expected a JPEG file"):
        TINY.load(write_folder(tmp_path, files))


def test_a_member_that_unfolds_is_refused(tmp_path: Path) -> None:
    place = tmp_path / TINY.archive.name
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**tree(), "words.txt": bytes(1 << 25)}.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    with pytest.raises(DataError, match=r"words.txt in .* is damaged: expected at most"):
        TINY.load(place)


def test_a_cache_whose_header_lies_is_named(tmp_path: Path, cache: Path) -> None:
    place = write_folder(tmp_path)
    TINY.load(place)
    (path,) = cache.glob("*/train.npy")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"(15, 8, 8, 3)", b"(99, 8, 8, 3)"))
    with pytest.raises(DataError, match=r"train.npy \(decoded images\) is unreadable"):
        TINY.load(place)


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (lambda path: os.truncate(path, 1 << 29), "expected at most"),  # 500 MB for 64 pixels; it takes no room itself
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "expected a file, got something else"),
    ],
    ids=["500 MB", "device"],
)
def test_a_file_without_end_is_refused(tmp_path: Path, put, words) -> None:
    place = write_folder(tmp_path)
    put(place / "val" / "images" / "val_1.JPEG")
    with pytest.raises(DataError, match=rf"val_1.JPEG is damaged: {words}"):
        TINY.load(place)
