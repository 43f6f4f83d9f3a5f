"""Many runs, over the cores of one machine or over a cluster: resumable, every failure reported and retried, none lost.

A task is a command line that makes a file. A task whose file is there is done; so a sweep that was interrupted, killed
or only half successful is started again by the same call, and does what is missing. Every task is a process of its own,
so that a run that crashes, is killed for its memory or hangs takes nothing else with it.

On a cluster the tasks become jobs of Slurm through submitit (``pip install 'wideflat[sweep]'``). Slurm, and not Ray,
because these tasks are long, independent and save their own state: what is missing is a queue, which the cluster has,
and not a system of its own that must stay alive as long as the sweep does.

`wideflat reproduce` makes its sweeps of this: see :mod:`wideflat.experiments.workers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wideflat.checks.doors import asks
from wideflat.experiments.engines import END_WITH_SWEEP, Engine, Job, Processes, Slurm, cores
from wideflat.files import hold
from wideflat.interruption import terminated_like_interrupted
from wideflat.progress import Progress

__all__ = ["FolderInUse", "Outcome", "Task", "sweep"]

#: The exit code of a task that it is no use to start again: its command line is wrong, its data are not there.
HOPELESS = 2
#: Seconds that tasks have for saving their state when they are asked to stop.
PATIENCE = 30.0


class FolderInUse(RuntimeError):
    """Another sweep has its logs in this folder."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One run of a sweep.

    Args:
        name: Unique in the sweep; also the name of its log.
        command: The command line. Started again after a failure, it should go on where it stopped. Exit code 2 says
            that this is no use.
        done: The file that is there when, and only when, the task is done.
        status: A file in which the task leaves how far it is (``Progress.report_to``), to be shown.

    Example:
        >>> task = Task.call("square", "math:pow", [3, 2], done="square.json")
        >>> task.command[1:4]
        ['-m', 'wideflat.experiments.sweep', 'math:pow']
    """

    name: str
    command: Sequence[str]
    done: Path
    status: Path | None = None

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
    def call(
        cls,
        name: str,
        function: str,
        arguments: Sequence[Any],
        done: str | os.PathLike[str],
        status: Path | None = None,
    ) -> Task:
        """A call of ``module:function`` with arguments that JSON can carry; the function makes the file ``done``.

        ``ValueError``, ``FileNotFoundError`` and ``ModuleNotFoundError`` are taken for errors that would come again.
        """
        command = [sys.executable, "-m", "wideflat.experiments.sweep", function, json.dumps(list(arguments))]
        return cls(name, command, Path(done), status)


@dataclasses.dataclass
class Outcome:
    """How a task ended.

    Args:
        name: Of the task.
        log: What it has written.
        state: ``done``, ``failed`` (after all attempts), ``interrupted``, or ``waiting`` (never started).
        attempts: How often it was started in this sweep; 0 if it was done before.
        reason: Why the last attempt failed.
    """

    name: str
    log: Path
    state: str = "waiting"
    attempts: int = 0
    reason: str = ""


@asks
def sweep(
    tasks: Sequence[Task],
    folder: str | os.PathLike[str],
    *,
    workers: int | None = None,
    retries: int = 1,
    timeout: float | None = None,
    engine: str = "local",
    slurm: Mapping[str, Any] | None = None,
    environments: Sequence[Mapping[str, str]] = (),
    title: str = "sweep",
    progress: bool = True,
    say: Callable[[str], object] = lambda text: None,
    on_end: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Run all tasks that are not done yet.

    Args:
        tasks: What to run; started in this order.
        folder: For the logs, one a task, and the journal ``sweep.jsonl`` of everything that was started and ended.
        workers: Tasks at a time; by default one a core, on Slurm all. Each gets its share of the threads
            (``OMP_NUM_THREADS`` if that is set, or one a core).
        retries: How often a task that fails is started again, after all others had their turn.
        timeout: Seconds after which an attempt is ended and counts as failed.
        engine: ``"local"``, or ``"slurm"`` for a cluster: every task is a job.
        slurm: Parameters of submitit's executor (``slurm_partition``, ``timeout_min``, ``mem_gb``, ...); ``cluster``
            is ``"slurm"``, or ``"local"`` to try it without a cluster.
        environments: More environment variables for each of the workers on this machine, such as which GPU is its.
        title: What the progress line calls it.
        progress: Show progress: of the sweep and of every task that runs.
        say: Where messages go: each failure when it happens.
        on_end: Called with the outcome of each task that has ended for good.

    Returns:
        The outcome of every task, in the order given. None is left out.

    Raises:
        ValueError: If two tasks have one name or make one file.
        FolderInUse: If another sweep is using the folder.
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
    outcomes = {task.name: Outcome(task.name, folder / f"{task.name}.log") for task in tasks}
    queue = []
    for task in tasks:
        if task.done.exists():
            outcomes[task.name].state = "done"
        else:
            queue.append(task)
    if not queue:
        return list(outcomes.values())
    bar = Progress(title, len(tasks), progress, before=len(tasks) - len(queue))
    with _journal(folder) as write, terminated_like_interrupted(), bar:
        workers = min(workers or (cores() if engine == "local" else len(queue)), len(queue))
        runs_on: Engine = Processes(workers, environments)
        if engine == "slurm":
            runs_on = Slurm(folder / "jobs", slurm or {})
        _Sweep(outcomes, retries, timeout, write, bar, say, on_end).run(queue, workers, runs_on)
    return list(outcomes.values())


@dataclasses.dataclass
class _Running:
    task: Task
    job: Job
    slot: int
    since: float
    part: float = 0.0


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
        on_end: Callable[[Outcome], object],
    ) -> None:
        self.outcomes, self.retries, self.timeout = outcomes, retries, timeout
        self.write, self.bar, self.say, self.on_end = write, bar, say, on_end
        self.running: dict[str, _Running] = {}

    def run(self, queue: list[Task], workers: int, engine: Engine) -> None:
        queue, shown = list(queue), 0.0
        try:
            while queue or self.running:
                while queue and len(self.running) < workers:
                    slot = min(set(range(workers)) - {running.slot for running in self.running.values()})
                    self._start(queue.pop(0), slot, engine)
                queue += self._look()
                if time.monotonic() - shown > 0.5:
                    self._show()
                    shown = time.monotonic()
                time.sleep(engine.interval)
            self._show()  # all of it
        except BaseException as error:  # Ctrl-C, mostly
            self._stop(error)
            raise

    def _start(self, task: Task, slot: int, engine: Engine) -> None:
        outcome = self.outcomes[task.name]
        outcome.attempts += 1
        if task.status is not None:
            task.status.unlink(missing_ok=True)
        job = engine.start(task.command, outcome.log, slot)
        self.running[task.name] = _Running(task, job, slot, time.monotonic())
        about = {"attempt": outcome.attempts, "job": job.name, "command": list(task.command)}
        self.write(task=task.name, event="started", **about)

    def _look(self) -> list[Task]:
        """Take note of what has ended; returns what is to be started again."""
        again = []
        for running in list(self.running.values()):
            task, job = running.task, running.job
            late = self.timeout is not None and time.monotonic() - running.since > self.timeout
            code = job.poll()
            if code is None and late:
                job.stop(patience=5.0)
                code = job.poll()
            if code is None:
                continue
            del self.running[task.name]
            self.bar.end_part(task.name)
            outcome = self._ended(task, code, late)
            self.write(task=task.name, event=outcome.state, attempt=outcome.attempts, reason=outcome.reason)
            if outcome.state == "waiting":
                again.append(task)
            else:
                self.on_end(outcome)
        return again

    def _ended(self, task: Task, code: int, late: bool) -> Outcome:
        """Done, to be started again, or failed for good."""
        outcome = self.outcomes[task.name]
        if task.done.exists() and code == 0:
            outcome.state, outcome.reason = "done", ""
            return outcome
        outcome.reason = _reason(task, code, self.timeout if late else None, outcome.log)
        worth_it = outcome.attempts <= self.retries and (code != HOPELESS or late)
        outcome.state = "waiting" if worth_it else "failed"
        more = "is started again" if worth_it else f"is given up; see {outcome.log}"
        self.say(f"{task.name} failed ({outcome.reason}) and {more}")
        return outcome

    def _show(self) -> None:
        """How far all of it is, and how far each task that runs."""
        for name, running in self.running.items():
            status = None if running.task.status is None else Progress.read(running.task.status)
            if status is None:
                self.bar.part(name, 0, None, "starting" if running.task.status is not None else "")
                continue
            completed, total = status["completed"], status["total"]
            self.bar.part(name, completed, total, status["figures"])
            if total:
                if not running.part and self.outcomes[name].attempts == 1:
                    self.bar.before += status["before"] / total  # by an earlier sweep
                running.part = max(running.part, min(completed / total, 1.0))
        states = [outcome.state for outcome in self.outcomes.values()]
        ended = states.count("done") + states.count("failed")
        figures = {"failed": states.count("failed")} if "failed" in states else {}
        self.bar.update(round(ended + sum(running.part for running in self.running.values()), 2), **figures)

    def _stop(self, error: BaseException) -> None:
        """Ask all that runs to stop, so that it saves its state; do not wait for ever, nor after another Ctrl-C."""
        if self.running:
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"stopping because of {error!r}"
            self.say(f"{why}: {', '.join(self.running)} may save and stop; once more to end at once")
        patience = PATIENCE
        try:
            for running in self.running.values():
                running.job.ask()
            deadline = time.monotonic() + PATIENCE
            for running in self.running.values():
                running.job.stop(patience=max(deadline - time.monotonic(), 0.0))
        except KeyboardInterrupt:
            patience = 0.0
        finally:
            for name, running in self.running.items():
                if patience == 0.0:
                    running.job.stop(patience=patience)
                self.outcomes[name].state = "interrupted"
                self.write(task=name, event="interrupted", attempt=self.outcomes[name].attempts)


def _reason(task: Task, code: int, timeout: float | None, log: Path) -> str:
    if timeout is not None:
        return f"no end after {timeout:g} s"
    if code == 0:
        return f"it ended without making {task.done}"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    said = log.read_text(errors="replace").strip().rpartition("\n")[2] if log.exists() else ""
    return f"exit code {code}: {said[:300]}" if re.match(r"(wideflat|[\w.]*Error): ", said) else f"exit code {code}"


def _refuse_twins(tasks: Sequence[Task]) -> None:
    for what, values in (("name", [task.name for task in tasks]), ("file", [str(task.done) for task in tasks])):
        twins = sorted({value for value in values if values.count(value) > 1})
        if twins:
            raise ValueError(f"every task needs a {what} of its own; several have {', '.join(twins)}")


@contextlib.contextmanager
def _journal(folder: Path) -> Iterator[Callable[..., None]]:
    """A function that appends a line to ``sweep.jsonl``; the folder is held meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "sweep.jsonl", "a", encoding="utf-8") as file:
        if not hold(file):
            raise FolderInUse(f"another sweep is using {folder}: wait for it, or give this one another folder")

        def write(**line: Any) -> None:
            file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **line}) + "\n")
            file.flush()

        yield write


# ---------------------------------------------------------------------------------------- python -m ... module:function


def _call(function: str, arguments: str) -> int:
    module, _, name = function.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        target(*json.loads(arguments))
    except KeyboardInterrupt as interruption:  # SIGTERM, after what was computed is saved
        print(f"wideflat: {str(interruption) or 'interrupted'}", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        traceback.print_exc()
        print(f"wideflat: {error}", file=sys.stderr)
        return HOPELESS
    return 0


def _end_with_the_sweep() -> None:
    """Save and stop when the process that started this one has died without a word."""

    def watch() -> None:
        if not os.read(0, 1):
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="wideflat-sweep", daemon=True).start()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if END_WITH_SWEEP in os.environ:
        _end_with_the_sweep()
    sys.exit(_call(*sys.argv[1:]))
