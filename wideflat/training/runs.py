"""A run on disk: what was trained, how it went, where it stopped, what came out.

::

    RUN/
      config.json           the whole experiment: preset, algorithm, seed, every hyper-parameter
      environment.jsonl     one line a start: processor, threads, torch, commit, command
      metrics.jsonl         one line an epoch: losses, errors, gamma, distance between replicas
      events.jsonl          what was said: resumed, fell back to an older state, interrupted, diverged, finished
      timing.jsonl          one line an epoch: seconds, images a second
      tensorboard/          the same figures as TensorBoard event files
      checkpoints/          the last two states of the training, complete: what a resumed run starts from
      snapshots/            the center at chosen epochs, for the flatness figures
      model.safetensors     the center at the end, batch norm refreshed; model.json has its errors and checksum
      lock                  who is training here now

What makes an interrupted run equal to an undisturbed one:

* A state (:mod:`wideflat.training.state_files`) exists only when it is whole. One that is damaged all the same (a disk,
  a copy) is detected by its checksums, named, and the one before it is taken.
* The tables are appended to, and a state knows how long they were. Resuming cuts off what was written after it. A
  damaged line is set aside (``metrics.damaged``) and stops nothing: the states are the truth.
* The lock is the operating system's (``flock``): it ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from wideflat.centered import warn_off_center
from wideflat.checks import shown, whole
from wideflat.checks.calls import called, takes
from wideflat.checks.doors import asks
from wideflat.environment import environment, now
from wideflat.files import hold, missing, naming, on_disk, read_whole, write_json
from wideflat.presets import Preset
from wideflat.training.configurations import as_read, differences
from wideflat.training.state_files import DamagedState, load_state, read_about, remove_state, save_state
from wideflat.training.tables import append_row, mend_table, read_table

__all__ = ["DamagedState", "Run", "RunInUse"]

#: Version of the layout above; a run of a later version is refused instead of misread.
FORMAT = 1


class RunInUse(RuntimeError):
    """Another process is training in this run directory."""


class Run:
    """One training on disk. See the head of this module for the files.

    Use :meth:`create` to start or continue one, :meth:`open` to read one.

    Args:
        path: The run directory.
        config: The content of ``config.json``. It only names networks of this package.
        build: Makes the network of this run, if it is one of your own.

    Example:
        >>> import tempfile
        >>> run = Run.create(tempfile.mkdtemp() + "/run", {"preset": "mine", "lr": 0.1})
        >>> with run.locked():
        ...     run.append("metrics", {"epoch": 1, "test_error": 0.25})
        ...     run.save_checkpoint(10, {"step": 10, "weight": torch.zeros(1)})
        ...     run.append("metrics", {"epoch": 2, "test_error": 0.125})   # killed after this line: not in a checkpoint
        >>> run = Run.open(run.path)
        >>> with run.locked():
        ...     run.restore()
        {'step': 10, 'weight': tensor([0.])}
        >>> run.metrics()
        [{'epoch': 1, 'test_error': 0.25}]
        >>> Run.create(run.path, {"preset": "mine", "lr": 0.2})
        Traceback (most recent call last):
        ...
        ValueError: ... holds another experiment: lr is 0.1 there and 0.2 here. Give another --out, or the settings ...
    """

    #: Tables whose length is part of a checkpoint.
    TABLES = ("metrics", "timing")
    #: How many complete states are kept.
    KEEP = 2

    @asks
    def __init__(
        self, path: str | os.PathLike[str], config: dict[str, Any], build: Callable[..., nn.Module] | None = None
    ) -> None:
        self.path = Path(path)
        self.config = config
        self.build = build
        self._lock: IO[str] | None = None

    # ---- making and finding runs

    @classmethod
    @asks
    def create(
        cls, path: str | os.PathLike[str], config: dict[str, Any], build: Callable[..., nn.Module] | None = None
    ) -> Run:
        """Make the run directory ``path`` for ``config``, or open it if it is there with the same ``config``.


        Raises:
            ValueError: If the directory holds another experiment (the message names what differs) or something else.
        """
        path = Path(path)
        if (path / "config.json").exists():
            run = cls.open(path)
            run.must_be(config)
            run.build = build
            return run
        if path.exists() and (not path.is_dir() or any(map(_is_foreign, path.iterdir()))):
            raise ValueError(f"{path} exists and is not a run of wideflat (no config.json): give another --out")
        config = {"format": FORMAT, **as_read(config)}
        with on_disk(path):
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / "config.json", config)
        return cls(path, config, build)

    @classmethod
    @asks
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """Open the run directory ``path`` (or the directory of a file in it, such as its ``model.safetensors``).

        Of a training whose replicas are jobs of their own it is the run of one of them, of the first that is finished:
        the center in it is the barycenter of those that were alive.
        """
        path = Path(path)
        if path.name in ("config.json", "model.safetensors", "model.json"):
            path = path.parent
        replicas = sorted(file.parent for file in path.glob("replica-*/config.json"))
        if replicas and not (path / "config.json").exists():
            path = next((each for each in replicas if (each / "model.json").exists()), replicas[0])
        try:
            config = json.loads(read_whole(path / "config.json"))
        except (FileNotFoundError, NotADirectoryError):
            what = f"{path} is not a run of wideflat: it has no config.json" if path.exists() else missing(path)
            end = "" if what.endswith("?") else "."
            raise FileNotFoundError(f"{what}{end} `wideflat train` makes runs.") from None
        except (ValueError, RecursionError, IsADirectoryError):
            raise DamagedState(f"{path / 'config.json'} is damaged: it is not a whole JSON document") from None
        if not isinstance(config, dict) or not isinstance(config.get("format", 0), int):
            raise DamagedState(f"{path / 'config.json'} is damaged: it is no configuration of a run")
        if config.get("format", 0) > FORMAT:
            raise RuntimeError(
                f"{path} was made by a later version of wideflat (format {config['format']}, this one reads up to "
                f"{FORMAT}): pip install --upgrade wideflat"
            )
        return cls(path, config)

    @asks
    def must_be(self, config: dict[str, Any]) -> None:
        """Check that a training with ``config`` is that of this run.

        Raises:
            ValueError: If it is another; the message names what differs.
        """
        if different := differences(self.config, {"format": FORMAT, **as_read(config)}):
            raise ValueError(
                f"{self.path} holds another experiment: {different}. Give another --out, or the settings that it was "
                "started with."
            )

    # ---- one process at a time

    @contextlib.contextmanager
    def locked(self) -> Iterator[Run]:
        """Hold the run while training in it.

        The lock is the operating system's and goes away with the process, also when that is killed.

        Raises:
            RunInUse: If another process holds it; the message says which, where and since when.
        """
        with on_disk(self.path):
            file = open(self.path / "lock", "a+", encoding="utf-8")  # noqa: SIM115 # open as long as the lock is held
        with file:
            if not hold(file):
                raise RunInUse(f"{self.path} is in use by {self._holder()}. Wait for it, or give another --out.")
            with on_disk(self.path):
                file.truncate(0)
                json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": now()}, file)
                file.flush()
            self._lock = file
            try:
                yield self
            finally:
                self._lock = None
                with contextlib.suppress(OSError):
                    file.truncate(0)

    def _holder(self) -> str:
        try:
            held = json.loads((self.path / "lock").read_text())
            return f"process {held['pid']} on {held['host']} since {held['since']}"
        except (OSError, ValueError, KeyError):
            return "another process (which has only just started)"

    def _must_hold(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"{self.path} may only be written inside `with run.locked():`")

    # ---- tables

    @asks
    def append(self, table: str, row: dict[str, Any]) -> None:
        """Add one line to ``metrics.jsonl`` or ``timing.jsonl`` (or to ``environment.jsonl``)."""
        self._must_hold()
        with on_disk(self.path):
            append_row(self._table(table), row)

    @asks
    def metrics(self, table: str = "metrics") -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` (or ``timing``, ``events``, ``environment``) as dictionaries.

        Damaged lines are left out, with a warning.
        """
        rows, damaged = read_table(self._table(table))
        if damaged:
            warnings.warn(f"{self._table(table)}: {damaged} damaged line{'s' * (damaged > 1)} left out")
        return rows

    def record_environment(self, **more: Any) -> None:
        """Add where and with what this process trains to ``environment.jsonl``, and ``more`` beside it."""
        before, _ = read_table(self._table("environment"))
        here = environment()
        if before:
            changed = [key for key in ("processor", "threads", "torch") if before[0].get(key) != here[key]]
            if changed:
                told = ", ".join(f"{key} was {before[0].get(key)}, is {here[key]}" for key in changed)
                warnings.warn(
                    f"{self.path} was started elsewhere ({told}): it goes on correctly, but not bit for bit as there"
                )
        self.append("environment", {**here, **more})

    # ---- complete states of the training

    @asks
    def save_checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Save a complete state, keep the one before it, remove older ones.

        Raises:
            OSError: If the disk is full. The states saved before are as they were, and the message names the last.
        """
        step = whole("step", step)
        self._must_hold()
        lengths = {table: self._length(table) for table in self.TABLES}
        with self._disk_with_last_state():
            save_state(self.path / "checkpoints" / f"step-{step:010d}", {"tables": lengths, "state": state})
        for old in self._states()[self.KEEP :]:
            remove_state(old)

    @asks
    def restore(self, say: Callable[[str], object] | None = None, device: torch.device | str = "cpu") -> Any:
        """The last complete state that is whole, or None; the tables are cut back to where they were then.

        A damaged state is named through ``say`` (default: a warning), removed, and the one before it is taken. Damaged
        lines of tables are named and set aside (:mod:`wideflat.training.tables`).
        """
        self._must_hold()
        say = say or warnings.warn
        for table in ("events", "environment"):
            self._mend(table, None, say)
        for rubbish in self.path.glob("**/.*.part"):  # a write that was killed
            rubbish.unlink(missing_ok=True)
        for path in self._states():
            try:
                saved = load_state(path, device)
            except DamagedState as error:
                say(f"{error}; falling back to the state before it")
                remove_state(path)
                continue
            for table, length in saved["tables"].items():
                self._mend(table, length, say)
            return saved["state"]
        for table in self.TABLES:
            mend_table(self._table(table), 0)
        return None

    def _mend(self, table: str, length: int | None, say: Callable[[str], object]) -> None:
        if (problem := mend_table(self._table(table), length)) is not None:
            say(f"{self.path}: {problem}")

    def _table(self, name: str) -> Path:
        if not re.fullmatch(r"[\w-]{1,60}", name):
            raise ValueError(f"table must be the name of a table of a run, such as metrics, got {shown(name)}")
        return self.path / f"{name}.jsonl"

    def _states(self) -> list[Path]:
        """The states in ``checkpoints/``, newest first, without suffixes."""
        return sorted((path.with_suffix("") for path in self.path.glob("checkpoints/step-*.json")), reverse=True)

    def _length(self, table: str) -> int:
        path = self._table(table)
        return path.stat().st_size if path.exists() else 0

    def _disk_with_last_state(self) -> contextlib.AbstractContextManager[None]:
        states = self._states()
        return on_disk(self.path, f"the last good state is {states[0]}" if states else "no state was saved before")

    # ---- what came out

    @asks
    def save_model(self, model: nn.Module, result: dict[str, Any], epoch: int | None = None) -> Path:
        """Save the weights and buffers of ``model``: the result of the run, or a snapshot at ``epoch``.

        Args:
            model: The center, with its batch norm refreshed.
            result: What is known of it (errors, losses), for ``model.json`` or ``snapshots/epoch-NNNN.json``.
            epoch: None for the result.
        """
        self._must_hold()
        warn_off_center(model.parameters())
        path = self._model(epoch)
        with self._disk_with_last_state():
            save_state(path, dict(model.state_dict()), about=result)
        return path.with_suffix(".safetensors")

    @asks
    def result(self, epoch: int | None = None) -> dict[str, Any] | None:
        """What is known of the final model, or of the snapshot at ``epoch``; None while there is no such model."""
        return read_about(self._model(epoch))

    def snapshots(self) -> dict[int, Path]:
        """The files of the center at the chosen epochs, by epoch."""
        return {int(path.stem.split("-")[1]): path for path in sorted(self.path.glob("snapshots/epoch-*.safetensors"))}

    @asks
    def load_model(
        self,
        epoch: int | None = None,
        device: torch.device | str = "cpu",
        *,
        build: Callable[..., nn.Module] | None = None,
    ) -> nn.Module:
        """The final model (center or barycenter, batch norm refreshed), ready: on ``device``, in eval mode.

        Args:
            epoch: A snapshot instead (see :meth:`snapshots`).
            device: Where it goes.
            build: Makes the network of the run, if it is one of your own; see :meth:`build_model`.

        Raises:
            ValueError: If the weights do not fit the network, or the run names a network that is not of this package.
        """
        path = self._model(epoch)
        if not path.with_suffix(".json").exists():
            there = ", ".join(map(str, self.snapshots())) or "none"
            wanted = "its final model yet" if epoch is None else f"a snapshot at epoch {epoch}"
            raise FileNotFoundError(
                f"{self.path} does not have {wanted} (snapshots at epochs: {there}). Start its `wideflat train` "
                "command again to finish it."
            )
        model = self.build_model(build)
        state = load_state(path)
        try:
            model.load_state_dict(state)
        except (RuntimeError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}.safetensors does not fit the network of {self.path}: {error}") from None
        return model.to(device).eval()

    @asks
    def build_model(self, build: Callable[..., nn.Module] | None = None) -> nn.Module:
        """The untrained model of this run, with the initial weights of torch's current random state.

        The configuration on disk names networks of this package only. A network of your own is made by your function.

        Args:
            build: A function that returns the network; of what is on disk it gets at most ``num_classes``,
                ``image_size`` and ``in_channels``, if it has such arguments. By default what this run was created
                with, and what its configuration names.

        Example:
            >>> import tempfile
            >>> from wideflat.presets import preset
            >>> run = Run.create(tempfile.mkdtemp() + "/run", {"experiment": preset("cifar10-smallconvnet").to_dict()})
            >>> run.build_model(lambda num_classes: nn.Linear(4, num_classes))
            Linear(in_features=4, out_features=10, bias=True)
        """
        experiment = self.experiment
        build = build or self.build
        if build is None:
            with naming(self.path / "config.json"):
                return experiment.build_model()
        channels = dict(experiment.model_arguments).get("in_channels", 3)
        facts = {
            "num_classes": experiment.num_classes,
            "image_size": experiment.image_size,
            "in_channels": whole("in_channels", channels, 1),
        }
        known = takes(build)
        model = called("build", build, **{name: value for name, value in facts.items() if name in known})
        if not isinstance(model, nn.Module):
            raise TypeError(f"build must return a torch.nn.Module, got {shown(model)}")
        return model

    @property
    def experiment(self) -> Preset:
        """What is trained, as the configuration has it; it only names networks of this package."""
        with naming(self.path / "config.json"):
            return Preset.from_dict(self.part("experiment"))

    @property
    def limit_data(self) -> int | None:
        """How many images it was trained and tested on, if that was limited."""
        limit = self.part("options").get("limit_data")
        with naming(self.path / "config.json"):
            return None if limit is None else whole("limit_data", limit, 1)

    @asks
    def part(self, name: str) -> dict[str, Any]:
        """A part of the configuration: ``experiment``, ``options`` or ``data``."""
        found = self.config.get(name)
        if not isinstance(found, dict):
            raise DamagedState(f"{self.path / 'config.json'} is damaged: it has no {name}, but {shown(found)}")
        return found

    def _model(self, epoch: int | None) -> Path:
        if epoch is None:
            return self.path / "model"
        return self.path / "snapshots" / f"epoch-{whole('epoch', epoch):04d}"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


def _is_foreign(path: Path) -> bool:
    """Whether a file is more than what a run that was killed at its very start leaves behind."""
    return path.name != "lock" and not (path.name.startswith(".") and path.name.endswith(".part"))
