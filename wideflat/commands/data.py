"""``wideflat data``: what data is on disk, where it is looked for, its checksums; and downloads on request."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Any, Literal

import tyro

from wideflat.commands import UsageError, usage
from wideflat.commands.answers import answer
from wideflat.data import CATALOGUE, DataError, check, fetch, find, search_folders
from wideflat.data.catalogue import DressCoat, specification
from wideflat.experiments.options import MaybePath
from wideflat.report.terminal import print_table

__all__ = ["Command"]

#: Colours on a screen.
STYLES = {
    "ok": "green",
    "embedded": "green",
    "altered": "yellow",
    "not found": "dim",
    **dict.fromkeys(("missing", "truncated", "unreadable"), "red"),
}


@dataclasses.dataclass
class Command:
    """What data is on disk, where it is looked for, its checksums; and downloads on request.

    list shows which data sets there are and where each was found. verify compares every file with the published size
    and checksum, and exits with 1 if one is missing, truncated or altered. fetch downloads, checks and unpacks; files
    that are right already are left alone, so it also mends. Nothing else in wideflat ever downloads data.

    Examples:
      wideflat data list
      wideflat data verify                       everything that was found
      wideflat data verify cifar10 --data ~/data
      wideflat data fetch cifar10 cifar100
      wideflat data fetch tiny-imagenet --data /big/disk
    """

    action: Annotated[Literal["list", "verify", "fetch"], tyro.conf.Positional] = "list"
    """What to do."""
    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")
    ] = ()
    """Data sets: cifar10, cifar100, tiny-imagenet, fashion-mnist, dress-coat. All when left out (not for fetch)."""
    data: MaybePath = None
    """Where they are, or where fetch puts them; by default $WIDEFLAT_DATA, then the usual folders."""
    json: bool = False
    """As JSON."""

    def run(self) -> int:
        """Do what was asked for."""
        with usage():
            names = [specification(name).name for name in self.names] or list(CATALOGUE)
        if self.action != "fetch" and self.data is not None and not self.data.is_dir():
            own = str(self.data).startswith(("folder:", "npz:"))
            raise UsageError(
                f"{self.data} is data of your own: nothing was published to compare it with"
                if own
                else f"--data: there is no folder {self.data}"
            )
        if self.action == "fetch":
            if not self.names:
                raise UsageError(f"say which data sets to fetch: {', '.join(CATALOGUE)}")
            return self._fetch(names)
        return self._list(names) if self.action == "list" else self._verify(names)

    def _list(self, names: list[str]) -> int:
        rows: list[dict[str, Any]] = []
        for name in names:
            data = specification(name)
            try:
                place: str | None = str(find(name, self.data))
            except DataError:
                place = None
            size = sum(file.size or 0 for file in data.downloads)
            rows.append({"name": name, "title": data.title, "found": place, "download_bytes": size})
        folders = list(map(str, search_folders(self.data)))
        if self.json:
            answer({"data": rows, "looked_in": folders})
            return 0
        table = [
            (
                row["name"],
                "embedded" if isinstance(specification(row["name"]), DressCoat) else row["found"] or "not found",
                _megabytes(row["download_bytes"]),
            )
            for row in rows
        ]
        print_table(("data set", "where", "download"), table, styles=STYLES)
        print(f"\nlooked in: {', '.join(folders)}")
        missing = [row["name"] for row in rows if row["found"] is None]
        if missing:
            print(f"to download what is missing: wideflat data fetch {' '.join(missing)}")
        return 0

    def _verify(self, names: list[str]) -> int:
        rows = self._reports(names)
        bad = [row for row in rows if row["status"] != "ok"]
        if self.json:
            answer({"files": rows, "ok": not bad})
        else:
            table = [(row["data"], row["path"], row["status"]) for row in rows]
            print_table(("data set", "file", "status"), table, styles=STYLES)
            self._explain(bad)
        return 1 if bad else 0

    def _reports(self, names: list[str]) -> list[dict[str, Any]]:
        """One row a file."""
        rows: list[dict[str, Any]] = []
        for name in names:
            try:
                reports = check(name, self.data)
            except DataError as error:
                if self.names:  # asked for by name: that it is not there is a failure
                    rows.append({"data": name, "path": "", "status": "missing", "expected": "", "actual": str(error)})
                continue
            rows += [{"data": name, **dataclasses.asdict(report)} for report in reports]
        return rows

    def _explain(self, bad: list[dict[str, Any]]) -> None:
        """What is wrong about files, and how to mend it."""
        for row in bad:
            if not row["path"]:
                print(f"\n{row['actual']}")
                continue
            print(f"\n{row['path']} is {row['status']}: expected {row['expected']}, got {row['actual']}")
            if row["status"] == "altered":
                print("  not the published content; --allow-altered uses it knowingly")
        mend = list(dict.fromkeys(row["data"] for row in bad))
        if mend:
            where = f" --data {self.data}" if self.data is not None else ""
            print(f"\nto mend: wideflat data fetch {' '.join(mend)}{where}")

    def _fetch(self, names: list[str]) -> int:
        done: dict[str, str] = {}
        for name in names:
            if not self.json:
                print(f"fetching {specification(name).title} ...", file=sys.stderr)
            done[name] = str(fetch(name, self.data, progress=not self.json))
            if not self.json:
                print(f"{name}: {done[name]}")
        if self.json:
            answer({"fetched": done})
        return 0


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size else ""
