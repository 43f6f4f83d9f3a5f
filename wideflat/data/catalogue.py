"""Every data set by its name: finding, loading, checking and fetching it."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch

from wideflat.checks import instance
from wideflat.checks.doors import asks
from wideflat.data import dress_coat
from wideflat.data.cifar import CIFAR10, CIFAR100, Cifar
from wideflat.data.fashion_mnist import FASHION_MNIST, FashionMnist
from wideflat.data.folders import cache_folder, search_folders
from wideflat.data.images import ImageData, ImageSplit
from wideflat.data.published import DataError, FileReport, PublishedFile
from wideflat.data.tiny_imagenet import TINY_IMAGENET, TinyImageNet
from wideflat.files import atomic_write

__all__ = ["CATALOGUE", "FACTS", "DressCoat", "Facts", "check", "fetch", "find", "load"]

Specification = Cifar | FashionMnist | TinyImageNet


@dataclasses.dataclass(frozen=True)
class DressCoat:
    """The embedded Dress-vs-Coat set as images; :mod:`wideflat.data.dress_coat` has it as +-1 patterns."""

    name: str = "dress-coat"
    title: str = "Dress-vs-Coat"
    downloads: tuple[PublishedFile, ...] = ()

    @property
    def place(self) -> Path:
        """The file in the package."""
        return dress_coat.FILE

    def check(self) -> list[FileReport]:
        """The embedded file, compared with what was embedded."""
        return [PublishedFile(dress_coat.FILE.name, None, f"sha256:{dress_coat.SHA256}").check(dress_coat.FILE)]

    def load(self) -> ImageData:
        """All binarised images, black and white; target 0 is Dress, 1 is Coat."""
        inputs, targets, test_inputs, test_targets = dress_coat.images()

        def part(patterns: np.ndarray, signs: np.ndarray) -> ImageSplit:
            pixels = np.where(patterns > 0, 255, 0).astype(np.uint8).reshape(-1, 1, 28, 28)
            return ImageSplit(torch.from_numpy(pixels), torch.from_numpy((signs < 0).astype(np.int64)))

        return ImageData.of(
            self.name, ("Dress", "Coat"), part(inputs, targets), part(test_inputs, test_targets), "embedded"
        )


#: Every data set.
CATALOGUE: dict[str, Specification | DressCoat] = {
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "tiny-imagenet": TINY_IMAGENET,
    "fashion-mnist": FASHION_MNIST,
    "dress-coat": DressCoat(),
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a data set without reading it.

    Args:
        classes: Number of classes.
        size: Side of its images.
        channels: 3 for colour, 1 for grey.
        train: Number of training images.
        test: Number of test images (of Tiny ImageNet: labelled validation images).
    """

    classes: int
    size: int
    channels: int
    train: int
    test: int


#: The same of every data set, for presets, and for estimates before it is loaded.
FACTS: dict[str, Facts] = {
    "cifar10": Facts(classes=10, size=32, channels=3, train=50_000, test=10_000),
    "cifar100": Facts(classes=100, size=32, channels=3, train=50_000, test=10_000),
    "tiny-imagenet": Facts(classes=200, size=64, channels=3, train=100_000, test=10_000),
    "fashion-mnist": Facts(classes=10, size=28, channels=1, train=60_000, test=10_000),
    "dress-coat": Facts(classes=2, size=28, channels=1, train=3_927, test=677),
}


def specification(name: str) -> Specification | DressCoat:
    """The data set of that name; case, hyphens and underscores do not matter."""
    name = instance("the name of a data set", name, str, "a text")

    def plain(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "")

    for key, found in CATALOGUE.items():
        if plain(key) == plain(name):
            return found
    near = difflib.get_close_matches(name, CATALOGUE, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"there is no data set {name!r}; there are {', '.join(CATALOGUE)}.{hint}")


