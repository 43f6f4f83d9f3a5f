"""CIFAR-10 and CIFAR-100, in the binary and the Python layout, unpacked or as downloaded.

Krizhevsky, "Learning multiple layers of features from tiny images", 2009; www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wideflat.data.images import ImageData, ImageSplit
from wideflat.data.pickles import UnsafePickleError, read_pickle
from wideflat.data.published import DataError, FileReport, PublishedFile, refuse

__all__ = ["CIFAR10", "CIFAR100", "Cifar", "Layout"]

_PIXELS = 3 * 32 * 32
_MEMBER = 1 << 28  # bytes that a member of an archive may have; the largest of the published ones has 154 million
_ARCHIVE = 1 << 30  # and all of them together


@dataclasses.dataclass(frozen=True)
class Layout:
    """One of the forms in which the data set is distributed.

    Args:
        kind: "binary" or "python".
        folder: Into which the archive unpacks.
        archive: The archive as downloaded.
        train: Files of the training part, in order.
        test: Files of the test part.
    """

    kind: str
    folder: str
    archive: PublishedFile
    train: tuple[PublishedFile, ...]
    test: tuple[PublishedFile, ...]

    @property
    def files(self) -> tuple[PublishedFile, ...]:
        """All files that are needed."""
        return self.train + self.test


@dataclasses.dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100.

    Args:
        name: "cifar10" or "cifar100".
        title: For people.
        classes: Names of the classes.
        label_bytes: Bytes before the pixels of a binary record; the last of them is the label.
        label_key: Of the labels in the Python layout.
        train_size: Number of training images.
        test_size: Number of test images.
        layouts: In the order in which they are preferred.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    label_bytes: int
    label_key: str
    train_size: int
    test_size: int
    layouts: tuple[Layout, ...]

    @property
    def downloads(self) -> tuple[PublishedFile, ...]:
        """What ``wideflat data fetch`` gets."""
        return (self.layouts[0].archive,)

    def find(self, root: Path) -> Path | None:
        """The folder or archive of this data set under ``root``, or None. What is complete comes first."""
        places = []
        for layout in self.layouts:
            folders = (
                root / layout.folder,
                root,
                root / self.name / layout.folder,
                root / self.name,
                root / f"{layout.folder}-target" / layout.folder,  # Keras 3
            )
            places += [p for p in folders if any((p / file.name).is_file() for file in layout.files)]
        for layout in self.layouts:
            archives = (root / layout.archive.name, root / self.name / layout.archive.name)
            places += [p for p in (*archives, root) if p.name == layout.archive.name and p.is_file()]
        return next(filter(self._complete, places), places[0] if places else None)

    def check(self, place: Path) -> list[FileReport]:
        """Every file that is needed there, compared with the published one.

        Pixels and labels decide: a file or archive that was packed by somebody else is as good as the published one.
        """
        layout = self._layout(place)
        if place.is_dir():
            reports = [file.check(place / file.name) for file in layout.files]
            return [self._by_content(layout, *each) for each in zip(layout.files, reports, strict=True)]
        report = layout.archive.check(place)
        if report.status in ("ok", "missing"):
            return [report]
        try:
            members = [self._judged(layout, *each) for each in _contents(place, layout, self.name)]
        except DataError:
            return [report]
        return [FileReport(str(place), "ok")] if all(member.status == "ok" for member in members) else members

    def _by_content(self, layout: Layout, file: PublishedFile, report: FileReport) -> FileReport:
        """The report of a file, or that its content is the published one although its bytes are not."""
        if report.status not in ("altered", "truncated"):
            return report
        judged = self._judged(layout, file, report.path, Path(report.path).read_bytes())
        return judged if judged.status == "ok" else report

    def _judged(self, layout: Layout, file: PublishedFile, where: str, content: bytes) -> FileReport:
        """Whether pixels and labels are the published ones: written as binary records, their digest is published."""
        report = file.check_content(where, content)
        binary = next((other for other in self.layouts if other.kind == "binary"), None)
        if report.status == "ok" or binary is None or binary is layout:
            return report
        with contextlib.suppress(DataError, KeyError, TypeError, ValueError):  # then it is not the published content
            labels, pixels = self._records(layout.kind, content, where)
            columns = [labels[:, None].astype(np.uint8), pixels]
            if self.label_bytes > 1:
                columns.insert(0, np.asarray(_batch(content)["coarse_labels"], np.uint8)[:, None])
            published = binary.files[layout.files.index(file)]
            if published.check_content(where, np.concatenate(columns, axis=1).tobytes()).status == "ok":
                return FileReport(where, "ok")
        return report

    def load(self, place: Path, allow_altered: bool = False) -> ImageData:
        """Read what :meth:`find` found.

        Args:
            place: A folder or an archive.
            allow_altered: Also take well-formed files whose checksum is not the published one.
        """
        reports = self.check(place)
        for report in reports:
            refuse(report, self.name, allow_altered)
        layout = self._layout(place)
        parts = {
            "train": (np.empty((self.train_size, 32, 32, 3), np.uint8), np.empty(self.train_size, np.int64)),
            "test": (np.empty((self.test_size, 32, 32, 3), np.uint8), np.empty(self.test_size, np.int64)),
        }
        filled = {"train": 0, "test": 0}
        for file, where, content in _contents(place, layout, self.name):
            split = "train" if file in layout.train else "test"
            labels, pixels = self._records(layout.kind, content, where)
            images, targets = parts[split]
            start, end = filled[split], filled[split] + len(labels)
            if end > len(targets):
                raise self._damaged(where, f"at most {len(targets)} images in the {split} files", f"{end} or more")
            for channel in range(3):  # one plane at a time: four times as fast as a transpose
                images[start:end, :, :, channel] = pixels.reshape(-1, 3, 32, 32)[:, channel]
            targets[start:end] = labels
            filled[split] = end
        for split, count in filled.items():
            if count != len(parts[split][1]):
                raise self._damaged(str(place), f"{len(parts[split][1])} {split} images", str(count))
        train, test = (
            ImageSplit(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(targets))
            for images, targets in parts.values()
        )
        altered = tuple(report.path for report in reports if report.status == "altered")
        return ImageData.of(self.name, self.classes, train, test, str(place), altered)

    def _records(self, kind: str, content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Labels (n,) and pixels (n, 3072) of one file."""
        if kind == "binary":
            length = self.label_bytes + _PIXELS
            if not content or len(content) % length:
                raise self._damaged(where, f"a multiple of {length} bytes", f"{len(content)} bytes")
            records = np.frombuffer(content, np.uint8).reshape(-1, length)
            labels, pixels = records[:, self.label_bytes - 1], records[:, self.label_bytes :]
        else:
            try:
                batch = _batch(content)
                pixels, labels = batch["data"], np.asarray(batch[self.label_key], np.int64)
                if pixels.ndim != 2 or pixels.shape[1] != _PIXELS or labels.shape != pixels.shape[:1]:
                    raise ValueError(f"pixels {pixels.shape} and labels {labels.shape}")
            except (UnsafePickleError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise self._damaged(
                    where, f"a pickle with data (n, {_PIXELS}) and {self.label_key} (n)", error
                ) from error
        wrong = np.flatnonzero((labels < 0) | (labels >= len(self.classes)))
        if len(wrong):
            raise self._damaged(
                where, f"labels from 0 to {len(self.classes) - 1}", f"{labels[wrong[0]]} in record {wrong[0]}"
            )
        return labels, pixels

    def _damaged(self, where: str, expected: str, actual: object) -> DataError:
        return DataError(
            f"{where} is damaged: expected {expected}, got {actual}. "
            f"Get the published files with `wideflat data fetch {self.name}`."
        )

    def _complete(self, place: Path) -> bool:
        layout = self._layout(place)
        return place.is_file() or all((place / file.name).is_file() for file in layout.files)

    def _layout(self, place: Path) -> Layout:
        for layout in self.layouts:
            if place.name == layout.archive.name:
                return layout
        counts = [sum((place / file.name).is_file() for file in layout.files) for layout in self.layouts]
        return self.layouts[int(np.argmax(counts))]


def _batch(content: bytes) -> dict[str, Any]:
    """A file of the Python layout."""
    return {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in read_pickle(content).items()}


def _contents(place: Path, layout: Layout, name: str) -> Iterator[tuple[PublishedFile, str, bytes]]:
    """The files of a layout in their order, from a folder or out of the archive."""
    if place.is_dir():
        for file in layout.files:
            yield file, str(place / file.name), (place / file.name).read_bytes()
        return
    wanted = {file.name: file for file in layout.files}
    found: dict[str, bytes] = {}
    size = 0
    try:
        with tarfile.open(place, "r:*") as archive:
            for member in archive:
                size += member.size
                if member.size > _MEMBER or size > _ARCHIVE:
                    raise tarfile.TarError(f"{member.name} has {member.size} bytes, {size} with those before it")
                base = member.name.rsplit("/", 1)[-1]
                source = archive.extractfile(member) if base in wanted and member.isfile() else None
                if source is not None:
                    found[base] = source.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{place} is damaged: expected an archive of {layout.folder}, got an error after {len(found)} of its "
            f"{len(wanted)} files ({error}). Get it again with `wideflat data fetch {name}`."
        ) from error
    for file in layout.files:
        if file.name not in found:
            refuse(FileReport(f"{file.name} in {place}", "missing"), name)
        yield file, f"{place}:{file.name}", found.pop(file.name)


