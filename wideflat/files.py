"""Files are written whole or not at all, read only when whole, and held by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

try:
    import fcntl
except ImportError:  # Windows: nothing is held there
    fcntl = None  # type: ignore[assignment]

__all__ = ["DamagedState", "atomic_write", "hold", "names_in_npz", "read_npz", "sha256"]

#: The most bytes of one array in an ``.npz`` file; above the small ones, it may be so many times larger than packed.
MOST_BYTES, SMALL_BYTES, MOST_SWELLING = 2**32, 2**28, 200

#: What reading a damaged ``.npz`` file raises, in zipfile, zlib and NumPy.
UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(NotImplementedError, RuntimeError, OSError, OverflowError, MemoryError, SyntaxError),
    *(struct.error, tokenize.TokenError),
)


class DamagedState(RuntimeError):
    """A file of a saved state is missing, truncated or altered."""


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO]:
    r"""Open a file for writing that takes the name ``path`` only when all of it is on the disk.

    What is written goes to a temporary file in the same folder, which is flushed, synchronised and renamed when the
    block ends. If the block raises, or the process is killed, ``path`` is as it was before.

    Args:
        path: The file to write. Its folder is made if it is missing.
        mode: ``"w"`` for text (UTF-8) or ``"wb"`` for bytes.

    Example:
        >>> import tempfile, pathlib
        >>> target = pathlib.Path(tempfile.mkdtemp()) / "table.csv"
        >>> with atomic_write(target) as file:
        ...     _ = file.write("sigma,mean\n")
        >>> target.read_text()
        'sigma,mean\n'
    """
    if mode not in ("w", "wb"):
        raise ValueError(f'mode must be "w" or "wb", got {mode!r}')
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with open(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        _synchronise_folder(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def hold(file: IO, wait: bool = False) -> bool:
    """Hold an open file, as long as it is open, against all other processes that would hold it.

    The lock is the operating system's (``flock``): it ends with the process, however that ends.

    Args:
        file: The open file. Nothing is written to it.
        wait: Wait until the other process lets go of it.

    Returns:
        False if another process holds it.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def read_npz(path: str | os.PathLike[str], *names: str) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file by name. Nothing in it is unpickled.

    Args:
        path: The file.
        *names: Arrays that must be there; more may be.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, something else, or has not all of ``names``.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.npz"
        >>> np.savez(path, weights=np.ones(2))
        >>> read_npz(path, "weights")["weights"]
        array([1., 1.])
        >>> read_npz(path, "inputs", "targets")
        Traceback (most recent call last):
        ValueError: ...a.npz has no array inputs and no targets; it has weights
    """
    with _npz(path) as content:
        arrays = {name: content[name] for name in content.files}
    missing = [name for name in names if name not in arrays]
    if missing:
        there = ", ".join(arrays) or "nothing"
        raise ValueError(f"{os.fspath(path)} has no array {' and no '.join(missing)}; it has {there}")
    return arrays


def names_in_npz(path: str | os.PathLike[str]) -> list[str]:
    """The names of the arrays in an ``.npz`` file, which are not read; errors as in :func:`read_npz`."""
    with _npz(path) as content:
        return list(content.files)


def _check_members(content: np.lib.npyio.NpzFile) -> None:
    """Refuse members that are larger than any file of ours, or that claim another size than they have."""
    if not content.files:
        raise ValueError("there is no array in it")
    archive = content.zip
    assert archive is not None  # it is open
    for info in archive.infolist():
        if info.file_size > max(SMALL_BYTES, min(MOST_BYTES, MOST_SWELLING * info.compress_size)):
            raise ValueError(f"{info.filename} would unpack to {info.file_size} bytes")
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(member)
            if dtype.hasobject:
                raise ValueError(f"{info.filename} holds Python objects (a pickle), which are not read")
            claimed = math.prod(shape) * dtype.itemsize
            if claimed != info.file_size - member.tell():
                there = info.file_size - member.tell()
                raise ValueError(f"{info.filename} says that it has {claimed} bytes, and has {there}")


@contextlib.contextmanager
def _npz(path: str | os.PathLike[str]) -> Iterator[np.lib.npyio.NpzFile]:
    """An open ``.npz`` file; whatever is wrong about it or its arrays is one kind of error."""
    with open(path, "rb") as file:
        try:
            with contextlib.closing(np.lib.npyio.NpzFile(file, allow_pickle=False)) as content:
                _check_members(content)
                yield content
        except UNREADABLE as error:
            raise ValueError(f"{os.fspath(path)} is not a whole .npz file of plain arrays ({error})") from error


def sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's contents, as 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _synchronise_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
