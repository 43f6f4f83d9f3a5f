"""Files are written whole or not at all, read only when whole, and held by one process at a time."""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import json
import math
import os
import stat
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from wideflat.checks.doors import asks
from wideflat.checks.records import location, reading

try:
    import fcntl
except ImportError:  # Windows: nothing is held there
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "DamagedState",
    "atomic_write",
    "hold",
    "missing",
    "must_be_regular",
    "must_not_swell",
    "names_in_npz",
    "naming",
    "on_disk",
    "read_json",
    "read_npz",
    "read_whole",
    "sha256",
    "write_json",
]

T = TypeVar("T")

#: Above so many bytes what an ``.npz`` file or a checkpoint holds may be so many times larger than the file.
SMALL_BYTES, MOST_SWELLING = 2**28, 20
#: The most arrays in one, and the most bytes of a file that is read as text or in one piece.
MOST_ARRAYS, MOST_TEXT = 10_000, 2**28

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
    path = must_be_regular(location("path", path), "written to")
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


def _check_members(content: np.lib.npyio.NpzFile, packed: int) -> None:
    """Refuse members that are larger than any file of ours, or that claim another size than they have."""
    if not content.files:
        raise ValueError("there is no array in it")
    archive = content.zip
    assert archive is not None  # it is open
    members = archive.infolist()
    _check_size([info.file_size for info in members], packed)
    for info in members:
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
    with open(must_be_regular(path), "rb") as file:
        try:
            with contextlib.closing(np.lib.npyio.NpzFile(file, allow_pickle=False)) as content:
                _check_members(content, os.fstat(file.fileno()).st_size)
                yield content
        except UNREADABLE as error:
            raise ValueError(f"{os.fspath(path)} is not a whole .npz file of plain arrays ({error})") from error


@asks
def missing(path: str | os.PathLike[str]) -> str:
    """That there is no such file or folder, and which of its neighbours may be meant.

    Example:
        >>> missing("/nowhere/at/all")
        'there is no /nowhere/at/all'
    """
    path = Path(path)
    try:
        beside = [each.name for each in path.parent.iterdir()]
    except OSError:
        beside = []
    # a run that was named after more than its preset: all that was written, but for the last word, begins its name
    start = path.name.rpartition("-")[0]
    near = difflib.get_close_matches(path.name, beside, n=1) or [
        n for n in sorted(beside) if start and n.startswith(start)
    ]
    return f"there is no {path}" + (f"; did you mean {path.with_name(near[0])}?" if near else "")


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around what looks at the content of a file: an error that does not name it gets its name.

    Example:
        >>> with naming("a.npz"):
        ...     raise ValueError("weights must have 2 dimensions")
        Traceback (most recent call last):
        ValueError: a.npz: weights must have 2 dimensions
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


@contextlib.contextmanager
def on_disk(path: Path, consequence: str = "") -> Iterator[None]:
    """Say plainly when a disk is full or may not be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            tail = f"; {consequence}" if consequence else ""
            raise OSError(
                error.errno,
                f"no space left on the disk of {path}{tail}. Free some space and start the same command again: it goes "
                "on from there",
            ) from error
        raise


def must_be_regular(path: str | os.PathLike[str], verb: str = "read") -> Path:
    """The path of a file, unless that is a device or a pipe, which need not have an end; it may not be there.

    Args:
        path: The file.
        verb: What would be done with it. A device that is written to by a rename would be no device any more.

    Example:
        >>> must_be_regular("/dev/zero")
        Traceback (most recent call last):
        ValueError: /dev/zero is no file with an end but a device or a pipe, which is not read
    """
    place = location("path", path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mode = os.stat(place).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ValueError(f"{place} is no file with an end but a device or a pipe, which is not {verb}")
    return place


def must_not_swell(path: str | os.PathLike[str]) -> Path:
    """The path of a file, unless it is an archive that would unpack to far more than it is; it may not be there."""
    place = must_be_regular(path)
    if place.is_file() and zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as archive:
            _check_size([info.file_size for info in archive.infolist()], place.stat().st_size)
    return place


def _check_size(sizes: list[int], packed: int) -> None:
    """Refuse members of an archive that are more, or larger, than those of any file of ours."""
    if len(sizes) > MOST_ARRAYS:
        raise ValueError(f"it has {len(sizes)} members, at most {MOST_ARRAYS} are read")
    if sum(sizes) > max(SMALL_BYTES, MOST_SWELLING * packed):
        raise ValueError(f"it would unpack to {sum(sizes)} bytes, from {packed}")


def read_whole(path: str | os.PathLike[str], most: int = MOST_TEXT) -> bytes:
    """The bytes of a file.

    Args:
        path: The file.
        most: It may not have more.

    Raises:
        ValueError: If it has, or has no end; names the file.
    """
    place = must_be_regular(path)
    with open(place, "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"{place} has more than {most} bytes, which is not read")
        return file.read()


def read_json(path: str | os.PathLike[str], what: str, make: Callable[[Any], T]) -> T:
    """What ``make`` makes of the JSON document in a file; whatever is wrong about it is one kind of error.

    Args:
        path: The file.
        what: What it should hold, for the error.
        make: Makes that of what the document says.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is damaged or something else; names the file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.json"
        >>> _ = path.write_text("[1, 2")
        >>> read_json(path, "list", list)
        Traceback (most recent call last):
        ValueError: ...a.json is not a whole list: Expecting ',' delimiter: line 1 column 6 (char 5)
    """
    place = location("path", path)
    try:
        with reading(what):
            return make(json.loads(read_whole(place).decode("utf-8")))
    except ValueError as error:
        reason = str(error).removeprefix(f"this is not a whole {what}: ")
        raise ValueError(f"{place} is not a whole {what}: {reason}") from None


def write_json(path: str | os.PathLike[str], content: Any, *, allow_nan: bool = True) -> None:
    """Write plain values as a JSON document, whole or not at all; without ``allow_nan`` one that every reader takes."""
    with atomic_write(path) as file:
        json.dump(content, file, indent=1, allow_nan=allow_nan)
        file.write("\n")


@asks
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
