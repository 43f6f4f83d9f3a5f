"""``wideflat train``: a row of Table 1 or a setting of the committee machine, with any of the algorithms."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro

from wideflat import data as data_sets
from wideflat.algorithms import ALGORITHMS, having
from wideflat.commands import UsageError, usage
from wideflat.commands.answers import answer
from wideflat.commands.given import named_function
from wideflat.commands.presets import committee_settings
from wideflat.commands.train_committee import train_committee
from wideflat.committee.settings import Setting
from wideflat.data.own import is_own, load_own
from wideflat.environment import choose_device
from wideflat.experiments.options import Device, Ints, MaybeFloat, MaybeFloats, MaybeInt, MaybePath, MaybeText, Pairs
from wideflat.interruption import Interrupted
from wideflat.presets import PRESETS, Preset, nearest, preset
from wideflat.progress import Progress
from wideflat.training import Options, Run, train_in
from wideflat.training.company import Alone, Company, on_torchrun
from wideflat.training.elastic import Elastic, refuse_rigid, supervise

if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple(ALGORITHMS)]

#: What `wideflat train --help` says of each algorithm.
ALGORITHMS_HELP = "; ".join(f"{name}: {algorithm.words}" for name, algorithm in ALGORITHMS.items())

#: Options that change a hyper-parameter of the preset, and bear its name.
CHANGES = (
    "batch_size",
    "lr",
    "optimizer",
    "momentum",
    "weight_decay",
    "num_replicas",
    "start",
    "fork_passes",
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
    "pixel_mean",
    "pixel_std",
)


#: What `--set` can change of the committee machine.
_SETTING_NAMES = {field.name for field in dataclasses.fields(Setting)}


def one_of(words: str) -> Any:
    """How the help shows an option with a few values, by default the preset's."""
    return tyro.conf.arg(metavar=words, help_behavior_hint="")


