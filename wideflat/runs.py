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

* A state is two files: tensors (safetensors) and all the rest (JSON), which names the SHA-256 of the first and of
  itself. Each is written under another name, synchronised and renamed, the JSON last: a state exists only when it is
  whole.
* A state that is damaged all the same (a disk, a copy) is detected by its checksums, named, and the one before it is
  taken.
* The tables are appended to, and a state knows how long they were. Resuming cuts off what was written after it.
* The lock is the operating system's (``flock``): it ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import wideflat
from wideflat.files import atomic_write, hold

if TYPE_CHECKING:
    from wideflat.data import Augmentation, ImageData

__all__ = ["DamagedState", "Run", "RunInUse", "environment", "load_state", "save_state"]

#: Parts of a configuration that inform the reader and change nothing.
REMARKS = ("experiment.notes", "experiment.paper_error", "experiment.paper_spread", "experiment.paper_gamma1")

#: Version of the layout above; a run of a later version is refused instead of misread.
FORMAT = 1


class DamagedState(RuntimeError):
    """A file of a saved state is missing, truncated or altered."""


class RunInUse(RuntimeError):
    """Another process is training in this run directory."""


# ------------------------------------------------------------------------------------------------ states on disk


def save_state(path: str | os.PathLike[str], state: Any, about: dict[str, Any] | None = None) -> None:
    """Write ``state`` to ``path`` + ``.safetensors`` (its tensors) and ``path`` + ``.json`` (all the rest).

    Args:
        path: Where, without a suffix. A state of that name is replaced whole, or not at all.
        state: Any nesting of dictionaries, lists and tuples of tensors, numbers, strings, booleans and None, such as
            the ``state_dict()`` of models and optimizers. Memory formats (channels last) are kept.
        about: Something to note beside the state, in the JSON file.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "state"
        >>> save_state(path, {"weight": torch.ones(2), "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], 3: None})
        >>> load_state(path)
        {'weight': tensor([1., 1.]), 'groups': [{'lr': 0.1, 'betas': (0.9, 0.99)}], 3: None}
    """
    from safetensors.torch import save

    path = Path(path)
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "", tensors)
    data = save(tensors)
    with atomic_write(path.with_name(path.name + ".safetensors"), "wb") as file:
        file.write(data)
    content = {"format": FORMAT, "about": about, "tensors_sha256": hashlib.sha256(data).hexdigest(), "state": tree}
    with atomic_write(path.with_name(path.name + ".json")) as file:
        json.dump({**content, "sha256": _digest(content)}, file, indent=1)
        file.write("\n")


