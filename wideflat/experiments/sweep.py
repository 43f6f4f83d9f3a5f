"""Many runs, over the cores of one machine or over a cluster: resumable, every failure reported and retried, none lost.

A task is a command line that makes a file. A task whose file is there is done; so a sweep that was interrupted, killed
or only half successful is started again by the same call, and does what is missing. Every task is a process of its own,
so that a run that crashes, is killed for its memory or hangs takes nothing else with it.

On a cluster the tasks become jobs of Slurm through submitit (``pip install 'wideflat[sweep]'``). Slurm, and not Ray,
because these tasks are long, independent and save their own state: what is missing is a queue, which the cluster has,
and not a system of its own that must stay alive as long as the sweep does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from wideflat.progress import Progress

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

__all__ = ["Outcome", "Task", "sweep"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One run of a sweep.

    Args:
        name: Unique in the sweep; also the name of its log.
        command: The command line. Started again after a failure, it should go on where it stopped.
        done: The file that is there when, and only when, the task is done.

    Example:
        >>> task = Task.call("square", "math:pow", [3, 2], done="square.json")
        >>> task.command[1:4]
        ['-m', 'wideflat.experiments.sweep', 'math:pow']
    """

    name: str
    command: Sequence[str]
    done: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", [os.fspath(part) for part in self.command])
        object.__setattr__(self, "done", Path(self.done))
        if not re.fullmatch(r"[\w.+=-]+", self.name):
            raise ValueError(f"the name of a task is a file name of letters, digits and . _ + = -, got {self.name!r}")

    @classmethod
    def train(cls, preset: str, *options: str, out: str | os.PathLike[str]) -> Task:
        """``wideflat train PRESET OPTIONS --out OUT``; done when its model is there."""
        out = Path(out)
        command = [sys.executable, "-m", "wideflat", "--quiet", "train", preset, *options, "--out", str(out)]
        return cls(out.name, command, out / "model.json")

    @classmethod
    def call(cls, name: str, function: str, arguments: Sequence[Any], done: str | os.PathLike[str]) -> Task:
        """A call of ``module:function`` with arguments that JSON can carry; the function makes the file ``done``."""
        command = [sys.executable, "-m", "wideflat.experiments.sweep", function, json.dumps(list(arguments))]
        return cls(name, command, Path(done))


@dataclasses.dataclass
class Outcome:
    """How a task ended.

    Args:
        name: Of the task.
        state: ``done``, ``failed`` (after all attempts), ``interrupted``, or ``waiting`` (never started).
        attempts: How often it was started in this sweep; 0 if it was done before.
        reason: Why the last attempt failed.
        log: What it has written.
    """

    name: str
    state: str = "waiting"
    attempts: int = 0
    reason: str = ""
    log: Path | None = None