@dataclasses.dataclass
class Command:
    """Train a row of Table 1 with any of the algorithms, or a setting of the committee machine.

    Started again, the same command goes on where it was stopped or killed, and ends with the same weights bit for bit.
    Ctrl-C saves and stops. `wideflat presets` lists the presets. An option without a default here has the preset's.

    Examples:
      wideflat train cifar10-smallconvnet --data DIR
      wideflat train cifar10-smallconvnet --algorithm esgd --data folder:photos --epochs 20
      wideflat train cifar10-resnet18 --data npz:digits.npz --build my_project.nets:network
      wideflat train cifar10-smallconvnet --algorithm esgd --epochs 12 --seed 1
      wideflat train cifar10-resnet18 --algorithm rsgd --lr 0.03 --out runs/mine --snapshots 10 40
      wideflat train cifar10-resnet18 --stem cifar
      wideflat train cifar10-smallconvnet --algorithm rsgd --as-coded
      wideflat train cifar10-smallconvnet --algorithm rsgd --start fork
      wideflat train cifar10-resnet110 --limit-data 256 --epochs 2
      wideflat train committee-sgd-fast --restarts 10
      wideflat train committee-rsgd-fast --set align=true polish_epochs=300
      torchrun --nproc-per-node 3 -m wideflat train cifar10-smallconvnet --algorithm rsgd
      torchrun --nproc-per-node 4 -m wideflat train cifar10-smallconvnet --algorithm rsgd --num-replicas 2
      wideflat train cifar10-smallconvnet --algorithm rsgd --fault-tolerant
    """

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")]
    """A row of Table 1 (cifar10-smallconvnet, ...) or a setting of Appendix B.1 (committee-sgd-fast, ...)."""
    algorithm: Annotated[
        AlgorithmName, tyro.conf.arg(help=f"{ALGORITHMS_HELP}. Not for committee-..., which name theirs.")
    ] = "sgd"
    seed: int = 0
    """Of everything random."""
    epochs: MaybeInt = None
    """Length of the training; learning rate, gamma and period are rescaled with it."""
    out: MaybePath = None
    """The run directory; by default in runs/, named after the preset and what was changed."""
    resume: bool = True
    """Go on where the run stopped. --no-resume refuses a directory that holds a run already."""
    data: MaybePath = None
    """Folder of the data set ($WIDEFLAT_DATA and the usual caches if left out); or your own: folder:PATH, npz:FILE."""
    build: MaybeText = None
    """A network of your own: module:function, called with num_classes (image_size, in_channels where it takes them)."""
    allow_altered: bool = False
    """Take data files that are well-formed but not the published ones, such as recompressed copies."""
    limit_data: MaybeInt = None
    """Train and test on at most so many images each."""

    as_coded: bool = False
    """As the authors' program has it where that differs from the paper: `wideflat presets PRESET` says in what."""
    stem: Annotated[Literal["cifar", "imagenet"] | None, one_of("cifar|imagenet")] = None
    """How ResNet-18, ResNet-50 and DenseNet-121 begin: one 3x3 convolution, or a 7x7 one of stride 2 and a max pool."""
    dropout: MaybeFloat = None
    """Probability of dropout, for networks that have it (SmallConvNet's dense layer, EfficientNet)."""
    batch_size: MaybeInt = None
    """Images in a mini-batch."""
    lr: MaybeFloat = None
    """eta, the initial learning rate (for esgd that of the outer loop)."""
    optimizer: Annotated[Literal["sgd", "rmsprop-tf", "rmsprop"] | None, one_of("sgd|rmsprop-tf|rmsprop")] = None
    """Of the replicas and of the inner loop; rmsprop-tf is TensorFlow's form, rmsprop torch's."""
    momentum: MaybeFloat = None
    """Momentum."""
    weight_decay: MaybeFloat = None
    """Weight decay."""
    num_replicas: MaybeInt = None
    """y, the number of replicas."""
    start: Annotated[Literal["independent", "one", "fork"] | None, one_of("independent|one|fork")] = None
    """Where replicas start: at points of their own, at one, or as copies of one that was trained for some passes."""
    fork_passes: MaybeInt = None
    """Of --start fork: passes over the data before the copies part; 3 by default."""
    period: MaybeInt = None
    """K, iterations from one coupling of the replicas to the next."""
    coupling: Annotated[Literal["gradient", "proximal"] | None, one_of("gradient|proximal")] = None
    """How replicas attract each other: through the gradients, or by a step of its own, stable for any strength."""
    inner_lr: MaybeFloat = None
    """eta', the learning rate of the inner loop."""
    inner_steps: MaybeInt = None
    """L, the steps of the inner loop."""
    epsilon: MaybeFloat = None
    """Amplitude of the Langevin noise."""
    alpha: MaybeFloat = None
    """Weight of the past in the running mean: of the inner loop, or of the weights (ema)."""
    gamma0: Annotated[float | Literal["auto"] | None, tyro.conf.arg(metavar="FLOAT|auto", help_behavior_hint="")] = None
    """The first gamma, or auto."""
    gamma_factor: MaybeFloat = None
    """What gamma grows by over the training."""
    rho: MaybeFloat = None
    """Radius of the ball of SAM."""
    augmentation: Annotated[
        Literal["none", "standard", "autoaugment", "fast-autoaugment"] | None,
        one_of("none|standard|autoaugment|fast-autoaugment"),
    ] = None
    """What is done to the training images."""
    pixel_mean: MaybeFloats = None
    """What is subtracted from each channel, pixels being 0 to 1; by default the mean over the training set."""
    pixel_std: MaybeFloats = None
    """What each channel is divided by; by default the standard deviation over the training set."""

    device: Device = "auto"
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
    snapshots: Ints = ()
    """Epochs at whose end the center is kept, for the flatness figures; 0 is before training."""
    checkpoint_minutes: float = 5.0
    """The state is saved after every epoch, and after so many minutes within one."""
    tensorboard: bool = True
    """Write TensorBoard event files."""

    fault_tolerant: bool = False
    """A job for each replica of rsgd; each may be killed and started again. Without --replica all run here."""
    replica: MaybeInt = None
    """With --fault-tolerant: train this replica alone, 0 to y - 1; the others are other jobs."""
    lighthouse: MaybeText = None
    """With --fault-tolerant: address of torchft_lighthouse, http://HOST:29510; by default $TORCHFT_LIGHTHOUSE."""
    host: MaybeText = None
    """With --fault-tolerant: name or address under which other machines reach this one."""

    restarts: int = 50
    """Of committee-...: how many, trained together."""
    draw: Literal["balanced", "random"] = "balanced"
    """Of committee-...: how the training patterns are drawn."""
    patterns: int = 500
    """Of committee-...: how many training patterns."""
    set: Pairs = ()
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
            raise UsageError(
                f"there is no preset {self.preset!r}. {nearest(self.preset, [*PRESETS, *committee_settings()])}"
            )
        with usage():
            cell, changed = self._cell()
        name = f"{self.preset}-{self.algorithm}" + ("-as-coded" if self.as_coded else "")
        if is_own(self.data):
            name = f"{name}-{Path(str(self.data).partition(':')[2]).stem}"
        out = self._out(name, changed)
        if self.fault_tolerant and self.replica is None:
            return self._supervise(cell, out)
        return self._train(cell, out)

    def _train(self, cell: Preset, out: Path) -> int:
        """Train in this process, in whatever company."""
        options = Options(**{field.name: getattr(self, field.name) for field in _shared(self, Options)})
        if is_own(self.data):
            assert self.data is not None
            images = load_own(self.data, cell.image_size)
            cell = cell.with_data(images)
        else:
            images = data_sets.load(cell.dataset, self.data, allow_altered=self.allow_altered)
        if images.altered:
            self._say(f"{len(images.altered)} files of {images.name} are not the published ones (--allow-altered)")
        device = choose_device(self.device)
        try:
            with self._company(cell, device) as company:
                run = train_in(
                    company,
                    cell,
                    out,
                    images,
                    options,
                    device=device,
                    snapshots=self.snapshots,
                    checkpoint_minutes=self.checkpoint_minutes,
                    tensorboard=self.tensorboard,
                    say=self._say if self.replica is None else self._say_as_replica,
                )
        except Interrupted as interruption:
            print(f"wideflat: {interruption}", file=sys.stderr)
            return 130
        if run is not None:  # otherwise another rank has the run and prints the result
            self._print_result(cell, run.path, run.result() or {})
        return 0

    def _company(self, cell: Preset, device: torch.device) -> contextlib.AbstractContextManager[Company]:
        """Who else trains this: nobody, the other ranks of torchrun, or jobs that come and go."""
        if not self.fault_tolerant and not on_torchrun():
            return Alone()
        if not self.fault_tolerant:
            from wideflat.training.ranks import Ranks  # takes seconds to import

            return Ranks.of_torchrun(cell.num_replicas, device)
        if on_torchrun():
            raise ValueError(
                "--fault-tolerant is for replicas that are a job of one process each, not for the ranks of torchrun: "
                "start it without torchrun"
            )
        assert self.replica is not None
        return Elastic(self.replica, self.lighthouse, self.host)

    # ---- replicas that may be killed

    def _supervise(self, cell: Preset, out: Path) -> int:
        """Start a job for each replica on this machine, and again when it dies."""
        with usage():
            refuse_rigid(cell)

        def command(a: int, lighthouse: str) -> list[str]:
            job = dataclasses.replace(self, replica=a, lighthouse=lighthouse, out=out, host="127.0.0.1", json=False)
            return [
                sys.executable,
                "-m",
                "wideflat",
                *(["-q"] if a or Progress.silent else []),
                "train",
                *job.arguments(),
            ]

        code = supervise(command, cell.num_replicas, self.lighthouse, say=self._say, stdout=sys.stderr)
        if code == 0:
            self._print_result(cell, out, Run.open(out).result() or {})
        return code

    def arguments(self) -> list[str]:
        """The command line that gives this command again; without what is as it would be anyway.

        Example:
            >>> Command("cifar10-resnet18", algorithm="rsgd", lr=0.03, resume=False, snapshots=(10, 40)).arguments()
            ['cifar10-resnet18', '--algorithm', 'rsgd', '--no-resume', '--lr', '0.03', '--snapshots', '10', '40']
        """
        given = [self.preset]
        for field in dataclasses.fields(self)[1:]:
            value, name = getattr(self, field.name), field.name.replace("_", "-")
            if value == field.default:
                continue
            if isinstance(value, bool):
                given.append(f"--{name}" if value else f"--no-{name}")
            else:
                given += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
        return given

    # ---- what to train

    def _run_committee(self) -> int:
        """Train a setting of the committee machine."""
        if self.preset not in committee_settings():
            raise UsageError(f"there is no preset {self.preset!r}. {nearest(self.preset, committee_settings())}")
        options = (*CHANGES, "epochs", "limit_data", "stem", "dropout", "as_coded", "build")
        unused = [name for name in options if getattr(self, name) not in (None, False)]
        if self.algorithm != Command.algorithm:
            unused = unused or ["algorithm"]
        if unused:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
            known = [f"{name}={getattr(self, name)}" for name in unused if name in _SETTING_NAMES]
            do = f": write --set {' '.join(known)}" if known else ""
            raise UsageError(
                f"{names} is not for the committee machine{do}; its settings are `wideflat presets {self.preset}`"
            )
        return train_committee(
            self.preset, self.seed, self.restarts, self.draw, self.patterns, self.set, self._out, self._say, self.json
        )

    def _cell(self) -> tuple[Preset, dict[str, Any]]:
        """The preset with the changes asked for, and these changes."""
        cell = preset(self.preset, self.algorithm, self.as_coded)
        changed = {name: getattr(self, name) for name in CHANGES if getattr(self, name) is not None}
        if changed.get("gamma0") == "auto":
            changed["gamma0"] = None
        if self.fork_passes is not None and self.start != "fork":
            raise ValueError("--fork-passes is for --start fork")
        cell, changed = self._network(dataclasses.replace(cell, **changed), changed)
        if self.epochs is not None:
            if self.epochs < 1:
                raise ValueError(f"--epochs must be >= 1, got {self.epochs}")
            cell = cell.with_epochs(self.epochs)
            changed = {"epochs": self.epochs, **changed}
        if self.coupling and not ALGORITHMS[self.algorithm].modes:  # also the one that is the default
            raise ValueError(f"--coupling is for {having('modes')}, not for {self.algorithm}")
        return cell, changed

    def _network(self, cell: Preset, changed: dict[str, Any]) -> tuple[Preset, dict[str, Any]]:
        """The preset with the network asked for, and all changes."""
        if self.build is not None:
            named_function(self.build)  # there, or an error that says what is missing
            cell = dataclasses.replace(cell, model=self.build, model_arguments=())
            changed = {"build": self.build.replace(":", "."), **changed}
        if self.stem is not None:
            cell = cell.with_stem(self.stem)
            changed = {"stem": self.stem, **changed}
        if self.dropout is not None:
            cell = cell.with_dropout(self.dropout)
            changed = {"dropout": self.dropout, **changed}
        return cell, changed

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

    def _say_as_replica(self, message: str) -> None:
        self._say(f"replica {self.replica}: {message}")

    def _print_result(self, cell: Preset, path: Path, result: dict[str, Any]) -> None:
        if self.json:
            answer({"run": path, **result})
            return
        print(f"{path}: test error {100 * result['test_error']:.2f} %, train error {100 * result['train_error']:.2f} %")
        if "ensemble_test_error" in result:
            replicas = ", ".join(f"{100 * error:.2f}" for error in result["replica_test_errors"])
            print(f"  replicas {replicas} %, their ensemble {100 * result['ensemble_test_error']:.2f} %")
        whole = preset(cell.name, cell.algorithm)
        if whole.paper_error is not None and not is_own(self.data):
            spread = "" if whole.paper_spread is None else f" ± {whole.paper_spread:g}"
            same = cell == whole and not self.limit_data
            print(f"  paper: {whole.paper_error:.1f}{spread} %" + ("" if same else " (with the preset's own settings)"))
        build = f" --build {self.build}" if self.build else ""
        print(f"  next: wideflat local-energy {shlex.quote(str(path))}{build}")


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return "_".join(map(_short, value))
    return "auto" if value is None else f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _shared(command: Command, options: type) -> list[dataclasses.Field[Any]]:
    """The options of the training that have an option of the same name on the command line."""
    return [field for field in dataclasses.fields(options) if hasattr(command, field.name)]
