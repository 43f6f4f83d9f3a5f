"""Where the tasks of a sweep run: as processes of this machine, or as jobs of a Slurm cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

__all__ = ["END_WITH_SWEEP", "Engine", "Job", "Processes", "Slurm", "cores"]

#: In the environment of tasks on this machine: when their standard input is closed, the sweep has died.
END_WITH_SWEEP = "WIDEFLAT_END_WITH_SWEEP"


class Job(Protocol):
    """A command that was started."""

    name: str

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def ask(self) -> None:
        """Let it save and stop."""

    def stop(self, patience: float) -> None:
        """Let it save and stop, and end it after ``patience`` seconds."""


class Engine(Protocol):
    """What starts commands."""

    #: Seconds between two looks at what runs.
    interval: float

    def start(self, command: Sequence[str], log: Path, slot: int) -> Job:
        """Start a command.

        Args:
            command: The command line.
            log: The file that all it writes is appended to.
            slot: Which of the workers does it, from 0.
        """


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------------------------------------------------- this machine


class Processes:
    """Processes of this machine, with the threads divided among them.

    Args:
        workers: How many at a time.
        environments: More environment variables for each of the workers, such as which GPU is its.
    """

    interval = 0.05

    def __init__(self, workers: int, environments: Sequence[Mapping[str, str]] = ()) -> None:
        self.threads = max(int(os.environ.get("OMP_NUM_THREADS", cores())) // workers, 1)
        self.environments = environments

    def start(self, command: Sequence[str], log: Path, slot: int) -> Job:
        """Start a command; see :class:`Engine`."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), END_WITH_SWEEP: "1"}
        if self.environments:
            environment |= self.environments[slot % len(self.environments)]
        with open(log, "ab") as file:
            return _Process(command, file, environment)


class _Process:
    """A process with its children in a group of their own."""

    def __init__(self, command: Sequence[str], log: IO[bytes], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,  # which nobody writes to: it ends when this process does
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        self.name = f"process {self.process.pid}"
        self.asked = False

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and self.process.stdin is not None:
            self.process.stdin.close()
        return code

    def ask(self) -> None:
        """Let it save and stop; asked twice, it would not save."""
        if self.poll() is None and not self.asked:
            self.asked = True
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
        self.poll()


# ---------------------------------------------------------------------------------------------------------- a cluster


class Slurm:
    """Jobs of a Slurm cluster, through submitit.

    Args:
        folder: For submitit's own files; on a disk that the nodes share.
        parameters: Of submitit's executor (``slurm_partition``, ``timeout_min``, ``mem_gb``, ...); ``cluster`` is
            ``"slurm"``, or ``"local"`` to try it without a cluster.
    """

    interval = 0.5

    def __init__(self, folder: Path, parameters: Mapping[str, Any]) -> None:
        try:
            import submitit
        except ModuleNotFoundError:
            raise ModuleNotFoundError("engine=\"slurm\" needs submitit: pip install 'wideflat[sweep]'") from None
        own = dict(parameters)
        self.executor = submitit.AutoExecutor(folder=folder, cluster=own.pop("cluster", None))
        self.executor.update_parameters(**{"name": "wideflat", **own})

    def start(self, command: Sequence[str], log: Path, slot: int) -> Job:
        """Submit a command; see :class:`Engine`."""
        return _SlurmJob(self.executor.submit(_run_on_node, list(command), str(log)))


class _SlurmJob:
    def __init__(self, job: Any) -> None:
        self.job = job
        self.name = f"job {job.job_id}"

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


def _run_on_node(command: list[str], log: str) -> int:
    with open(log, "ab") as file:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode
