"""Fashion-MNIST: idx files, compressed or not, as downloaded, as torchvision and Keras keep them, as Debian ships them.

Xiao, Rasul, Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms"
(arXiv 1708.07747); github.com/zalandoresearch/fashion-mnist.
"""

from __future__ import annotations

import dataclasses
import gzip
import zlib
from pathlib import Path

import numpy as np
import torch

from wideflat.data.images import ImageData, ImageSplit
from wideflat.data.published import DataError, FileReport, PublishedFile, refuse

__all__ = ["FASHION_MNIST", "FashionMnist", "read_idx"]


@dataclasses.dataclass(frozen=True)
class FashionMnist:
    """Fashion-MNIST.

    Sizes and checksums are of the content without compression: packagers compress anew.

    Args:
        name: "fashion-mnist".
        title: For people.
        classes: Names of the classes.
        files: Training images and labels, test images and labels; without compression.
        downloads: The same, as downloaded.
        folders: Sub-folders in which others keep them.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    files: tuple[PublishedFile, PublishedFile, PublishedFile, PublishedFile]
    downloads: tuple[PublishedFile, ...]
    folders: tuple[str, ...] = (".", "fashion-mnist", "FashionMNIST/raw", "fashion_mnist")

    def find(self, root: Path) -> Path | None:
        """The folder of the files under ``root``, or None. A complete one comes first."""
        places = [root / folder for folder in self.folders]
        if root.is_file():
            places = []
        present = {place: sum(self._path(place, file) is not None for file in self.files) for place in places}
        found = [place for place in places if present[place] == len(self.files)]
        found += [place for place in places if present[place] > 0]
        return found[0] if found else None

    def check(self, place: Path) -> list[FileReport]:
        """Every file that is needed there, compared with the published one."""
        return [self._read(place, file)[0] for file in self.files]

    def load(self, place: Path, allow_altered: bool = False) -> ImageData:
        """Read what :meth:`find` found.

        Args:
            place: The folder of the four files.
            allow_altered: Also take well-formed files whose checksum is not the published one.
        """
        arrays, altered = [], []
        for file in self.files:
            report, content = self._read(place, file)
            refuse(report, self.name, allow_altered)
            if report.status == "altered":
                altered.append(report.path)
            try:
                arrays.append(read_idx(content))
            except ValueError as error:
                raise DataError(f"{report.path} is damaged: {error}. {self._mend}") from error
        parts = []
        for k in (0, 2):
            images, labels = arrays[k : k + 2]
            if images.ndim != 3 or labels.shape != images.shape[:1]:
                raise DataError(
                    f"{place / self.files[k].name} is damaged: expected images (n, 28, 28) and labels (n), got "
                    f"{images.shape} and {labels.shape}. {self._mend}"
                )
            if len(labels) and labels.max() >= len(self.classes):
                raise DataError(
                    f"{place / self.files[k + 1].name} is damaged: expected labels from 0 to {len(self.classes) - 1}, "
                    f"got {labels.max()}. {self._mend}"
                )
            parts.append(
                ImageSplit(torch.from_numpy(images.copy())[:, None], torch.from_numpy(labels.astype(np.int64)))
            )
        return ImageData.of(self.name, self.classes, parts[0], parts[1], str(place), tuple(altered))

    @property
    def _mend(self) -> str:
        return f"Get the published files with `wideflat data fetch {self.name}`."

    def _path(self, place: Path, file: PublishedFile) -> Path | None:
        """The file under one of its usual names."""
        for name in (file.name, file.name.replace("-idx", ".idx")):
            for suffix in ("", ".gz"):
                if (place / (name + suffix)).is_file():
                    return place / (name + suffix)
        return None

    def _read(self, place: Path, file: PublishedFile) -> tuple[FileReport, bytes]:
        path = self._path(place, file)
        if path is None:
            return FileReport(str(place / f"{file.name}.gz"), "missing", "a file", "none"), b""
        try:
            limit = (file.size or 0) + (1 << 20)  # a gzip file of nothing but zeros unfolds a thousandfold
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as source:
                content = source.read(limit)
            if len(content) == limit:
                raise OSError(f"more than {limit - 1} bytes")
        except (OSError, EOFError, zlib.error) as error:
            return FileReport(str(path), "unreadable", "a gzip file", str(error)), b""
        return file.check_content(str(path), content), content


def read_idx(content: bytes) -> np.ndarray:
    """The array of bytes in an idx file: two zeros, type 8, number of dimensions, each dimension big-endian, values.

    Example:
        >>> read_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
        array([7, 8, 9], dtype=uint8)
    """
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"expected the idx header 00 00 08, got {content[:3].hex(' ') or 'nothing'}")
    start = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[k : k + 4], "big") for k in range(4, min(start, len(content)), 4))
    expected = start + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise ValueError(f"expected {expected} bytes for the shape {shape}, got {len(content)}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"

# MD5 of the downloads: the authors' README (and torchvision). SHA-256 of the content: computed from Debian's package
# dataset-fashion-mnist, whose compressed streams, given the original headers, have exactly those MD5.
FASHION_MNIST = FashionMnist(
    name="fashion-mnist",
    title="Fashion-MNIST",
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    files=(
        PublishedFile(
            "train-images-idx3-ubyte",
            47_040_016,
            "sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        PublishedFile(
            "train-labels-idx1-ubyte",
            60_008,
            "sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        PublishedFile(
            "t10k-images-idx3-ubyte",
            7_840_016,
            "sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        PublishedFile(
            "t10k-labels-idx1-ubyte",
            10_008,
            "sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    downloads=(
        PublishedFile(
            "train-images-idx3-ubyte.gz",
            26_421_880,
            "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            _URL + "train-images-idx3-ubyte.gz",
        ),
        PublishedFile(
            "train-labels-idx1-ubyte.gz",
            29_515,
            "md5:25c81989df183df01b3e8a0aad5dffbe",
            _URL + "train-labels-idx1-ubyte.gz",
        ),
        PublishedFile(
            "t10k-images-idx3-ubyte.gz",
            4_422_102,
            "md5:bef4ecab320f06d8554ea6380940ec79",
            _URL + "t10k-images-idx3-ubyte.gz",
        ),
        PublishedFile(
            "t10k-labels-idx1-ubyte.gz",
            5_148,
            "md5:bb300cfdad3c16e7a12a480ee83cd310",
            _URL + "t10k-labels-idx1-ubyte.gz",
        ),
    ),
)
