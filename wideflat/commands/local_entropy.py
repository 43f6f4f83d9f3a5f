"""``wideflat local-entropy``: the volume of good solutions around the solutions of a committee machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from wideflat.checks import real_tensor
from wideflat.commands import UsageError
from wideflat.commands.answers import answer
from wideflat.commands.results import result_file
from wideflat.entropy import METHODS, LocalEntropy
from wideflat.entropy.measure import Interrupted, local_entropy
from wideflat.experiments.options import MaybeFloats, MaybeInt, MaybePath, Method
from wideflat.files import atomic_write, missing, naming, read_npz
from wideflat.report.terminal import aligned

__all__ = ["Command", "read_solutions"]


@dataclass
class Command:
    """The volume of good solutions around a solution of a committee machine.

    Reads the solutions of `wideflat train committee-...` (a run directory, or its solutions.npz), or any .npz file with
    arrays weights (H, N) or (references, H, N), inputs (patterns, N) and targets (patterns,) of +1 and -1. Prints the
    normalised local entropy Phi over the distance d/D, and writes it to a file that `wideflat report` can show. Ctrl-C
    keeps the points that were finished, in a file of its own (.interrupted.npz).

    Examples:
      wideflat local-entropy runs/committee-sgd-fast-seed0
      wideflat local-entropy solutions.npz --method ep --figure curve.png
      wideflat local-entropy solutions.npz --deltas 0.1 1 3 --first 1 --compare
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A run directory with solutions.npz, or an .npz file."""
    method: Method = "bp"
    """Belief Propagation, TAP, expectation propagation (better where patterns overlap) or sampling (the judge)."""
    deltas: MaybeFloats = None
    """Variances of the Gaussian around a solution (d/D is near half of each); 13 from 0.01 to 3 when left out."""
    compare: bool = False
    """Run all methods, and print log Z of each side by side."""
    on_errors: Literal["keep", "drop"] = "keep"
    """What to do about patterns that a solution gets wrong: count them as constraints, or not (which flatters it)."""
    first: MaybeInt = None
    """Only the first so many solutions of the file."""
    particles: int = 256
    """Sampler: particles of a run."""
    runs: int = 6
    """Sampler: independent runs, whose scatter is the error."""
    sweeps: int = 30
    """Sampler: moves of each particle at each level."""
    seed: int = 0
    """Sampler: seed."""
    out: MaybePath = None
    """Result file; local_entropy.npz beside the solutions when left out."""
    overwrite: bool = False
    """Replace a result that is there already; otherwise it stays, and the new one gets a number."""
    figure: MaybePath = None
    """Also draw the curves to this file (.png, .pdf, .svg)."""
    json: bool = False
    """Print JSON instead of the table."""

    def run(self) -> int:
        """Compute, print, write; 1 if some points did not converge, 130 after Ctrl-C."""
        if self.first is not None and self.first < 1:
            raise UsageError(f"--first must be at least 1, got {self.first}")
        source = self.path / "solutions.npz" if self.path.is_dir() else self.path
        weights, inputs, targets = read_solutions(source)
        if self.first is not None and weights.dim() == 3:
            weights = weights[: self.first]
        out = result_file(self.out, source.with_name("local_entropy.npz"), self.overwrite)
        with naming(source):
            curve, code = self._compute(weights, inputs, targets)
        if code:  # a whole result that is there already stays
            out = out.with_suffix(".interrupted.npz")
        curve.save(out)
        if self.figure is not None:
            _draw(curve, self.figure)
        if self.json:
            answer(_record(curve, source, out))
        else:
            _print(curve, source)
            print(f"result: {out}")
            if self.figure is not None:
                print(f"figure: {self.figure}")
        missing = sum(int((c.status == "not converged").sum()) for c in (curve, *curve.others.values()))
        if missing:
            print(f"wideflat: {missing} points did not converge; they are marked and not drawn", file=sys.stderr)
        return code or (1 if missing else 0)

    def _compute(self, weights: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[LocalEntropy, int]:
        """The curve and 0, or what was finished of it and 130."""
        try:
            curve = local_entropy(
                weights,
                inputs,
                targets,
                deltas=self.deltas,
                method=self.method,
                compare=self.compare,
                on_errors=self.on_errors,
                particles=self.particles,
                runs=self.runs,
                sweeps=self.sweeps,
                seed=self.seed,
                progress=True,
            )
        except Interrupted as interrupted:
            if interrupted.curve is None:
                raise
            print("wideflat: interrupted; these are the points that were finished", file=sys.stderr)
            return interrupted.curve, 130
        return curve, 0


def read_solutions(path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, inputs and targets of an .npz file. Nothing in it is executed."""
    try:
        arrays = read_npz(path, "weights", "inputs", "targets")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{missing(path)}; expected a run directory of `wideflat train committee-...` or an .npz file"
        ) from None
    with naming(path):
        weights, inputs, targets = (real_tensor(name, arrays[name]) for name in ("weights", "inputs", "targets"))
        return weights, inputs, targets


