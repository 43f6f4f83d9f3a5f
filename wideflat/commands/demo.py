"""``wideflat demo``: the main job on embedded data, from training to a report, in two minutes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wideflat.commands import UsageError
from wideflat.commands.answers import answer
from wideflat.experiments.demo import ONE_LINE, Demo
from wideflat.experiments.experiment import Comparison

__all__ = ["Command"]

INTRODUCTION = """\
A deep network and a committee machine learn to tell images of dresses and coats apart, by SGD and by entropic
algorithms. Around every solution it is measured how flat the minimum is.
"""

WORDS = """\
δE: points of training error that noise on the weights adds; lower is flatter.
log Z (free entropy), Φ (local entropy): how much room; higher is wider."""

NEXT = f"""\
With your own network, one line changes; then ask how flat its minimum is:
  import torch, wideflat
  {ONE_LINE["Entropy-SGD"]}
  profile = wideflat.local_energy(model, (inputs, targets), [0, 0.1, 0.3, 0.5])
The README goes on from here; `wideflat reproduce fig1` computes a whole figure,
`wideflat --help` lists the rest."""


@dataclass
class Command:
    """The main job on embedded data: train a deep network and a committee machine, measure flatness, write a report.

    It takes about two minutes on two cores. Ctrl-C leaves a report of what is done; the same command goes on from
    there.

    Examples:
        wideflat demo
        wideflat demo --seeds 10 --out my-demo
    """

    out: Path = Path("demo")
    """Where the tables, figures and the report go."""
    seeds: int = 3
    """Trainings of the deep network by each optimizer."""
    restarts: int = 3
    """Trainings of the committee machine in each setting."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Train, measure, print tables, write the report; the finding is the last line."""
        for name, value in (("--seeds", self.seeds), ("--restarts", self.restarts)):
            if value < 1:
                raise UsageError(f"{name} must be >= 1, got {value}")
        quiet = self.json
        demo = Demo(self.out, self.seeds, self.restarts, say=(lambda _: None) if quiet else _say)
        if not quiet:
            _say(INTRODUCTION)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so small networks lose more by sharing out their work than they gain
        try:
            demo.compute()
        finally:  # also after Ctrl-C: a report of what is done
            torch.set_num_threads(threads)
            if len(demo.networks):
                self._print(demo, demo.write_report())
        return 0

    def _print(self, demo: Demo, page: Path) -> None:
        finding, about = demo.finding()
        if self.json:
            record: dict[str, Any] = {"finding": finding, "about": about, "networks": list(demo.networks)}
            if demo.has_committee:
                record["committee"] = demo.committee.record(page)
            answer({**record, "report": page})
            return
        print()
        Comparison(*demo.rows()).print("The deep network: mean ± standard deviation over n trainings")
        if demo.has_committee:
            print()
            Comparison(*demo.committee_rows()).print("The committee machine, in the same way")
        print(f"\n{WORDS}\n\n{NEXT}\n\nreport: {page.resolve()}\n")
        _say(about)
        print()
        _say(finding)


def _say(text: str) -> None:
    """Print text of one paragraph or more, 80 wide."""
    for paragraph in text.strip().split("\n\n"):
        print(textwrap.fill(" ".join(paragraph.split()), 80))
