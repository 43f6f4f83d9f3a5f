"""Data of your own: a folder of images, an ``.npz`` file, or any torch or Hugging Face data set.

On the command line, ``--data folder:PATH`` and ``--data npz:FILE``; in Python the functions below. All give the
:class:`wideflat.data.ImageData` that the published data sets give, so that everything works with it as with them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wideflat.checks import shown, whole
from wideflat.checks.doors import asks
from wideflat.checks.streams import ending, length_of
from wideflat.data.images import ImageData, ImageSplit
from wideflat.data.published import DataError
from wideflat.files import read_npz
from wideflat.progress import Progress

__all__ = ["OWN", "from_datasets", "from_folder", "from_npz", "is_own", "load_own"]

#: What ``--data KIND:PLACE`` can begin with, and a preset's ``dataset`` be beside the published ones.
OWN = ("folder", "npz", "own")

#: Formats that are read, by the endings of files; no format that needs another program.
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".gif": "GIF", ".webp": "WEBP"}

#: The most pixels of one image before it is made smaller, and the most images.
MOST_PIXELS, MOST_IMAGES = 2**26, 10**7

#: Names of the folder with test images, and of the arrays of an ``.npz`` file.
TEST_FOLDERS = ("test", "val", "valid", "validation")
ARRAYS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)


@asks
def is_own(place: str | os.PathLike[str] | None) -> bool:
    """Whether ``--data`` names data of the user's own.

    Example:
        >>> is_own("folder:photos"), is_own("npz:digits.npz"), is_own("datasets/cifar"), is_own(None)
        (True, True, False, False)
    """
    return place is not None and os.fspath(place).partition(":")[0] in ("folder", "npz") and ":" in os.fspath(place)


def load_own(place: str | os.PathLike[str], size: int) -> ImageData:
    """What ``--data`` names: ``folder:PATH`` or ``npz:FILE``.

    Args:
        place: The kind and the place.
        size: Side that images of a folder are brought to.
    """
    kind, _, path = os.fspath(place).partition(":")
    return from_folder(path, size) if kind == "folder" else from_npz(path)


@asks
def from_folder(path: str | os.PathLike[str], size: int = 32, *, progress: bool = True) -> ImageData:
    """Images in folders, one a class: ``PATH/train/CLASS/*`` and ``PATH/test/CLASS/*`` (or val, valid, validation).

    Without these two, ``PATH/CLASS/*``: one image in five, chosen by its name, is for testing. Images are PNG, JPEG,
    BMP, GIF or WebP, of any size: the largest square in the middle is taken and brought to ``size``; in colour.

    Args:
        path: The folder.
        size: Side of the images that it gives.
        progress: Show a progress bar.
    """
    root, size = Path(path).expanduser(), whole("size", size, 1, 4096)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}: --data folder:PATH wants a folder with one folder a class in it")
    test_root = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    if (root / "train").is_dir() and test_root is not None:
        classes = _classes(root / "train")
        if unknown := sorted(set(_classes(test_root)) - set(classes)):
            raise DataError(f"{test_root} has classes that {root / 'train'} has not: {', '.join(unknown[:5])}")
        parts = [_files(root / "train", classes), _files(test_root, classes)]
    else:
        classes = _classes(root)
        files = _files(root, classes)
        held = [zlib.crc32(file.relative_to(root).as_posix().encode()) % 5 == 0 for file, _ in files]
        parts = [[item for item, out in zip(files, held, strict=True) if out is test] for test in (False, True)]
    for name, part in zip(("train", "test"), parts, strict=True):
        if not part:
            endings = ", ".join(FORMATS)
            raise DataError(f"{root} has no images to {name} with: expected files ending in {endings} in {classes[0]}/")
    with Progress(f"reading {root.name}", sum(map(len, parts)), progress) as bar:
        splits = [_decoded(part, size, bar) for part in parts]
    return _made("folder", root, tuple(classes), *splits)


@asks
def from_npz(path: str | os.PathLike[str]) -> ImageData:
    """Images in an ``.npz`` file: arrays ``x_train``, ``y_train``, ``x_test``, ``y_test`` (or ``train_images``, ...).

    Images are uint8 (N, H, W), (N, H, W, C) or (N, C, H, W), C being 1 or 3, square; labels are whole numbers from 0
    on. An array ``classes`` with the names of the classes is used if it is there.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"there is no file {file}: --data npz:FILE wants an .npz file with {', '.join(ARRAYS[0])}")
    try:
        arrays = read_npz(file)
    except ValueError as error:
        raise DataError(str(error)) from None
    names = next((names for names in ARRAYS if set(names) <= set(arrays)), None)
    if names is None:
        raise DataError(f"{file} must have the arrays {', '.join(ARRAYS[0])}; it has {', '.join(arrays)}")
    x_train, y_train, x_test, y_test = (arrays[name] for name in names)
    train, test = _split(x_train, y_train, f"{names[0]} of {file}"), _split(x_test, y_test, f"{names[2]} of {file}")
    count = 1 + max(int(part.targets.max()) for part in (train, test))
    given = arrays["classes"].tolist() if "classes" in arrays else range(count)
    return _made("npz", file, tuple(map(str, given)), train, test)


@asks
def from_datasets(
    train: Any, test: Any, size: int | None = None, *, classes: Sequence[str] | None = None, name: str = "own"
) -> ImageData:
    """Any torch or Hugging Face data set of images, read into memory.

    Args:
        train: A sequence of (image, label) pairs, or of dictionaries with an image (``image``, ``img``) and a label
            (``label``, ``labels``, ``fine_label``). An image is a PIL image, or an array or tensor: uint8, or float
            from 0 to 1; (H, W), (H, W, C) or (C, H, W).
        test: The same for testing.
        size: Side that the images are brought to; as they are when left out, and then all of one size.
        classes: Names of the classes; their numbers when left out.
        name: Of the data set, for the record.

    Example:
        >>> pairs = [(torch.zeros(3, 8, 8), 0), (torch.ones(3, 8, 8), 1)]
        >>> from_datasets(pairs, pairs, classes=("black", "white")).train.images.shape
        torch.Size([2, 3, 8, 8])
    """
    parts, side = [], None if size is None else whole("size", size, 1, 4096)
    for part, data in (("train", train), ("test", test)):
        pairs = [_pair(item, side, f"item {k} of {part}") for k, item in enumerate(_items(data))]
        if not pairs:
            raise ValueError(f"{part} is empty")
        if len(shapes := {pixels.shape for pixels, _ in pairs}) > 1:
            raise ValueError(f"the images of {part} have different shapes, {sorted(shapes)[:3]}: give size=")
        parts.append(_split(np.stack([pixels for pixels, _ in pairs]), np.array([y for _, y in pairs]), part))
    count = 1 + max(int(part.targets.max()) for part in parts)
    return _made("own", name, tuple(classes) if classes is not None else tuple(map(str, range(count))), *parts)


# ---- parts


def _classes(folder: Path) -> list[str]:
    """Its folders, in the order of their names."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(names) < 2:
        raise DataError(f"{folder} must have a folder for each class, at least two; it has {len(names)}")
    return names


def _files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    files = [
        (file, target)
        for target, name in enumerate(classes)
        if (folder / name).is_dir()
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in FORMATS and file.is_file()
    ]
    if len(files) > MOST_IMAGES:
        raise DataError(f"{folder} has {len(files)} images; at most {MOST_IMAGES} are held in memory")
    return files


def _decoded(files: Sequence[tuple[Path, int]], size: int, bar: Progress) -> ImageSplit:
    """All images of one part; Pillow decodes outside of the interpreter lock."""
    images = np.empty((len(files), size, size, 3), np.uint8)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for k, pixels in enumerate(pool.map(lambda item: _read(item[0], size), files)):
            images[k] = pixels
            bar.advance(1)
    return ImageSplit(torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor([target for _, target in files]))


def _read(file: Path, size: int) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(file, formats=tuple(set(FORMATS.values()))) as image:
            if image.width * image.height > MOST_PIXELS:  # before it is decoded
                raise DataError(f"{file} has {image.width} x {image.height} pixels; at most {MOST_PIXELS} are read")
            return _square(image, size)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} is not an image that can be read: {error}. Mend or remove it") from error


def _square(image: Any, size: int) -> np.ndarray:
    """The largest square in the middle, in colour, ``size`` wide."""
    from PIL import Image

    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=3.0))


def _split(images: np.ndarray, labels: np.ndarray, where: str) -> ImageSplit:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W) and their labels, checked."""
    images = images[..., None] if images.ndim == 3 else images
    if images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    fits = images.ndim == 4 and images.shape[-1] in (1, 3) and images.shape[1] == images.shape[2] and len(images)
    if images.dtype != np.uint8 or not fits:
        raise DataError(
            f"{where} must be uint8 images (N, H, H), (N, H, H, C) or (N, C, H, H), C being 1 or 3; got "
            f"{images.dtype} {images.shape}"
        )
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or int(labels.min()) < 0:
        raise DataError(
            f"the labels of {where} must be {len(images)} whole numbers from 0 on, got {labels.dtype} {labels.shape}"
        )
    pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2)
    return ImageSplit(pixels, torch.from_numpy(labels.astype(np.int64)))


def _items(data: Any) -> Iterable[Any]:
    """Of a data set with a length by index, of anything else in its order."""
    if isinstance(data, Mapping):
        raise TypeError(f"a data set must give (image, label) by number or one after the other, got {shown(data)}")
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return (data[k] for k in range(length_of("a data set", data) or 0))
    return ending("a data set", data)


def _pair(item: Any, size: int | None, where: str) -> tuple[np.ndarray, int]:
    if isinstance(item, Mapping):
        image = next((item[key] for key in ("image", "img") if key in item), None)
        label = next((item[key] for key in ("label", "labels", "fine_label") if key in item), None)
        if image is None or label is None:
            raise ValueError(f"{where} must have an image and a label, as image or img and label; it has {list(item)}")
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        image, label = item
    else:
        raise ValueError(f"{where} must be (image, label) or a dictionary with both, got {shown(item)}")
    return _pixels(image, size, where), whole(f"the label of {where}", label)


def _pixels(image: Any, size: int | None, where: str) -> np.ndarray:
    """uint8 (H, W, C) of whatever an image is."""
    from PIL import Image

    if isinstance(image, (Tensor, np.ndarray)):
        array = _bytes_of(np.asarray(image), where)
        if size is None:
            return array
        image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    if not isinstance(image, Image.Image):
        raise ValueError(f"the image of {where} must be a PIL image, an array or a tensor, got {shown(image)}")
    return _square(image, size) if size is not None else np.asarray(image.convert("RGB"))


def _bytes_of(array: np.ndarray, where: str) -> np.ndarray:
    """uint8 (H, W, C) of uint8, or of numbers from 0 to 1."""
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim == 3 and array.shape[-1] not in (1, 3) and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.dtype.kind == "f" and array.size and 0 <= float(array.min()) <= float(array.max()) <= 1:
        return np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise ValueError(
            f"the image of {where} must be uint8, or numbers from 0 to 1; got {array.dtype} from "
            f"{array.min() if array.size else '-'} to {array.max() if array.size else '-'}: leave out normalisation, "
            "which a training does itself"
        )
    return array


def _made(kind: str, place: Path | str, classes: tuple[str, ...], train: ImageSplit, test: ImageSplit) -> ImageData:
    """The data set, with a digest by which a run knows it again."""
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"the images of {place} differ: {tuple(train.images.shape[1:])} to train, "
            f"{tuple(test.images.shape[1:])} to test"
        )
    name = f"{kind}:{place.name}" if isinstance(place, Path) else place
    source = f"{kind}:{place.absolute()}" if isinstance(place, Path) else ""
    try:
        data = ImageData.of(name, classes, train, test, source)
    except ValueError as error:
        raise DataError(str(error)) from None
    return dataclasses.replace(data, digest=_digest(data))


def _digest(data: ImageData) -> str:
    digest = hashlib.sha256()
    for part in (data.train, data.test):
        for images in part.images.split(4096):
            digest.update(np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy()).data)
        digest.update(part.targets.numpy().data)
    return digest.hexdigest()[:16]
