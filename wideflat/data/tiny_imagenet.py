"""Tiny ImageNet: the folder or zip file as distributed, decoded once into a memory-mapped cache.

Le, Yang, "Tiny ImageNet visual recognition challenge", 2015; cs231n.stanford.edu/tiny-imagenet-200.zip. 200 classes of
64x64 images, 500 each for training. The test part has no published labels; the labelled validation part (10,000
images) takes its place, as in the paper.

The cache is two ``.npy`` files of bytes and an ``index.json``. It is decoded in chunks; an interrupted decoding goes
on after the last whole chunk. The index, with the checksum of every chunk, is written last: without it the cache does
not exist, with it every byte is checked.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from wideflat.data.folders import cache_folder
from wideflat.data.images import ImageData, ImageSplit, channel_statistics
from wideflat.data.published import DataError, FileReport, PublishedFile, refuse
from wideflat.files import hold, write_json
from wideflat.progress import Progress

__all__ = ["TINY_IMAGENET", "TinyImageNet"]

_FORMAT = 1  # of the cache
_MEMBER = 1 << 24  # bytes that a file of the data set may have; the largest has three million


@dataclasses.dataclass(frozen=True)
class _Source:
    """The files as distributed, in a folder or a zip file."""

    place: Path
    names: frozenset[str]
    read: Callable[[str], bytes]
    sizes: Callable[[str], int]


@dataclasses.dataclass(frozen=True)
class TinyImageNet:
    """Tiny ImageNet.

    Args:
        name: "tiny-imagenet".
        title: For people.
        folder: Into which the archive unpacks.
        archive: As downloaded.
        num_classes: Number of classes.
        per_class: Training images of each class.
        test_size: Validation images.
        image_size: Height and width.
        chunk: Images that are decoded between two savings.
    """

    name: str
    title: str
    folder: str
    archive: PublishedFile
    num_classes: int = 200
    per_class: int = 500
    test_size: int = 10_000
    image_size: int = 64
    chunk: int = 2000

    @property
    def downloads(self) -> tuple[PublishedFile, ...]:
        """What ``wideflat data fetch`` gets."""
        return (self.archive,)

    def find(self, root: Path) -> Path | None:
        """The folder or zip file under ``root``, or None."""
        for place in (root / self.folder, root, root / self.name / self.folder, root / self.name):
            if (place / "wnids.txt").is_file() or ((place / "train").is_dir() and place.name == self.folder):
                return place
        for place in (root / self.archive.name, root / self.name / self.archive.name, root):
            if place.name == self.archive.name and place.is_file():
                return place
        return None

    def check(self, place: Path) -> list[FileReport]:
        """The archive, or the number of files in the folder, and the cache if there is one."""
        reports = []
        if place.is_file():
            reports.append(self.archive.check(place))
        else:
            try:
                self._listing(self._open(place))
                reports.append(FileReport(str(place), "ok"))
            except DataError as error:
                reports.append(FileReport(str(place), "unreadable", "the files as distributed", str(error)))
        cache = self._cache(place)
        if (cache / "index.json").is_file():
            reports += self._check_cache(cache)
        return reports

    def load(self, place: Path, allow_altered: bool = False) -> ImageData:
        """Read what :meth:`find` found, through the cache, which is made if it is missing or does not fit.

        Args:
            place: A folder or a zip file.
            allow_altered: Also take a zip file whose checksum is not the published one.
        """
        altered = []
        if place.is_file():
            report = self.archive.check(place)
            refuse(report, self.name, allow_altered)
            altered = [report.path] if report.status == "altered" else []
        cache = self._cache(place)
        index = _read_json(cache / "index.json")
        if not self._fits(index, place):
            cache.mkdir(parents=True, exist_ok=True)
            with open(cache / "lock", "w") as lock:
                hold(lock, wait=True)
                index = _read_json(cache / "index.json")  # another process may have made it while we waited
                if not self._fits(index, place):
                    index = self._decode(place, cache)
        for report in self._check_cache(cache):
            if report.status != "ok":
                raise DataError(
                    f"{report.path} (decoded images) is {report.status}: expected {report.expected}, got "
                    f"{report.actual}. Remove the folder {cache}; it is made again from {place}."
                )
        parts = []
        for split in ("train", "test"):
            pixels = np.load(cache / f"{split}.npy", mmap_mode="c", allow_pickle=False)
            targets = torch.tensor(index[f"{split}_targets"], dtype=torch.int64)
            parts.append(ImageSplit(torch.from_numpy(pixels).permute(0, 3, 1, 2), targets))
        return ImageData(
            self.name,
            tuple(index["classes"]),
            parts[0],
            parts[1],
            tuple(index["mean"]),
            tuple(index["std"]),
            str(place),
            tuple(altered),
        )

    # What is distributed ----------------------------------------------------------------------------------------

    def _open(self, place: Path) -> _Source:
        if place.is_dir():
            names = frozenset(
                os.path.relpath(os.path.join(folder, name), place).replace(os.sep, "/")
                for folder, _, files in os.walk(place)
                for name in files
            )
            return _Source(place, names, self._read_below(place), lambda name: (place / name).stat().st_size)
        try:
            archive = zipfile.ZipFile(place)
        except (zipfile.BadZipFile, OSError) as error:
            raise self._damaged(str(place), "a zip file", error) from error
        prefix = next((n[: -len("wnids.txt")] for n in archive.namelist() if n.endswith("wnids.txt")), "")
        members = {
            info.filename[len(prefix) :]: info
            for info in archive.infolist()
            if info.filename.startswith(prefix) and not info.is_dir()
        }

        def read(name: str) -> bytes:
            if members[name].file_size > _MEMBER:
                raise self._damaged(f"{name} in {place}", f"at most {_MEMBER} bytes", members[name].file_size)
            try:
                return archive.read(members[name])
            except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
                raise self._damaged(f"{name} in {place}", "a whole member of the zip file", error) from error

        return _Source(place, frozenset(members), read, lambda name: members[name].file_size)

    def _read_below(self, place: Path) -> Callable[[str], bytes]:
        """What reads a file of a folder: regular ones, no larger than those of the data set."""

        def read(name: str) -> bytes:
            path = place / name
            if not path.is_file():  # a device has no end
                raise self._damaged(str(path), "a file", "something else")
            with open(path, "rb") as file:
                content = file.read(_MEMBER + 1)
            if len(content) > _MEMBER:
                raise self._damaged(str(path), f"at most {_MEMBER} bytes", path.stat().st_size)
            return content

        return read

    def _listing(self, source: _Source) -> tuple[list[str], dict[str, list[tuple[str, int]]]]:
        """Names of the classes, and (file, target) of every image of each part."""
        wnids = sorted(self._text(source, "wnids.txt").split())
        if len(wnids) != self.num_classes or len(set(wnids)) != len(wnids):
            raise self._damaged(f"{source.place}/wnids.txt", f"{self.num_classes} classes", len(wnids))
        target = {wnid: k for k, wnid in enumerate(wnids)}
        words = {}
        if "words.txt" in source.names:
            words = dict(line.split("\t", 1) for line in self._text(source, "words.txt").splitlines() if "\t" in line)
        parts = {"train": self._train_files(source, target), "test": self._test_files(source, target)}
        return [words.get(wnid, wnid).strip() for wnid in wnids], parts

    def _train_files(self, source: _Source, target: dict[str, int]) -> list[tuple[str, int]]:
        found = [
            (f"train/{wnid}/images/{wnid}_{k}.JPEG", label)
            for wnid, label in target.items()
            for k in range(self.per_class)
        ]
        for file, _ in found:
            self._require(source, file)
        return found

    def _test_files(self, source: _Source, target: dict[str, int]) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        listing = f"{source.place}/val/val_annotations.txt"
        for number, line in enumerate(self._text(source, "val/val_annotations.txt").splitlines(), 1):
            name, wnid, *_ = [*line.split("\t"), "", ""]
            file = f"val/images/{name}"
            if file not in source.names and f"val/{wnid}/images/{name}" in source.names:
                file = f"val/{wnid}/images/{name}"  # sorted into classes, as many users do
            if wnid not in target:
                raise self._damaged(listing, "a known class", f"{wnid!r} in line {number}")
            self._require(source, file)
            found.append((file, target[wnid]))
        if len(found) != self.test_size:
            raise self._damaged(listing, f"{self.test_size} lines", len(found))
        return found

    def _require(self, source: _Source, file: str) -> None:
        if file not in source.names:
            refuse(FileReport(f"{source.place}/{file}", "missing"), self.name)

    def _text(self, source: _Source, name: str) -> str:
        self._require(source, name)
        return source.read(name).decode("utf-8", "replace")

    def _damaged(self, where: str, expected: str, actual: object) -> DataError:
        return DataError(
            f"{where} is damaged: expected {expected}, got {actual}. "
            f"Get the published file with `wideflat data fetch {self.name}`."
        )

    # The cache --------------------------------------------------------------------------------------------------

    def _cache(self, place: Path) -> Path:
        key = hashlib.sha256(str(place.resolve()).encode()).hexdigest()[:12]
        return cache_folder() / "decoded" / f"{self.name}-{key}"

    def _fits(self, index: dict, place: Path) -> bool:
        return index.get("fingerprint") == self._fingerprint(place) and index.get("format") == _FORMAT

    def _fingerprint(self, place: Path) -> str:
        """Changes when the source does: size and time of the zip file, or of a few files of the folder."""
        marks = [place] if place.is_file() else [place / "wnids.txt", place / "val" / "val_annotations.txt"]
        parts = [f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in marks if p.exists()]
        shape = f"{self.num_classes} {self.per_class} {self.test_size} {self.image_size} {self.chunk}"
        return hashlib.sha256("\n".join([*parts, shape]).encode()).hexdigest()

    def _decode(self, place: Path, cache: Path) -> dict:
        source = self._open(place)
        classes, parts = self._listing(source)
        fingerprint = self._fingerprint(place)
        (cache / "index.json").unlink(missing_ok=True)
        journal_file = cache / "journal.json"
        journal = _read_json(journal_file)
        if journal.get("fingerprint") != fingerprint:
            journal = {"fingerprint": fingerprint, "train": [], "test": []}
        index: dict = {"format": _FORMAT, "fingerprint": fingerprint, "source": str(place), "classes": classes}
        total = sum(map(len, parts.values()))
        workers = os.cpu_count() or 1
        with (
            Progress(f"decoding {self.title}", total=total) as progress,
            concurrent.futures.ThreadPoolExecutor(workers) as pool,  # Pillow decodes outside of the interpreter lock
        ):
            for split, files in parts.items():
                part = cache / f"{split}.npy.part"
                shape = (len(files), self.image_size, self.image_size, 3)
                images = self._resume(part, shape, journal[split])
                for start in range(len(journal[split]) * self.chunk, len(files), self.chunk):
                    names = [file for file, _ in files[start : start + self.chunk]]
                    contents = ((name, source.read(name)) for name in names)
                    for k, pixels in enumerate(pool.map(lambda item: self._pixels(source, *item), contents)):
                        images[start + k] = pixels
                    images.flush()
                    journal[split].append(_digest(images[start : start + len(names)]))
                    write_json(journal_file, journal)
                    progress.advance(len(names))
                index[f"{split}_chunks"] = journal[split]
                index[f"{split}_targets"] = [target for _, target in files]
                index[f"{split}_bytes"] = part.stat().st_size
                if split == "train":
                    index["mean"], index["std"] = channel_statistics(torch.from_numpy(images).permute(0, 3, 1, 2))
                del images
                os.replace(part, cache / f"{split}.npy")
        write_json(cache / "index.json", index)
        journal_file.unlink(missing_ok=True)
        return index

    def _resume(self, part: Path, shape: tuple[int, ...], digests: list[str]) -> np.memmap:
        """The images decoded so far; ``digests`` is cut to the chunks that are there and whole."""
        whole = part.with_suffix("")  # this part was finished, another was not
        if digests and whole.is_file() and not part.is_file():
            os.replace(whole, part)
        if digests and part.is_file():
            try:
                images = np.lib.format.open_memmap(part, mode="r+")
                if images.shape == shape and images.dtype == np.uint8:
                    for k, digest in enumerate(digests):
                        if _digest(images[k * self.chunk : (k + 1) * self.chunk]) != digest:
                            del digests[k:]
                            break
                    return images
            except (ValueError, OSError):
                pass  # not what was written: begin again
        digests.clear()
        part.unlink(missing_ok=True)
        return np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)

    def _pixels(self, source: _Source, name: str, content: bytes) -> np.ndarray:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
                if image.size != (self.image_size, self.image_size):  # before it is decoded: it may be enormous
                    wanted, found = f"{self.image_size}x{self.image_size} pixels", "x".join(map(str, image.size))
                    raise self._damaged(f"{source.place}/{name}", wanted, found)
                return np.asarray(image.convert("RGB"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise self._damaged(
                f"{source.place}/{name}", f"a JPEG file of {source.sizes(name)} bytes", error
            ) from error

    def _check_cache(self, cache: Path) -> list[FileReport]:
        """Size and every chunk's checksum of the decoded images."""
        index = _read_json(cache / "index.json")
        reports = []
        for split in ("train", "test"):
            path, size, digests = cache / f"{split}.npy", index.get(f"{split}_bytes"), index.get(f"{split}_chunks", [])
            if not path.is_file():
                reports.append(FileReport(str(path), "missing", "a file", "none"))
                continue
            actual = path.stat().st_size
            if actual != size:
                reports.append(FileReport(str(path), "truncated", f"{size} bytes", f"{actual} bytes"))
                continue
            try:
                images = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, OSError, EOFError) as error:
                reports.append(FileReport(str(path), "unreadable", "an array", str(error)))
                continue
            report = FileReport(str(path), "ok")
            for k, digest in enumerate(digests):
                found = _digest(images[k * self.chunk : (k + 1) * self.chunk])
                if found != digest:
                    report = FileReport(str(path), "altered", f"sha256 {digest} in chunk {k}", f"sha256 {found}")
                    break
            reports.append(report)
        return reports


def _digest(images: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()


def _read_json(path: Path) -> dict:
    """The dictionary in a file; empty if the file is missing or damaged."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


# Size and MD5: as recorded by the loaders of many projects (for example avalanche); the authors publish none.
TINY_IMAGENET = TinyImageNet(
    name="tiny-imagenet",
    title="Tiny ImageNet",
    folder="tiny-imagenet-200",
    archive=PublishedFile(
        "tiny-imagenet-200.zip",
        248_100_043,
        "md5:90528d7ca1a48142e341f4ef8d21d0de",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ),
)
