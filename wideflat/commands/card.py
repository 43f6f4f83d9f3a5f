"""``wideflat card``: everything one asks of a minimum, measured in one call, on one page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import nn

from wideflat.cards.card import Card
from wideflat.cards.measuring import Interrupted, card, compare_with
from wideflat.commands import UsageError
from wideflat.commands.answers import answer
from wideflat.commands.given import from_checkpoint, named_function, run_at
from wideflat.commands.results import result_file
from wideflat.experiments.options import Device, MaybeFloat, MaybeInt, MaybePath, MaybeText
from wideflat.training.flatness import images_of_run, plain_images

__all__ = ["Command"]


@dataclass
class Command:
    """Everything one asks of a minimum, with error bars, on one page: noise, layers, rounding, worst case, spectrum.

    PATH is a run of `wideflat train`, or any checkpoint (.safetensors, or what torch.save wrote of a state_dict)
    together with --build, a function of yours that returns the model and its training data: (model, data), data being
    (inputs, targets), a data set or a DataLoader without random augmentation. A page (.html, needs nothing but itself)
    and a file of numbers (.json) are written. Ctrl-C or SIGTERM: the same, of what was measured until then. A measure
    that the network does not allow is left out with its reason.

    Examples:
      wideflat card runs/cifar10-smallconvnet-sgd-seed0
      wideflat card runs/a --minutes 5 --against runs/b/card.json
      wideflat card weights.pt --build my_project.nets:build --quick
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A run directory, or a checkpoint (with --build)."""
    build: MaybeText = None
    """module:function, imported and called: (model, data[, options of wideflat.card]); of a run the model alone."""
    quick: bool = False
    """Fewer examples, points and steps: about a quarter of the time."""
    minutes: MaybeFloat = None
    """Time to spend; what is left after all measures goes to those whose error bars are largest."""
    against: MaybePath = None
    """Another card (.json or .html): say how this one compares."""
    examples: MaybeInt = None
    """Examples of the dear measures (the others see up to four times as many); by the network's cost when left out."""
    title: Annotated[str, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = ""
    """What to call it; the name of the run or file when left out."""
    epoch: MaybeInt = None
    """Of a run: the snapshot at this epoch instead of the final network."""
    data: MaybePath = None
    """Of a run: folder with the data set; by default where the run found it."""
    device: Device = "cpu"
    """Where to compute."""
    seed: int = 0
    """Of everything random."""
    out: MaybePath = None
    """The page, with a .json of the numbers beside it; card.html in the run or beside the checkpoint when left out."""
    overwrite: bool = False
    """Replace a card that is there already."""
    json: bool = False
    """Print the numbers as JSON instead of the text."""

    def run(self) -> int:
        """Measure, write, print; 1 if a comparison is refused, 130 after Ctrl-C or SIGTERM."""
        other = None if self.against is None else Card.load(self.against)  # a missing file is found before the work
        if self.out is not None and self.out.suffix.lower() != ".html":
            raise UsageError(f"--out must be a page, NAME.html, got {self.out}")
        out = result_file(self.out, self._default_out(), self.overwrite)
        result_file(out.with_suffix(".json"), out, self.overwrite)
        model, data, options = self._from_run() if self.build is None or self.path.is_dir() else self._from_checkpoint()
        settings: dict[str, Any] = {
            "title": self.title or self.path.resolve().name, "quick": self.quick, "minutes": self.minutes,
            "examples": self.examples, "seed": self.seed,
        }  # fmt: skip
        code = 0
        try:
            found = card(model, data, **{**settings, **options})
        except Interrupted as interrupted:
            found, code = interrupted.card, 130
            missing = ", ".join(found.refused)
            print(f"wideflat: interrupted; what was measured until then is written, without {missing}", file=sys.stderr)
        if other is not None and not compare_with(found, other):
            code = code or 1
        found.save(out.with_suffix(".json"))  # at once: a page takes seconds to draw, and may be interrupted too
        found.save(out)
        if self.json:
            answer(found.to_dict())
        else:
            print(found)
            print(f"page: {out}\nnumbers: {out.with_suffix('.json')}")
        return code

    def _default_out(self) -> Path:
        if self.path.is_dir():
            return self.path / ("card.html" if self.epoch is None else f"card-{self.epoch:04d}.html")
        return self.path.with_name(f"{self.path.stem}.card.html")

    def _from_run(self) -> tuple[nn.Module, Any, dict[str, Any]]:
        """The network of a run and its training images, without random augmentation."""
        run = run_at(
            self.path,
            "which have no gradient: `wideflat local-energy` and `wideflat local-entropy` measure these",
        )
        inputs, targets = plain_images(run, images_of_run(run, self.data))
        build = None if self.build is None else named_function(self.build)
        data = inputs.to(self.device), targets.to(self.device)
        return run.load_model(self.epoch, self.device, build=build), data, {}

    def _from_checkpoint(self) -> tuple[nn.Module, Any, dict[str, Any]]:
        assert self.build is not None
        return from_checkpoint(self.build, self.path, self.device, "wideflat.card")
