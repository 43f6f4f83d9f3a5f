"""``wideflat report``: one self-contained HTML page from runs, experiments and measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from wideflat.commands.answers import answer
from wideflat.commands.findings import collect, print_summary, record, write_report

__all__ = ["Command"]


@dataclass
class Command:
    """One self-contained HTML page from runs, experiments and measurements.

    Looks through the given folders for run directories, results of `wideflat reproduce`, saved local-energy,
    local-entropy and free-entropy results and committee solutions. The page works offline and holds everything it
    shows.

    Examples:
      wideflat report runs
      wideflat report runs/a runs/b reproduction/fig1 --out comparison.html --title "Before and after"
    """

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH ...")] = (Path("runs"),)
    """Run directories, result files, or folders of them."""
    out: Path = Path("report.html")
    """The page to write."""
    title: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "wideflat report"
    """Its heading."""
    json: bool = False
    """Print the summary as JSON."""

    def run(self) -> int:
        """Write the page and print its summary."""
        found = collect(self.paths)
        write_report(found, self.out, self.title)
        if self.json:
            answer(record(found, self.out))
            return 0
        print_summary(found)
        for name, reason in found.unread.items():
            print(f"not read: {name}: {reason}")
        print(f"report: {self.out.resolve()}")
        return 0
