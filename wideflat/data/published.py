"""Files as their authors published them: name, size, checksum, address; and what is wrong with a copy on disk."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path

__all__ = ["DataError", "FileReport", "PublishedFile", "refuse"]


class DataError(RuntimeError):
    """A file of a data set is missing, damaged or not the published one. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class FileReport:
    """What was found where a published file should be.

    Args:
        path: The file, or member of an archive.
        status: "ok", "missing", "truncated" (shorter or longer than published), "altered" (right size, other
            checksum) or "unreadable".
        expected: Size or checksum that was expected.
        actual: Size or checksum that was found.
    """

    path: str
    status: str
    expected: str = ""
    actual: str = ""


@dataclasses.dataclass(frozen=True)
class PublishedFile:
    """A file as published.

    Args:
        name: Of the file.
        size: Bytes, or None where that is not published.
        checksum: ``"sha256:..."`` or ``"md5:..."``, or empty where none is published.
        url: Where it is downloaded from; empty if it comes out of an archive.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "abc"
        >>> _ = path.write_bytes(b"abc")
        >>> published = PublishedFile("abc", 3, "md5:900150983cd24fb0d6963f7d28e17f72")
        >>> published.check(path).status
        'ok'
        >>> _ = path.write_bytes(b"abd")
        >>> published.check(path).status
        'altered'
        >>> _ = path.write_bytes(b"ab")
        >>> published.check(path)
        FileReport(path='.../abc', status='truncated', expected='3 bytes', actual='2 bytes')
    """

    name: str
    size: int | None = None
    checksum: str = ""
    url: str = ""

    def check(self, path: Path) -> FileReport:
        """Compare the file at ``path``."""
        try:
            stat = path.stat()
            if self.size is not None and stat.st_size != self.size:
                return FileReport(str(path), "truncated", f"{self.size} bytes", f"{stat.st_size} bytes")
            if not self.checksum:
                return FileReport(str(path), "ok")
            actual = _file_digest(str(path), self.checksum.partition(":")[0], stat.st_size, stat.st_mtime_ns)
        except FileNotFoundError:
            return FileReport(str(path), "missing", "a file", "none")
        except OSError as error:
            return FileReport(str(path), "unreadable", "a readable file", error.strerror or str(error))
        return self._judge(str(path), actual)

    def check_content(self, where: str, content: bytes) -> FileReport:
        """Compare content that is in memory already; ``where`` it came from is for the report."""
        if self.size is not None and len(content) != self.size:
            return FileReport(where, "truncated", f"{self.size} bytes", f"{len(content)} bytes")
        if not self.checksum:
            return FileReport(where, "ok")
        return self._judge(
            where, hashlib.new(self.checksum.partition(":")[0], content, usedforsecurity=False).hexdigest()
        )

    def _judge(self, where: str, digest: str) -> FileReport:
        kind, _, expected = self.checksum.partition(":")
        if digest == expected:
            return FileReport(where, "ok")
        return FileReport(where, "altered", f"{kind} {expected}", f"{kind} {digest}")


def refuse(report: FileReport, dataset: str, allow_altered: bool = False) -> None:
    """Raise a :class:`DataError` that says what is wrong and what mends it, unless the file is as it should be."""
    mend = f"Get the published files with `wideflat data fetch {dataset}`"
    if report.status == "ok" or (report.status == "altered" and allow_altered):
        return
    if report.status == "altered":
        raise DataError(
            f"{report.path} is altered: expected {report.expected}, got {report.actual}. {mend}, or use the file "
            "knowingly with --allow-altered (allow_altered=True): its figures are then not those of the data set."
        )
    if report.status == "missing":
        raise DataError(f"{report.path} is missing. {mend}.")
    raise DataError(f"{report.path} is {report.status}: expected {report.expected}, got {report.actual}. {mend}.")


@functools.lru_cache(maxsize=256)
def _file_digest(path: str, kind: str, size: int, modified: int) -> str:
    """The digest of a file, computed once as long as its size and time stay (the key, though unused here)."""
    digest = hashlib.new(kind, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