@asks
def find(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Where a data set is on disk.

    Args:
        name: Of the data set.
        folder: Where to look; by default in the folders of :func:`wideflat.data.search_folders`.

    Raises:
        DataError: If it is nowhere; says where it was looked for and how to get it.
    """
    data = specification(name)
    if isinstance(data, DressCoat):
        return data.place
    folders = search_folders(folder)
    for root in folders:
        place = data.find(root)
        if place is not None:
            return place
    looked = ", ".join(map(str, folders))
    where = f" --data {folder}" if folder is not None else ""
    raise DataError(
        f"{data.title} was not found in {looked}. Say where it is with --data or $WIDEFLAT_DATA, or download it with "
        f"`wideflat data fetch {data.name}{where}`."
    )


def load(name: str, folder: str | os.PathLike[str] | None = None, *, allow_altered: bool = False) -> ImageData:
    """Read a data set from disk. Nothing is ever downloaded by this.

    Every file is compared with the published size and checksum first (less than a second for CIFAR).

    Args:
        name: "cifar10", "cifar100", "tiny-imagenet", "fashion-mnist" or "dress-coat".
        folder: Where it is; by default it is looked for in ``$WIDEFLAT_DATA`` and the usual folders.
        allow_altered: Also take well-formed files with another checksum, such as copies that were compressed anew.
            They are listed in ``altered`` of the result. Missing, truncated or malformed files are never taken.

    Raises:
        DataError: Names the file, what was expected and what came, and the command that mends it.

    Example:
        >>> data = load("dress-coat")
        >>> data.train.images.shape, data.classes
        (torch.Size([3927, 1, 28, 28]), ('Dress', 'Coat'))
    """
    data = specification(name)
    if isinstance(data, DressCoat):
        return data.load()
    return data.load(find(name, folder), allow_altered)


def check(name: str, folder: str | os.PathLike[str] | None = None) -> list[FileReport]:
    """Compare every file of a data set with the published one; see :class:`wideflat.data.FileReport`.

    Raises:
        DataError: If the data set is nowhere.
    """
    data = specification(name)
    if isinstance(data, DressCoat):
        return data.check()
    return data.check(find(name, folder))


def fetch(name: str, folder: str | os.PathLike[str] | None = None, *, progress: bool = True) -> Path:
    """Download a data set, check it, and unpack it where that helps.

    Files that are there and have the published checksum are not downloaded again; others are replaced. Each download
    is tried up to four times, and a file takes its name only when it is whole and its checksum right.

    Args:
        name: Of the data set.
        folder: Where to put it: ``$WIDEFLAT_DATA`` or the cache of wideflat by default.
        progress: Show a progress bar.

    Returns:
        The folder or file that :func:`load` will read.
    """
    import pooch

    data = specification(name)
    if isinstance(data, DressCoat):
        return data.place
    root = Path(folder).expanduser() if folder is not None else cache_folder()
    target = root / data.name if isinstance(data, FashionMnist) else root
    target.mkdir(parents=True, exist_ok=True)
    for file in data.downloads:
        keeper = pooch.create(
            target, base_url="", registry={file.name: file.checksum}, urls={file.name: file.url}, retry_if_failed=3
        )
        try:
            keeper.fetch(file.name, progressbar=progress and _can_show_progress())
        except Exception as error:  # whatever the network throws: requests, urllib3, a wrong checksum
            raise DataError(
                f"{file.name} could not be downloaded from {file.url}: {error}. Run the command again, or put a copy "
                f"of the file ({file.checksum.replace(':', ' ')}) into {target}."
            ) from error
        if isinstance(data, Cifar):
            _unpack(data, target / file.name, target)
    place = data.find(root)
    if place is None:
        raise DataError(f"{data.title} was downloaded to {target} but is not found there")
    return place


def _unpack(data: Cifar, archive: Path, target: Path) -> None:
    """Put every file of the archive that is needed beside it, each whole or not at all."""
    layout = next(layout for layout in data.layouts if layout.archive.name == archive.name)
    wanted = {file.name: file for file in layout.files}
    folder = target / layout.folder
    folder.mkdir(exist_ok=True)
    with tarfile.open(archive, "r:*") as members:
        for member in members:
            name = member.name.rsplit("/", 1)[-1]
            if not member.isfile() or name not in wanted or wanted[name].check(folder / name).status == "ok":
                continue
            source = members.extractfile(member)
            if source is not None:
                _write(folder / name, source.read())


def _write(path: Path, content: bytes) -> None:
    with atomic_write(path, "wb") as file:
        file.write(content)


def _can_show_progress() -> bool:
    return sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