def _files(*rows: tuple[str, int | None, str]) -> tuple[PublishedFile, ...]:
    return tuple(PublishedFile(*row) for row in rows)


_URL = "https://www.cs.toronto.edu/~kriz/"

# MD5 of the archives: the authors' page. Sizes and SHA-256 of the archives: as recorded by several loaders (Keras,
# MLDatasets.jl). Files of the binary layout: sizes follow from the format, SHA-256 from ankane/torchvision-ruby.
# Files of the Python layout: MD5 from torchvision; their sizes are not published.
CIFAR10 = Cifar(
    name="cifar10",
    title="CIFAR-10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    label_bytes=1,
    label_key="labels",
    train_size=50_000,
    test_size=10_000,
    layouts=(
        Layout(
            "binary",
            "cifar-10-batches-bin",
            PublishedFile(
                "cifar-10-binary.tar.gz",
                170_052_171,
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                _URL + "cifar-10-binary.tar.gz",
            ),
            _files(
                (
                    "data_batch_1.bin",
                    30_730_000,
                    "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                ),
                (
                    "data_batch_2.bin",
                    30_730_000,
                    "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                ),
                (
                    "data_batch_3.bin",
                    30_730_000,
                    "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                ),
                (
                    "data_batch_4.bin",
                    30_730_000,
                    "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                ),
                (
                    "data_batch_5.bin",
                    30_730_000,
                    "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                ),
            ),
            _files(
                (
                    "test_batch.bin",
                    30_730_000,
                    "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
                ),
            ),
        ),
        Layout(
            "python",
            "cifar-10-batches-py",
            PublishedFile(
                "cifar-10-python.tar.gz",
                170_498_071,
                "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                _URL + "cifar-10-python.tar.gz",
            ),
            _files(
                ("data_batch_1", None, "md5:c99cafc152244af753f735de768cd75f"),
                ("data_batch_2", None, "md5:d4bba439e000b95fd0a9bffe97cbabec"),
                ("data_batch_3", None, "md5:54ebc095f3ab1f0389bbae665268c751"),
                ("data_batch_4", None, "md5:634d18415352ddfa80567beed471001a"),
                ("data_batch_5", None, "md5:482c414d41f54cd18b22e5b47cb7c3cb"),
            ),
            _files(("test_batch", None, "md5:40351d587109b95175f43aff81a1287e")),
        ),
    ),
)

CIFAR100 = Cifar(
    name="cifar100",
    title="CIFAR-100",
    classes=tuple(
        """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
        castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
        elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
        man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
        pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
        skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
        tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905 (a list of 100 strings is harder to read)
    ),
    label_bytes=2,  # coarse label, fine label
    label_key="fine_labels",
    train_size=50_000,
    test_size=10_000,
    layouts=(
        Layout(
            "binary",
            "cifar-100-binary",
            PublishedFile(
                "cifar-100-binary.tar.gz",
                168_513_733,
                "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                _URL + "cifar-100-binary.tar.gz",
            ),
            _files(
                ("train.bin", 153_700_000, "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
            ),
            _files(
                ("test.bin", 30_740_000, "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
            ),
        ),
        Layout(
            "python",
            "cifar-100-python",
            PublishedFile(
                "cifar-100-python.tar.gz",
                169_001_437,
                "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
                _URL + "cifar-100-python.tar.gz",
            ),
            _files(("train", None, "md5:16019d7e3df5f24257cddd939b257f8d")),
            _files(("test", None, "md5:f0ef6b0ae62326f3e7ffdfab6717acfc")),
        ),
    ),
)
