"""Files are written whole or not at all, read only when whole, and held by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: nothing is held there
    fcntl = None  # type: ignore[assignment]

__all__ = ["DamagedState", "atomic_write", "hold", "sha256"]


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