def sweep(
    tasks: Sequence[Task],
    folder: str | os.PathLike[str],
    *,
    workers: int | None = None,
    retries: int = 1,
    timeout: float | None = None,
    engine: str = "local",
    slurm: dict[str, Any] | None = None,
    progress: bool = True,
    say: Callable[[str], object] = lambda text: None,
) -> list[Outcome]:
    """Run all tasks that are not done yet.

    Args:
        tasks: What to run; started in this order.
        folder: For the logs, one a task, and the journal ``sweep.jsonl`` of everything that was started and ended.
        workers: Tasks at a time; by default one a core. Each gets its share of the cores as threads.
        retries: How often a task that fails is started again, after all others had their turn.
        timeout: Seconds after which an attempt is ended and counts as failed.
        engine: ``"local"``, or ``"slurm"`` for a cluster: every task is a job.
        slurm: Parameters of submitit's executor (``slurm_partition``, ``timeout_min``, ``mem_gb``, ...).
        progress: Show progress.
        say: Where messages go: each failure when it happens.

    Returns:
        The outcome of every task, in the order given. None is left out.

    Raises:
        ValueError: If two tasks have one name or make one file.
        RuntimeError: If another sweep is using the folder.
        KeyboardInterrupt: After Ctrl-C, when all running tasks were asked to stop, and did.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> make = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
        >>> tasks = [Task(f"seed{s}", [sys.executable, "-c", make, folder / str(s)], folder / str(s)) for s in (1, 2)]
        >>> [(outcome.name, outcome.state) for outcome in sweep(tasks, folder, workers=2, progress=False)]
        [('seed1', 'done'), ('seed2', 'done')]
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be >= 1, got {workers}")
    if retries < 0:
        raise ValueError(f"retries must be >= 0, got {retries}")
    if engine not in ("local", "slurm"):
        raise ValueError(f'engine must be "local" or "slurm", got {engine!r}')
    _refuse_twins(tasks)
    folder = Path(folder)
    outcomes = {task.name: Outcome(task.name, log=folder / f"{task.name}.log") for task in tasks}
    queue = []
    for task in tasks:
        if task.done.exists():
            outcomes[task.name].state = "done"
        else:
            queue.append(task)
    if not queue:
        return list(outcomes.values())
    with _journal(folder) as write, Progress("sweep", len(tasks), progress) as bar:
        workers = workers or (_cores() if engine == "local" else len(queue))
        start = _start_here(folder, workers) if engine == "local" else _start_on_slurm(folder, slurm or {})
        _Sweep(outcomes, retries, timeout, write, bar, say).run(queue, workers, start)
    return list(outcomes.values())


class _Sweep:
    """The loop: start, look, count, start again."""

    def __init__(
        self,
        outcomes: dict[str, Outcome],
        retries: int,
        timeout: float | None,
        write: Callable[..., None],
        bar: Progress,
        say: Callable[[str], object],
    ) -> None:
        self.outcomes, self.retries, self.timeout = outcomes, retries, timeout
        self.write, self.bar, self.say = write, bar, say
        self.running: dict[str, tuple[Task, Any, float]] = {}

    def run(self, queue: list[Task], workers: int, start: Callable[[Task], Any]) -> None:
        queue = list(queue)
        try:
            while queue or self.running:
                while queue and len(self.running) < workers:
                    task = queue.pop(0)
                    outcome = self.outcomes[task.name]
                    outcome.attempts += 1
                    self.write(task=task.name, event="started", attempt=outcome.attempts, command=list(task.command))
                    self.running[task.name] = task, start(task), time.monotonic()
                queue += self._look()
                time.sleep(0.05)
        except BaseException:  # Ctrl-C, mostly
            self._stop()
            raise

    def _look(self) -> list[Task]:
        """Take note of what has ended; returns what is to be started again."""
        again = []
        for task, job, since in list(self.running.values()):
            late = self.timeout is not None and time.monotonic() - since > self.timeout
            code = job.poll()
            if code is None and late:
                job.stop(patience=5.0)
                code = job.poll()
            if code is None:
                continue
            del self.running[task.name]
            outcome = self.outcomes[task.name]
            if task.done.exists() and code == 0:
                outcome.state, outcome.reason = "done", ""
            else:
                outcome.reason = _reason(task, code, self.timeout if late else None)
                if outcome.attempts <= self.retries:
                    again.append(task)
                    outcome.state = "waiting"
                else:
                    outcome.state = "failed"
                more = "is started again" if again and again[-1] is task else f"is given up; see {outcome.log}"
                self.say(f"{task.name} failed ({outcome.reason}) and {more}")
            self.write(task=task.name, event=outcome.state, attempt=outcome.attempts, reason=outcome.reason)
            states = [outcome.state for outcome in self.outcomes.values()]
            self.bar.update(states.count("done") + states.count("failed"), failed=states.count("failed"))
        return again

    def _stop(self) -> None:
        """Ask all that runs to stop, so that it saves its state."""
        for _, job, _ in self.running.values():
            job.ask()
        deadline = time.monotonic() + 30.0
        for task, job, _ in self.running.values():
            job.stop(patience=max(deadline - time.monotonic(), 0.0))
            self.outcomes[task.name].state = "interrupted"
            self.write(task=task.name, event="interrupted", attempt=self.outcomes[task.name].attempts)


def _reason(task: Task, code: int, timeout: float | None) -> str:
    if timeout is not None:
        return f"no end after {timeout:g} s"
    if code == 0:
        return f"it ended without making {task.done}"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _refuse_twins(tasks: Sequence[Task]) -> None:
    for what, values in (("name", [task.name for task in tasks]), ("file", [str(task.done) for task in tasks])):
        twins = sorted({value for value in values if values.count(value) > 1})
        if twins:
            raise ValueError(f"every task needs a {what} of its own; several have {', '.join(twins)}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _journal(folder: Path) -> Iterator[Callable[..., None]]:
    """A function that appends a line to ``sweep.jsonl``; the folder is held meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "sweep.jsonl", "a", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RuntimeError(
                    f"another sweep is using {folder}: wait for it, or give this one another folder"
                ) from None

        def write(**line: Any) -> None:
            file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **line}) + "\n")
            file.flush()

        yield write


# ------------------------------------------------------------------------------------------------------- this machine


class _Process:
    """A task as a process of this machine, with its children in a group of their own."""

    def __init__(self, task: Task, log: IO[bytes], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            list(task.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        return self.process.poll()

    def ask(self) -> None:
        """Let it save and stop."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)

    def stop(self, patience: float) -> None:
        self.ask()
        try:
            self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _start_here(folder: Path, workers: int) -> Callable[[Task], _Process]:
    threads = str(max(_cores() // workers, 1))

    def start(task: Task) -> _Process:
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        with open(folder / f"{task.name}.log", "ab") as log:
            return _Process(task, log, environment)

    return start


# ---------------------------------------------------------------------------------------------------------- a cluster


class _Job:
    """A task as a job of Slurm."""

    def __init__(self, job: Any) -> None:
        self.job = job

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        try:
            return int(self.job.result())
        except Exception:  # killed by the queue: time limit, memory, a lost node
            return 1

    def ask(self) -> None:
        self.job.cancel(check=False)

    def stop(self, patience: float) -> None:
        self.ask()


def _start_on_slurm(folder: Path, parameters: dict[str, Any]) -> Callable[[Task], _Job]:
    try:
        import submitit
    except ModuleNotFoundError:
        raise ModuleNotFoundError("engine=\"slurm\" needs submitit: pip install 'wideflat[sweep]'") from None
    executor = submitit.AutoExecutor(folder=folder / "jobs", cluster=parameters.pop("cluster", None))
    executor.update_parameters(**{"name": "wideflat", **parameters})

    def start(task: Task) -> _Job:
        return _Job(executor.submit(_run_command, list(task.command), str(folder / f"{task.name}.log")))

    return start


def _run_command(command: list[str], log: str) -> int:
    """On the node of the cluster."""
    with open(log, "ab") as file:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode


# ---------------------------------------------------------------------------------------- python -m ... module:function


def _call(function: str, arguments: str) -> None:
    module, _, name = function.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    target(*json.loads(arguments))


if __name__ == "__main__":
    _call(*sys.argv[1:])
