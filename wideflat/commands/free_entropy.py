"""``wideflat free-entropy``: the volume of good weights around those of a trained network, with a stated error."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import nn

from wideflat.commands.answers import answer
from wideflat.commands.comparisons import Compared, compared
from wideflat.commands.given import from_checkpoint, named_function, run_at
from wideflat.commands.results import result_file
from wideflat.experiments.options import Device, MaybeFloat, MaybeInt, MaybePath, MaybeText, Parameters, Paths
from wideflat.files import atomic_write
from wideflat.report.terminal import on_screen, stacked
from wideflat.training.flatness import images_of_run, plain_images
from wideflat.volume.free_entropy import Interrupted, free_entropy
from wideflat.volume.volumes import FreeEntropy

__all__ = ["Command"]


@dataclass
class Command:
    """The volume of good weights around those of a trained network: log Z with a stated error, or a refusal.

    PATH is a run of `wideflat train`, or any checkpoint (.safetensors, or what torch.save wrote of a state_dict)
    together with --build, a function of yours that returns the model and its training data: (model, data), data being
    (inputs, targets), a data set or a DataLoader without random augmentation. The price grows with the power 1.5 of the
    examples: a random subset, the same for all networks that are compared, is a measure of its own. Ctrl-C keeps what
    was walked; the same command goes on from there.

    Examples:
      wideflat free-entropy runs/cifar10-smallconvnet-sgd-seed0
      wideflat free-entropy runs/mine --sigmas 0.3 0.5 --subset 1000 --minutes 30
      wideflat free-entropy weights.pt --build my_project.nets:build --measure error
      wideflat free-entropy runs/a --compare runs/b/free_entropy.json
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A run directory, or a checkpoint (with --build)."""
    build: MaybeText = None
    """module:function, imported and called: (model, data) for a checkpoint, the model for a run of your own network."""
    sigmas: Annotated[tuple[float, ...], tyro.conf.arg(metavar="FLOAT ...")] = (0.3, 0.5)
    """Strengths of the noise."""
    measure: Literal["loss", "error"] = "loss"
    """loss: the evidence of the posterior; error: the probability that every example is right."""
    beta: float = 1.0
    """Inverse temperature of the sum of losses; 1 is the posterior."""
    scale: Literal["relative", "absolute", "layer", "filter"] = "relative"
    """What the noise is proportional to: each weight, nothing, the root mean square of its tensor or output channel."""
    parameters: Parameters = "all"
    """all, "no batch norm", "no biases", weights, trainable, or a regular expression for the names that move."""
    subset: MaybeInt = None
    """So many examples, drawn at random; 1000 (or all, if there are fewer) of a run, all of a checkpoint's data."""
    chains: int = 2
    """In each of the two directions."""
    samples: int = 18
    """Trajectories kept at each temperature."""
    burn: int = 12
    """Trajectories before these."""
    target_stderr: MaybeFloat = None
    """Go on until the standard error is below this."""
    quick: bool = False
    """Only the two bounds between which log Z lies, at a tenth of the cost."""
    on_errors: Literal["refuse", "drop"] = "refuse"
    """With --measure error: what to do if the network itself gets examples wrong."""
    minutes: MaybeFloat = None
    """Stop after so long; the same command goes on from there."""
    epoch: MaybeInt = None
    """Of a run: the snapshot at this epoch instead of the final network."""
    data: MaybePath = None
    """Of a run: folder with the data set; by default where the run found it."""
    device: Device = "cpu"
    """Where to compute."""
    seed: int = 0
    """Of everything random but the subset."""
    out: MaybePath = None
    """Result file; free_entropy.json in the run, or beside the checkpoint, when left out."""
    overwrite: bool = False
    """Replace a result that is there already; otherwise it stays, and the new one gets a number."""
    figure: MaybePath = None
    """Also draw lambda over beta to this file (.png, .pdf, .svg)."""
    compare: Paths = ()
    """Results of other networks: print the difference to each, if they are comparable."""
    force: bool = False
    """Compare even results of different conventions, or that did not converge."""
    json: bool = False
    """Print JSON instead of the table."""

    def run(self) -> int:
        """Measure, print, write; 1 if a value did not converge, the time was over or a comparison is refused."""
        others = [FreeEntropy.load(path) for path in self.compare]  # a missing file is found before the work, not after
        out = result_file(self.out, self._default_out(), self.overwrite, lambda path: _unfinished(path).exists())
        unfinished = _unfinished(out)
        model, data, options = self._from_run() if self.build is None or self.path.is_dir() else self._from_checkpoint()
        found, code = self._measure(model, data, options, unfinished)
        if found.points:
            found.save(out)
        if found.complete:
            unfinished.unlink(missing_ok=True)
        if self.figure is not None:
            _draw(found, self.figure)
        beside = list(compared(found, self.compare, others, self.force))
        self._print(found, out, beside)
        if not found.complete:
            print(f"wideflat: not finished; the same command goes on from {unfinished}", file=sys.stderr)
        good = found.complete and (self.quick or bool(found.converged.all())) and not any(e.refused for e in beside)
        return code or (0 if good else 1)

    def _print(self, found: FreeEntropy, out: Path, beside: Sequence[Compared]) -> None:
        if self.json:
            answer(found.to_dict() | ({"compared": [each.record() for each in beside]} if beside else {}))
            return
        header, rows = found.table()
        text = str(found).split("\n")
        if sys.stdout.isatty() and len(text[0]) > shutil.get_terminal_size().columns:
            text = [*stacked(header, rows), *found.notes()]
        print(on_screen(text))
        for line in drawn(found):
            print(line)
        if found.points:
            print(f"result: {out}")
        if self.figure is not None:
            print(f"figure: {self.figure}")
        for each in beside:
            print(each)

    def _measure(
        self, model: nn.Module, data: Any, options: dict[str, Any], checkpoint: Path
    ) -> tuple[FreeEntropy, int]:
        names = ("measure", "beta", "scale", "parameters", "chains", "samples", "seed", "target_stderr", "quick")
        options = {name: getattr(self, name) for name in (*names, "burn", "on_errors", "minutes")} | options
        try:
            return free_entropy(model, data, self.sigmas, checkpoint=checkpoint, **options), 0
        except Interrupted as interrupted:
            if interrupted.result is None:
                print(f"wideflat: the same command goes on from {checkpoint}", file=sys.stderr)
                raise
            print("wideflat: interrupted; these are the sigmas that were finished", file=sys.stderr)
            return interrupted.result, 130

    def _default_out(self) -> Path:
        if self.path.is_dir():
            name = "free_entropy.json" if self.epoch is None else f"free_entropy-{self.epoch:04d}.json"
            return self.path / name
        return self.path.with_name(f"{self.path.stem}.free_entropy.json")

    def _from_run(self) -> tuple[nn.Module, Any, dict[str, Any]]:
        """The network of a run and its training images, without random augmentation."""
        run = run_at(self.path, "whose outputs are signs without a gradient; `wideflat local-entropy` measures these")
        inputs, targets = plain_images(run, images_of_run(run, self.data))
        subset = min(len(inputs), self.subset or 1000)
        build = None if self.build is None else named_function(self.build)
        return run.load_model(self.epoch, self.device, build=build), (inputs, targets), {"subset": subset}

    def _from_checkpoint(self) -> tuple[nn.Module, Any, dict[str, Any]]:
        assert self.build is not None
        model, data, options = from_checkpoint(self.build, self.path, self.device, "wideflat.free_entropy")
        return model, data, {"subset": self.subset, **options}


def drawn(found: FreeEntropy, width: int = 40) -> list[str]:
    """Lambda over beta in the terminal: a line a temperature; minus the area under it is log Z."""
    lines = []
    for point in found.points:
        longest = max((abs(value) for value in point.llc if math.isfinite(value)), default=0.0) or 1.0
        lines.append(f"lambda(beta) = beta <V> at sigma = {point.sigma:g}:")
        for beta, value, error in zip(point.betas, point.llc, point.llc_stderr, strict=True):
            length = round(width * abs(value) / longest) if math.isfinite(value) else 0
            bar = ("#" if value >= 0 else "-") * length  # below zero: better weights lie around
            lines.append(f"{beta:>10.3g} {value:>9.3g} ± {error:<7.1g} {bar}".rstrip())
    return lines


def _unfinished(out: Path) -> Path:
    """Where a measurement that was interrupted is kept."""
    return out.with_suffix(".unfinished.pt")


def _draw(found: FreeEntropy, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(layout="constrained")
    found.plot(ax)
    ax.set_title(found.about(), fontsize="small", wrap=True)
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format=path.suffix.lower().removeprefix(".") or "png", dpi=150)
    plt.close(figure)
