"""Makes the embedded file ``dress_coat.npy`` from the idx files of Fashion-MNIST. Same input, same bytes.

Run it with the folder of the idx files (plain or .gz), as Debian's package ``dataset-fashion-mnist`` or the project's
own page has them::

    python tools/make_dress_coat.py FOLDER

Rules (Appendix B.1): of the classes Dress (3) and Coat (4), keep the images whose median pixel lies in [0.25, 0.75] of
the range 0..255, in the order of the original files, and write a bit 1 where a pixel is above the image's median.
"""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import numpy as np

from wideflat.data.bitmaps import pack
from wideflat.data.dress_coat import FILE, SHA256
from wideflat.data.fashion_mnist import read_idx
from wideflat.files import atomic_write, sha256

__all__ = ["main", "reduce"]

DRESS, COAT = 3, 4


def read(path: Path) -> np.ndarray:
    """The array of an idx file, plain or gzipped."""
    compressed = path.with_name(path.name + ".gz")
    if not path.exists() and not compressed.exists():
        raise FileNotFoundError(
            f"neither {path} nor {compressed} is there; give the folder of Fashion-MNIST's idx files"
        )
    content = path.read_bytes() if path.exists() else gzip.decompress(compressed.read_bytes())
    try:
        return read_idx(content)
    except ValueError as error:
        raise ValueError(f"{path} is not an idx file of unsigned bytes: {error}") from None


def reduce(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The filtered and binarised images as bits (count, 784), and whether each is a Dress."""
    pixels = images.reshape(len(images), -1)
    median = np.median(pixels, axis=1)
    keep = np.isin(labels, (DRESS, COAT)) & (median >= 0.25 * 255) & (median <= 0.75 * 255)
    return pixels[keep] > median[keep, None], labels[keep] == DRESS


def packed(bits: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """The words of the file."""
    tail = np.append(flags, np.zeros(len(flags) % 2, np.uint8)).view("<u2")
    return np.concatenate([pack(bits), tail]).astype("<u2")


def main(folder: str | os.PathLike[str], target: str | os.PathLike[str] = FILE) -> str:
    """Write the embedded file and return its SHA-256.

    The images, packed; then a byte for each, with bit 0 set for a Dress and bit 1 set for the test set, two a word.
    """
    bits, flags = [], []
    for split, name in enumerate(("train", "t10k")):
        images = read(Path(folder) / f"{name}-images-idx3-ubyte")
        labels = read(Path(folder) / f"{name}-labels-idx1-ubyte")
        pixels, dress = reduce(images, labels)
        bits.append(pixels.reshape(-1, 28, 28).astype(np.uint8))
        flags.append(dress.astype(np.uint8) | np.uint8(split << 1))
    with atomic_write(target, "wb") as file:
        words = packed(np.concatenate(bits), np.concatenate(flags))
        np.lib.format.write_array(file, words, version=(1, 0), allow_pickle=False)
    return sha256(target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/make_dress_coat.py FOLDER")
    digest = main(sys.argv[1])
    print(f"{FILE.name}: SHA-256 {digest}{'' if digest == SHA256 else f', but {SHA256} was expected'}")
    sys.exit(digest != SHA256)
