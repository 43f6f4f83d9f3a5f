"""``wideflat train``: a row of Table 1 or a setting of the committee machine, with any of the algorithms."""

from __future__ import annotations

import dataclasses
import json as json_module
import math
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from wideflat.commands import UsageError, usage
from wideflat.presets import PRESETS, Preset, nearest, preset
from wideflat.progress import Progress
from wideflat.training.runs import Run

Algorithm = Literal["sgd", "rsgd", "esgd", "rsgdxy", "lookahead", "easgd", "parle", "sam"]

#: Options that change a hyper-parameter of the preset, and bear its name.
CHANGES = (
    "batch_size",
    "lr",
    "momentum",
    "weight_decay",
    "num_replicas",
    "period",
    "coupling",
    "inner_lr",
    "inner_steps",
    "epsilon",
    "alpha",
    "gamma0",
    "gamma_factor",
    "rho",
    "augmentation",
)


@dataclasses.dataclass
class Command:
    """Train a row of Table 1 with any of the algorithms, or a setting of the committee machine.

    Started again, the same command goes on where it was stopped or killed, and ends with the same weights bit for bit.
    Ctrl-C saves and stops. `wideflat presets` lists the presets.

    Examples:
      wideflat train cifar10-smallconvnet --data DIR
      wideflat train cifar10-smallconvnet --algorithm esgd --epochs 12 --seed 1
      wideflat train cifar10-resnet18 --algorithm rsgd --lr 0.03 --out runs/mine --snapshots 10 40
      wideflat train cifar10-resnet110 --limit-data 256 --epochs 2
      wideflat train committee-sgd-fast --restarts 10
      wideflat train committee-rsgd-fast --set align=true polish_epochs=300
      torchrun --nproc-per-node 3 -m wideflat train cifar10-smallconvnet --algorithm rsgd
      torchrun --nproc-per-node 4 -m wideflat train cifar10-smallconvnet --algorithm rsgd --num-replicas 2
      wideflat train cifar10-smallconvnet --algorithm rsgd --fault-tolerant
    """

    preset: Annotated[str, tyro.conf.Positional]
    """A row of Table 1 (cifar10-smallconvnet, ...) or a setting of Appendix B.1 (committee-sgd-fast, ...)."""
    algorithm: Algorithm = "sgd"
    """rsgdxy is rSGD x y: every replica sees as much data as the baseline. Not for committee-..., which name theirs."""
    seed: int = 0
    """Of everything random."""
    epochs: int | None = None
    """Length of the training; learning rate, gamma and period are rescaled with it."""
    out: Path | None = None
    """The run directory; by default in runs/, named after the preset and what was changed."""
    resume: bool = True
    """Go on where the run stopped. --no-resume refuses a directory that holds a run already."""
    data: Path | None = None
    """Folder with the data set; by default $WIDEFLAT_DATA and the usual caches."""
    allow_altered: bool = False
    """Take data files that are well-formed but not the published ones, such as recompressed copies."""
    limit_data: int | None = None
    """Train and test on at most so many images each."""

    batch_size: int | None = None
    """Images in a mini-batch."""
    lr: float | None = None
    """eta, the initial learning rate (for esgd that of the outer loop)."""
    momentum: float | None = None
    """Momentum."""
    weight_decay: float | None = None
    """Weight decay."""
    num_replicas: int | None = None
    """y, the number of replicas."""
    period: int | None = None
    """K, iterations from one coupling of the replicas to the next."""
    coupling: Literal["gradient", "proximal"] | None = None
    """How replicas attract each other: through the gradients, or by a step of its own, stable for any strength."""
    inner_lr: float | None = None
    """eta', the learning rate of the inner loop."""
    inner_steps: int | None = None
    """L, the steps of the inner loop."""
    epsilon: float | None = None
    """Amplitude of the Langevin noise."""
    alpha: float | None = None
    """Weight of the past in the running mean of the inner loop."""
    gamma0: float | Literal["auto"] | None = None
    """The first gamma, or auto."""
    gamma_factor: float | None = None
    """What gamma grows by over the training."""
    rho: float | None = None
    """Radius of the ball of SAM."""
    augmentation: Literal["none", "standard", "autoaugment", "fast-autoaugment"] | None = None
    """What is done to the training images."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Mixed precision."""
    compile: bool = False
    """Use torch.compile."""
    channels_last: bool = True
    """Memory format of the images and convolutions."""
    evaluate_every: int = 1
    """Epochs between two evaluations on the test set; a run may go on with another number."""
    batch_norm_images: int = 10_000
    """Training images on which the batch norm of the center is refreshed for these; the final model uses all."""
    snapshots: tuple[int, ...] = ()
    """Epochs at whose end the center is kept, for the flatness figures; 0 is before training."""
    checkpoint_minutes: float = 5.0
    """The state is saved after every epoch, and after so many minutes within one."""
    tensorboard: bool = True
    """Write TensorBoard event files."""

    fault_tolerant: bool = False
    """A job for each replica of rsgd; each may be killed and started again. Without --replica all run here."""
    replica: int | None = None
    """With --fault-tolerant: train this replica alone, 0 to y - 1; the others are other jobs."""
    lighthouse: str | None = None
    """With --fault-tolerant: address of torchft_lighthouse, http://HOST:29510; by default $TORCHFT_LIGHTHOUSE."""
    host: str | None = None
    """With --fault-tolerant: name or address under which other machines reach this one."""

    restarts: int = 50
    """Of committee-...: how many, trained together."""
    draw: Literal["balanced", "random"] = "balanced"
    """Of committee-...: how the training patterns are drawn."""
    patterns: int = 500
    """Of committee-...: how many training patterns."""
    set: tuple[str, ...] = ()
    """Of committee-...: changes of the setting as NAME=VALUE, such as align=true dropout=0.3 polish_epochs=300."""
    json: bool = False
    """Print the result as JSON, and nothing else on standard output."""

    def run(self) -> int:
        """Train, and return the exit code: 130 if it was interrupted."""
        if self.preset.startswith("committee-"):
            return self._run_committee()
        if self.set:
            raise UsageError(
                "--set is for the committee machine; the presets of Table 1 have an option for each change"
            )
        if self.preset not in PRESETS:
            from wideflat.commands.presets import committee_settings

            raise UsageError(
                f"there is no preset {self.preset!r}. {nearest(self.preset, [*PRESETS, *committee_settings()])}"
            )
        with usage():
            experiment, changed = self._experiment()
        out = self._out(f"{self.preset}-{self.algorithm}", changed)

        from wideflat import data as data_sets
        from wideflat.training.ranks import on_torchrun, train_on_ranks
        from wideflat.training.training import Interrupted, Options, train

        options = Options(
            seed=self.seed,
            limit_data=self.limit_data,
            amp=self.amp,
            compile=self.compile,
            channels_last=self.channels_last,
            evaluate_every=self.evaluate_every,
            batch_norm_images=self.batch_norm_images,
        )
        if self.fault_tolerant and self.replica is None:
            return self._supervise(experiment.num_replicas, out)
        images = data_sets.load(experiment.dataset, self.data, allow_altered=self.allow_altered)
        if images.altered:
            self._say(f"{len(images.altered)} files of {images.name} are not the published ones (--allow-altered)")
        try:
            if self.fault_tolerant:
                run = self._train_one_replica(experiment, out, images, options)
            elif on_torchrun():
                found = train_on_ranks(experiment, out, images, options, **self._how())
                if found is None:  # not the first rank, which has the run and prints the result
                    return 0
                run = found
            else:
                run = train(experiment, out, images, options, **self._how())
        except Interrupted as interruption:
            print(f"wideflat: {interruption}", file=sys.stderr)
            return 130
        result = run.result() or {}
        if self.json:
            print(json_module.dumps({"run": str(run.path), **result}))
            return 0
        self._print_result(experiment, run.path, result)
        return 0

    def _how(self) -> dict[str, Any]:
        return {
            "device": _device(self.device),
            "snapshots": self.snapshots,
            "checkpoint_minutes": self.checkpoint_minutes,
            "tensorboard": self.tensorboard,
            "say": self._say,
        }

    # ---- replicas that may be killed

    def _train_one_replica(self, experiment: Preset, out: Path, images: Any, options: Any) -> Run:
        from wideflat.training.elastic import train_with_losses

        assert self.replica is not None
        return train_with_losses(
            experiment,
            out,
            images,
            options,
            index=self.replica,
            lighthouse=self.lighthouse,
            host=self.host,
            device=_device(self.device),
            checkpoint_minutes=self.checkpoint_minutes,
            say=lambda message: self._say(f"replica {self.replica}: {message}"),
        )

    def _supervise(self, num_replicas: int, out: Path) -> int:
        """Start a job for each replica on this machine, and again when it dies."""
        from wideflat.training.elastic import supervise

        if self.algorithm not in ("rsgd", "rsgdxy"):
            raise UsageError(f"--fault-tolerant is for rsgd and rsgdxy, not for {self.algorithm}")
        given = [argument for argument in sys.argv[1:] if argument not in ("-q", "--quiet")]

        def command(a: int, lighthouse: str) -> list[str]:
            where = ["--replica", str(a), "--lighthouse", lighthouse, "--out", str(out), "--host", "127.0.0.1"]
            return [sys.executable, "-m", "wideflat", *(["-q"] if a or self.json else []), *given, *where]

        return supervise(command, num_replicas, self.lighthouse, say=self._say)

    # ---- what to train

    def _experiment(self) -> tuple[Preset, dict[str, Any]]:
        """The preset with the changes asked for, and these changes."""
        experiment = preset(self.preset, self.algorithm)
        changed = {name: getattr(self, name) for name in CHANGES if getattr(self, name) is not None}
        if changed.get("gamma0") == "auto":
            changed["gamma0"] = None
        experiment = dataclasses.replace(experiment, **changed)
        if self.epochs is not None:
            if self.epochs < 1:
                raise ValueError(f"--epochs must be >= 1, got {self.epochs}")
            experiment = experiment.with_epochs(self.epochs)
            changed = {"epochs": self.epochs, **changed}
        if self.algorithm in ("sgd", "esgd", "lookahead", "sam") and experiment.num_replicas != 1:
            raise ValueError(
                f"--num-replicas is for rsgd, rsgdxy, easgd and parle; {self.algorithm} trains one network"
            )
        if self.coupling and self.algorithm not in ("rsgd", "rsgdxy"):
            raise ValueError(f"--coupling is for rsgd and rsgdxy, not for {self.algorithm}")
        if self.algorithm in ("sgd", "rsgd", "rsgdxy", "easgd", "sam") and experiment.inner_steps != 1:
            raise ValueError(f"--inner-steps is for esgd, lookahead and parle; {self.algorithm} has no inner loop")
        return experiment, changed

    def _out(self, name: str, changed: dict[str, Any]) -> Path:
        out = self.out
        if out is None:
            if self.limit_data:
                changed = {**changed, "limit_data": self.limit_data}
            parts = [f"{key.replace('_', '-')}{_short(value)}" for key, value in changed.items()]
            out = Path("runs") / "-".join([name, *parts, f"seed{self.seed}"])
        if not self.resume and (out / "config.json").exists():
            raise ValueError(
                f"{out} holds a run already: leave out --no-resume to go on with it, or give another --out"
            )
        return out

    def _say(self, message: str) -> None:
        if not Progress.silent:
            print(message, file=sys.stderr if self.json else sys.stdout, flush=True)

    def _print_result(self, experiment: Preset, path: Path, result: dict[str, Any]) -> None:
        print(f"{path}: test error {100 * result['test_error']:.2f} %, train error {100 * result['train_error']:.2f} %")
        if "ensemble_test_error" in result:
            replicas = ", ".join(f"{100 * error:.2f}" for error in result["replica_test_errors"])
            print(f"  replicas {replicas} %, their ensemble {100 * result['ensemble_test_error']:.2f} %")
        whole = preset(experiment.name, experiment.algorithm)
        if whole.paper_error is not None:
            spread = "" if whole.paper_spread is None else f" ± {whole.paper_spread:g}"
            same = experiment == whole and not self.limit_data
            print(f"  paper: {whole.paper_error:.1f}{spread} %" + ("" if same else " (with the preset's own settings)"))

    # ---- the committee machine

    def _run_committee(self) -> int:
        from wideflat import committee
        from wideflat.commands.presets import committee_settings
        from wideflat.data import dress_coat

        if self.preset not in committee_settings():
            raise UsageError(f"there is no preset {self.preset!r}. {nearest(self.preset, committee_settings())}")
        unused = [name for name in (*CHANGES, "epochs", "limit_data") if getattr(self, name) is not None]
        if unused or self.algorithm != "sgd":
            names = ", ".join(f"--{name.replace('_', '-')}" for name in unused or ["algorithm"])
            raise UsageError(
                f"{names} is not for the committee machine: its settings are `wideflat presets {self.preset}`"
            )
        if self.restarts < 1:
            raise UsageError(f"--restarts must be >= 1, got {self.restarts}")
        name = self.preset.removeprefix("committee-")
        with usage():
            changes = committee.changes_from(self.set)
            setting = committee.SETTINGS[name].but(**changes)
        changed = {"restarts": self.restarts, **changes}
        if self.draw != "balanced":
            changed[self.draw] = self.patterns
        elif self.patterns != 500:
            changed["patterns"] = self.patterns
        seeds = range(self.seed * 1_000_000, self.seed * 1_000_000 + self.restarts)
        run = Run.create(
            self._out(self.preset, changed),
            {
                "experiment": {"name": self.preset, **dataclasses.asdict(setting)},
                "options": {
                    "seed": self.seed,
                    "seeds": [seeds[0], seeds[-1]],
                    "draw": self.draw,
                    "patterns": self.patterns,
                },
            },
        )
        result = run.path / "solutions.npz"
        with run.locked():
            if result.exists():
                self._say(f"{run.path} is finished already")
                solutions = committee.Solutions.load(result)
            else:
                run.record_environment()
                training = dress_coat.load(self.patterns, self.draw, self.seed)
                before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: save and stop
                try:
                    solutions = committee.train(
                        setting if changes else name,
                        training.inputs,
                        training.targets,
                        seeds,
                        test_inputs=training.test_inputs,
                        test_targets=training.test_targets,
                        checkpoint=run.path / "checkpoint.npz",
                        source=training.source,
                    )
                except committee.Interrupted as interruption:
                    print(f"wideflat: {interruption}; start the same command again to go on", file=sys.stderr)
                    return 130
                finally:
                    signal.signal(signal.SIGTERM, before)
                solutions.save(result)
                (run.path / "checkpoint.npz").unlink(missing_ok=True)
        summary = {key: None if math.isnan(value) else value for key, value in solutions.summary().items()}
        if self.json:
            print(json_module.dumps({"run": str(run.path), "solutions": str(result), **summary}))
        else:
            print(f"{result}: {summary['restarts']} restarts")
            for key, value in summary.items():
                print(f"  {key.replace('_', ' '):<28}{'-' if value is None else format(value, '.4g')}")
        return 0


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _short(value: Any) -> str:
    return "auto" if value is None else f"{value:g}" if isinstance(value, (int, float)) else str(value)
