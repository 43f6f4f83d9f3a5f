"""``wideflat local-energy``: how fast the training error grows around the weights of a trained network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import nn

from wideflat.checks import real_tensor
from wideflat.commands import UsageError
from wideflat.commands.answers import answer
from wideflat.commands.comparisons import Compared, compared
from wideflat.commands.given import from_checkpoint, named_function, run_at
from wideflat.commands.results import result_file
from wideflat.energy.committees import committee_profile
from wideflat.energy.measure import local_energy
from wideflat.energy.profile import Interrupted, LocalEnergy
from wideflat.energy.request import SIGMAS
from wideflat.energy.series import layer_profiles
from wideflat.experiments.options import (
    Device,
    MaybeFloat,
    MaybeFloats,
    MaybeInt,
    MaybePath,
    MaybeText,
    Parameters,
    Paths,
)
from wideflat.files import naming, read_npz
from wideflat.training.flatness import images_of_run, measurable

__all__ = ["Command"]


@dataclass
class Command:
    """How fast the training error grows around the weights of a trained network, with error bars (Eq. 4).

    PATH is a run of `wideflat train` (also one of the committee machine, whose profile is exact), or any checkpoint
    (.safetensors, or what torch.save wrote of a state_dict) together with --build, a function of yours that returns the
    model and its training data: (model, data), data being (inputs, targets) or a DataLoader. Ctrl-C keeps what was
    measured.

    Examples:
      wideflat local-energy runs/cifar10-smallconvnet-sgd-seed0
      wideflat local-energy runs/mine --epoch 40 --sigmas 0.1 0.2 0.3 --target-stderr 0.002
      wideflat local-energy weights.pt --build my_project.nets:build --noise example
      wideflat local-energy runs/own-network --build my_project.nets:network
      wideflat local-energy runs/a --compare runs/b/local_energy.json
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A run directory, a checkpoint (with --build), or an .npz file with weights, inputs and targets of committees."""
    build: MaybeText = None
    """module:function, imported and called: (model, data) for a checkpoint, the model for a run of your own network."""
    sigmas: MaybeFloats = None
    """Strengths of the noise; 0, 0.05, ..., 0.5 when left out."""
    noise: Literal["auto", "batch", "example", "pass"] = "auto"
    """What shares one draw of the noise; auto: example where layers allow it, else batch. Only pass has a spread."""
    metric: Literal["error", "loss"] = "error"
    """What is measured."""
    batch_norm: Literal["eval", "recalibrate", "batch"] = "eval"
    """Statistics that the perturbed network normalises with: its running ones, recomputed ones, those of each batch."""
    parameters: Parameters = "all"
    """all, "no batch norm", "no biases", weights, trainable, or a regular expression for the names of the perturbed."""
    scale: Literal["relative", "absolute", "layer", "filter"] = "relative"
    """What the noise on a weight is proportional to: its size (Eq. 4), nothing, the RMS of its tensor or channel."""
    layers: bool = False
    """One profile for each layer, with noise on that layer alone."""
    target_stderr: MaybeFloat = None
    """Stop at each sigma when its standard error is below this."""
    max_passes: MaybeFloat = None
    """Most passes over the data; may be a fraction. When left out 2, and up to 64 where the data are small."""
    epoch: MaybeInt = None
    """Of a run: the snapshot at this epoch instead of the final network."""
    augment: bool = True
    """Of a run: use the augmentation of its training, as the paper does."""
    data: MaybePath = None
    """Of a run: folder with the data set; by default where the run found it."""
    batch_size: MaybeInt = None
    """Examples that share the noise; chosen when left out."""
    device: Device = "cpu"
    """Where to compute."""
    seed: int = 0
    """Of the noise."""
    out: MaybePath = None
    """Result file; local_energy.json in the run, or beside the checkpoint, when left out."""
    overwrite: bool = False
    """Replace a result that is there already; otherwise it stays, and the new one gets a number."""
    figure: MaybePath = None
    """Also draw the curve to this file (.png, .pdf, .svg)."""
    compare: Paths = ()
    """Profiles measured before: print the difference to each, if they are comparable."""
    force: bool = False
    """Compare even profiles of different conventions or training errors."""
    json: bool = False
    """Print JSON instead of the table."""

    def run(self) -> int:
        """Measure, print, write; 1 if a comparison is refused, 130 after Ctrl-C."""
        sigmas = self.sigmas or SIGMAS
        others = [LocalEnergy.load(path) for path in self.compare]  # a missing file is found before the work, not after
        out = self.out or self._default_out()
        if not self.layers:
            out = result_file(self.out, self._default_out(), self.overwrite)
        profiles, code = self._profiles(sigmas)
        for layer, profile in profiles.items():
            named = out.with_name(f"{out.stem}-{layer}{out.suffix}")
            profile.save(result_file(None, named, self.overwrite) if layer else out)
        if self.figure is not None:
            _draw(profiles, self.figure)
        beside = list(compared(profiles[""], self.compare, others, self.force)) if "" in profiles else []
        self._print(profiles, out, beside)
        return code or (1 if any(each.refused for each in beside) else 0)

    def _print(self, profiles: dict[str, LocalEnergy], out: Path, beside: Sequence[Compared]) -> None:
        if self.json:
            record: dict[str, Any] = {name or "all": profile.to_dict() for name, profile in profiles.items()}
            answer(record | ({"compared": [each.record() for each in beside]} if beside else {}))
            return
        for layer, profile in profiles.items():
            print((f"{layer}\n" if layer else "") + str(profile))
        print(f"result: {out}" if "" in profiles else f"results: {out.with_name(f'{out.stem}-LAYER{out.suffix}')}")
        if self.figure is not None:
            print(f"figure: {self.figure}")
        for each in beside:
            print(each)

    def _profiles(self, sigmas: tuple[float, ...]) -> tuple[dict[str, LocalEnergy], int]:
        """The profiles by layer ("" for all of the network), and the exit code."""
        solutions = self.path / "solutions.npz" if self.path.is_dir() else self.path
        if solutions.suffix == ".npz" and solutions.exists():
            if self.scale != "relative":
                raise UsageError(f"committee machines are measured with relative noise, got --scale {self.scale}")
            return {"": _committees_in(solutions, sigmas)}, 0
        model, data, options = self._from_run() if self.build is None or self.path.is_dir() else self._from_checkpoint()
        options |= {
            "noise": self.noise,
            "metric": self.metric,
            "batch_norm": self.batch_norm,
            "scale": self.scale,
            "target_stderr": self.target_stderr,
            "max_passes": self.max_passes,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
        if self.layers:
            return layer_profiles(model, data, sigmas, **options), 0
        try:
            return {"": local_energy(model, data, sigmas, parameters=self.parameters, **options)}, 0
        except Interrupted as interrupted:
            if interrupted.profile is None:
                raise
            print("wideflat: interrupted; this is what was measured until then", file=sys.stderr)
            return {"": interrupted.profile}, 130

    def _default_out(self) -> Path:
        if self.path.is_dir():
            name = "local_energy.json" if self.epoch is None else f"local_energy-{self.epoch:04d}.json"
            return self.path / name
        return self.path.with_name(f"{self.path.stem}.local_energy.json")

    def _from_run(self) -> tuple[nn.Module, Any, dict[str, Any]]:
        run = run_at(self.path)
        build = None if self.build is None else named_function(self.build)
        images = images_of_run(run, self.data)
        return measurable(run, images, self.epoch, self.device, augment=self.augment, build=build)

    def _from_checkpoint(self) -> tuple[nn.Module, Any, dict[str, Any]]:
        assert self.build is not None
        return from_checkpoint(self.build, self.path, self.device, "wideflat.local_energy")


def _committees_in(path: Path, sigmas: tuple[float, ...]) -> LocalEnergy:
    """The exact profile of the committee machines in an .npz file: mean over solutions, with its standard error."""
    arrays = read_npz(path, "weights", "inputs", "targets")
    with naming(path):
        weights, inputs, targets = (real_tensor(name, arrays[name]) for name in ("weights", "inputs", "targets"))
        return committee_profile(weights, inputs, targets, sigmas)


def _draw(profiles: dict[str, LocalEnergy], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots()
    for layer, profile in profiles.items():
        profile.plot(ax, label=layer or None)
    first = next(iter(profiles.values()))
    ax.set_title(f"{first.about()}\nE(w) = {first.baseline:.4g}", fontsize="small", wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