def load_state(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Any:
    """Read what :func:`save_state` wrote, bit for bit.

    Args:
        path: The name given to :func:`save_state`.
        device: Where the tensors go.

    Raises:
        DamagedState: If a file is missing, truncated or altered; the message names it.
    """
    from safetensors.torch import load

    path = Path(path)
    table, blob = path.with_name(path.name + ".json"), path.with_name(path.name + ".safetensors")
    content = _read_json(table)
    data = _read(blob)
    actual = hashlib.sha256(data).hexdigest()
    if actual != content["tensors_sha256"]:
        raise DamagedState(
            f"{blob} is damaged: expected SHA-256 {content['tensors_sha256']}, got {actual} ({len(data)} bytes)"
        )
    tensors = {name: tensor.to(device) for name, tensor in load(data).items()}
    return _decode(content["state"], tensors)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedState(f"{path} is missing") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
        expected = content.pop("sha256")
    except (ValueError, KeyError, AttributeError):  # ValueError: neither JSON nor UTF-8
        raise DamagedState(
            f"{path} is damaged: it is not a whole JSON document ({path.stat().st_size} bytes)"
        ) from None
    if _digest(content) != expected:
        raise DamagedState(f"{path} is damaged: expected SHA-256 {expected}, got {_digest(content)}")
    if content["format"] > FORMAT:
        raise RuntimeError(
            f"{path} was written by a later version of wideflat (format {content['format']}, this one reads up to "
            f"{FORMAT}): pip install --upgrade wideflat"
        )
    return content


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON form of ``value``; its tensors go to ``tensors`` under names that tell where they were."""
    if isinstance(value, Tensor):
        while name in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
            name += "'"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        channels_last = value.dim() == 4 and not value.is_contiguous() and _is_channels_last(value)
        return {"$tensor": name, **({"channels_last": True} if channels_last else {})}
    if isinstance(value, dict):
        inner = {key: _encode(item, f"{name}.{key}" if name else str(key), tensors) for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in inner):
            return inner
        return {"$items": [[key, item] for key, item in inner.items()]}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{name}.{i}" if name else str(i), tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a state holds tensors, numbers, strings, lists and dictionaries; {name or 'it'} is {type(value)}")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        tensor = tensors[value["$tensor"]]
        return tensor.contiguous(memory_format=torch.channels_last) if value.get("channels_last") else tensor
    if "$items" in value:
        return {key: _decode(item, tensors) for key, item in value["$items"]}
    if "$tuple" in value:
        return tuple(_decode(item, tensors) for item in value["$tuple"])
    return {key: _decode(item, tensors) for key, item in value.items()}


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------------------ the run itself


class Run:
    """One training on disk. See the head of this module for the files.

    Use :meth:`create` to start or continue one, :meth:`open` to read one.

    Args:
        path: The run directory.
        config: The content of ``config.json``.

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

    def __init__(self, path: str | os.PathLike[str], config: dict[str, Any]) -> None:
        self.path = Path(path)
        self.config = config
        self._lock: IO[str] | None = None

    # ---- making and finding runs

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: dict[str, Any]) -> Run:
        """Make the run directory ``path`` for ``config``, or open it if it is there with the same ``config``.

        Raises:
            ValueError: If the directory holds another experiment (the message names what differs) or something else.
        """
        path = Path(path)
        config = json.loads(json.dumps({"format": FORMAT, **config}))  # as it will be read back: tuples are lists
        if (path / "config.json").exists():
            run = cls.open(path)
            if differences := _differences(run.config, config):
                raise ValueError(
                    f"{path} holds another experiment: {differences}. Give another --out, or the settings that it was "
                    "started with."
                )
            return run
        if path.exists() and (not path.is_dir() or any(map(_is_foreign, path.iterdir()))):
            raise ValueError(f"{path} exists and is not a run of wideflat (no config.json): give another --out")
        with _disk(path):
            path.mkdir(parents=True, exist_ok=True)
            with atomic_write(path / "config.json") as file:
                json.dump(config, file, indent=1)
                file.write("\n")
        return cls(path, config)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """Open the run directory ``path`` (or the directory of a file in it, such as its ``model.safetensors``)."""
        path = Path(path)
        if path.name in ("config.json", "model.safetensors", "model.json"):
            path = path.parent
        try:
            config = json.loads((path / "config.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"{path} is not a run of wideflat: it has no config.json. `wideflat train` makes runs."
            ) from None
        except ValueError:
            raise DamagedState(f"{path / 'config.json'} is damaged: it is not a whole JSON document") from None
        if config.get("format", 0) > FORMAT:
            raise RuntimeError(
                f"{path} was made by a later version of wideflat (format {config['format']}, this one reads up to "
                f"{FORMAT}): pip install --upgrade wideflat"
            )
        return cls(path, config)

    # ---- one process at a time

    @contextlib.contextmanager
    def locked(self) -> Iterator[Run]:
        """Hold the run while training in it.

        The lock is the operating system's and goes away with the process, also when that is killed.

        Raises:
            RunInUse: If another process holds it; the message says which, where and since when.
        """
        with _disk(self.path):
            file = open(self.path / "lock", "a+", encoding="utf-8")  # noqa: SIM115 # open as long as the lock is held
        with file:
            if not hold(file):
                raise RunInUse(f"{self.path} is in use by {self._holder()}. Wait for it, or give another --out.")
            with _disk(self.path):
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

    def append(self, table: str, row: dict[str, Any]) -> None:
        """Add one line to ``metrics.jsonl`` or ``timing.jsonl`` (or to ``environment.jsonl``)."""
        self._must_hold()
        with _disk(self.path), open(self.path / f"{table}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self, table: str = "metrics") -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` (or ``timing``, ``environment``) as dictionaries."""
        path = self.path / f"{table}.jsonl"
        if not path.exists():
            return []
        whole = path.read_text(encoding="utf-8").split("\n")[:-1]  # a line without its end is still being written
        return [json.loads(line) for line in whole]

    def record_environment(self, **more: Any) -> None:
        """Add where and with what this process trains to ``environment.jsonl``, and ``more`` beside it."""
        before = self.metrics("environment")
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

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Save a complete state, keep the one before it, remove older ones.

        Raises:
            OSError: If the disk is full. The states saved before are as they were, and the message names the last.
        """
        self._must_hold()
        lengths = {table: self._length(table) for table in self.TABLES}
        with self._disk_with_last_state():
            save_state(self.path / "checkpoints" / f"step-{step:010d}", {"tables": lengths, "state": state})
        for old in self._states()[self.KEEP :]:
            _remove_state(old)

    def restore(self, say: Callable[[str], object] | None = None, device: torch.device | str = "cpu") -> Any:
        """The last complete state that is whole, or None; the tables are cut back to where they were then.

        A damaged state is named through ``say`` (default: a warning), removed, and the one before it is taken.
        """
        self._must_hold()
        say = say or warnings.warn
        for rubbish in self.path.glob("**/.*.part"):  # a write that was killed
            rubbish.unlink(missing_ok=True)
        for path in self._states():
            try:
                saved = load_state(path, device)
                for table, length in saved["tables"].items():
                    if self._length(table) < length:
                        raise DamagedState(
                            f"{self.path / table}.jsonl is damaged: expected at least {length} bytes, got "
                            f"{self._length(table)}"
                        )
            except DamagedState as error:
                say(f"{error}; falling back to the state before it")
                _remove_state(path)
                continue
            for table, length in saved["tables"].items():
                self._cut(table, length)
            return saved["state"]
        for table in self.TABLES:
            self._cut(table, 0)
        return None

    def _states(self) -> list[Path]:
        """The states in ``checkpoints/``, newest first, without suffixes."""
        return sorted((path.with_suffix("") for path in self.path.glob("checkpoints/step-*.json")), reverse=True)

    def _length(self, table: str) -> int:
        path = self.path / f"{table}.jsonl"
        return path.stat().st_size if path.exists() else 0

    def _cut(self, table: str, length: int) -> None:
        if self._length(table) > length:
            os.truncate(self.path / f"{table}.jsonl", length)

    def _disk_with_last_state(self) -> contextlib.AbstractContextManager[None]:
        states = self._states()
        return _disk(self.path, f"the last good state is {states[0]}" if states else "no state was saved before")

    # ---- what came out

    def save_model(self, model: nn.Module, result: dict[str, Any], epoch: int | None = None) -> Path:
        """Save the weights and buffers of ``model``: the result of the run, or a snapshot at ``epoch``.

        Args:
            model: The center, with its batch norm refreshed.
            result: What is known of it (errors, losses), for ``model.json`` or ``snapshots/epoch-NNNN.json``.
            epoch: None for the result.
        """
        self._must_hold()
        path = self._model(epoch)
        with self._disk_with_last_state():
            save_state(path, dict(model.state_dict()), about=result)
        return path.with_suffix(".safetensors")

    def result(self, epoch: int | None = None) -> dict[str, Any] | None:
        """What is known of the final model, or of the snapshot at ``epoch``; None while there is no such model."""
        path = self._model(epoch).with_suffix(".json")
        return _read_json(path)["about"] if path.exists() else None

    def snapshots(self) -> dict[int, Path]:
        """The files of the center at the chosen epochs, by epoch."""
        return {int(path.stem.split("-")[1]): path for path in sorted(self.path.glob("snapshots/epoch-*.safetensors"))}

    def load_model(self, epoch: int | None = None, device: torch.device | str = "cpu") -> nn.Module:
        """The final model (center or barycenter, batch norm refreshed), ready: on ``device``, in eval mode.

        Args:
            epoch: A snapshot instead (see :meth:`snapshots`).
            device: Where it goes.
        """
        path = self._model(epoch)
        if not path.with_suffix(".json").exists():
            there = ", ".join(map(str, self.snapshots())) or "none"
            wanted = "its final model yet" if epoch is None else f"a snapshot at epoch {epoch}"
            raise FileNotFoundError(
                f"{self.path} does not have {wanted} (snapshots at epochs: {there}). Start its `wideflat train` "
                "command again to finish it."
            )
        model = self.build_model()
        model.load_state_dict(load_state(path))
        return model.to(device).eval()

    def build_model(self) -> nn.Module:
        """The untrained model of this run, with the initial weights of torch's current random state."""
        from wideflat.presets import Preset

        return Preset.from_dict(self.config["experiment"]).build_model()

    def data(self, folder: str | os.PathLike[str] | None = None) -> ImageData:
        """The images that this run was trained and tested on.

        Args:
            folder: Where the data set is; by default where the run found it.
        """
        from wideflat.data import load

        about = self.config["data"]
        if folder is None:
            sources = [row.get("data_source") for row in self.metrics("environment")]
            folder = next((source for source in reversed(sources) if source and Path(source).exists()), None)
        data = load(about["name"], folder, allow_altered=about["altered"])
        limit = self.config["options"]["limit_data"]
        return data.subset(min(limit, len(data.train)), min(limit, len(data.test))) if limit else data

    def augmentation(self) -> Augmentation:
        """What was done to the training images, for :class:`wideflat.data.Batches`."""
        from wideflat.presets import Preset
        from wideflat.train import augmentation

        return augmentation(Preset.from_dict(self.config["experiment"]))

    def _model(self, epoch: int | None) -> Path:
        return self.path / "model" if epoch is None else self.path / "snapshots" / f"epoch-{epoch:04d}"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


def environment() -> dict[str, Any]:
    """Where and with what this process computes: processor, threads, versions, commit, command.

    Example:
        >>> sorted(environment())
        ['command', 'commit', 'host', 'pid', 'processor', 'python', 'started', 'system', 'threads', 'torch', 'wideflat']
    """
    return {
        "started": now(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "wideflat": wideflat.__version__,
        "commit": _commit(),
        "command": " ".join(["wideflat", *sys.argv[1:]]),
    }


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree this package is imported from, if it is one."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, timeout=10
        )
        return done.stdout.strip() or None
    return None


def now() -> str:
    """The time, in UTC, for a log."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _differences(there: Any, here: Any, name: str = "") -> str:
    """What differs between two configurations, in words; empty if nothing does."""
    if isinstance(there, dict) and isinstance(here, dict):
        parts = (
            _differences(there.get(key), here.get(key), f"{name}.{key}" if name else str(key))
            for key in sorted({*there, *here})
        )
        return ", ".join(part for part in parts if part)
    if there == here or name in REMARKS:
        return ""
    return f"{name.removeprefix('experiment.')} is {there} there and {here} here"


def _is_foreign(path: Path) -> bool:
    """Whether a file is more than what a run that was killed at its very start leaves behind."""
    return path.name != "lock" and not (path.name.startswith(".") and path.name.endswith(".part"))


def _remove_state(path: Path) -> None:
    """Remove both files of a state; the JSON first, so that no half of it looks whole."""
    path.with_suffix(".json").unlink(missing_ok=True)
    path.with_suffix(".safetensors").unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(path: Path, consequence: str = "") -> Iterator[None]:
    """Say plainly when a disk is full or may not be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            tail = f"; {consequence}" if consequence else ""
            raise OSError(
                error.errno,
                f"no space left on the disk of {path}{tail}. Free some space and start the same command again: it goes "
                "on from there",
            ) from error
        raise