def _print(curve: LocalEntropy, source: Path) -> None:
    references = curve.training_errors.numel()
    errors = curve.training_errors.reshape(-1)
    print(f"{source}: {references} solution{'s' * (references != 1)}, D = {curve.num_weights} weights")
    wrong = int((errors > 0).sum())
    if wrong:
        done = "were counted as constraints all the same" if curve.on_errors == "keep" else "were dropped"
        print(f"{wrong} of them have training errors (up to {int(errors.max())}); the patterns concerned {done}")
    print(f"{METHODS[curve.method]}{' (mean over solutions)' if references > 1 else ''}:")
    print(curve)
    if curve.others:
        everything = {curve.method: curve, **curve.others}
        order = [name for name in METHODS if name in everything]
        print("\nlog Z by method" + (" (mean over solutions)" if references > 1 else "") + ":")
        rows = [
            [f"{delta:.4g}", *(_cell(everything[name], k) for name in order)]
            for k, delta in enumerate(curve.deltas.tolist())
        ]
        print("\n".join(aligned([["Delta", *order], *rows], right=True)))


def _cell(curve: LocalEntropy, k: int) -> str:
    good = curve.converged.reshape(-1, len(curve.deltas))[:, k]
    if not good.any():
        return str(max(curve.status.reshape(good.shape[0], -1)[:, k]))
    log_z = curve.log_z.reshape(len(good), -1)[good, k]
    if curve.method != "sample":
        return f"{log_z.mean():.4f}"
    error = curve.log_z_stderr.reshape(len(good), -1)[good, k].square().sum().sqrt() / len(log_z)
    return f"{log_z.mean():.3f} +- {error:.3f}"


def _record(curve: LocalEntropy, source: Path, out: Path) -> dict[str, Any]:
    record: dict[str, Any] = {
        "source": source,
        "result": out,
        "method": curve.method,
        "num_weights": curve.num_weights,
        "training_errors": curve.training_errors,
        "on_errors": curve.on_errors,
        "deltas": curve.deltas,
    }
    for name in ("relative_distance", "distance", "phi", "log_z", "phi_stderr", "log_z_stderr", "residual"):
        record[name] = getattr(curve, name)
    record["iterations"], record["status"] = curve.iterations, curve.status
    if curve.others:
        record["others"] = {name: _record(other, source, out) for name, other in curve.others.items()}
    return record


def _draw(curve: LocalEntropy, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    suffix = path.suffix.lower().removeprefix(".") or "png"
    figure, ax = plt.subplots(figsize=(5, 3.5), layout="constrained")
    try:
        known = figure.canvas.get_supported_filetypes()
        if suffix not in known:
            raise ValueError(f"a figure cannot be written as .{suffix}; one of {', '.join(sorted(known))} is possible")
        for one in (curve, *curve.others.values()):
            one.plot(ax, label=METHODS[one.method])
        if curve.others:
            ax.legend(frameon=False)
        with atomic_write(path, "wb") as file:
            figure.savefig(file, format=suffix, dpi=150)
    finally:
        plt.close(figure)
