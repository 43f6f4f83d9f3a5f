"""Experiments whose pieces are computed by several processes: over the cores of this machine, or over a cluster.

A piece is what can be computed on its own: a training with its measurement (table1, fig2 to fig5, fig7), a setting of
the committee machine on one training subset (fig1, fig6). Each piece is a task of :mod:`wideflat.experiments.sweep`: a
process that makes the experiment again from its options and computes the one piece. It goes on where it was stopped,
is started again when it dies, and leaves its answer in a file; the tables are written by the process that asked.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from wideflat.data import DataError
from wideflat.experiments.experiment import Experiment
from wideflat.experiments.sweep import FolderInUse, Task, cores, sweep
from wideflat.files import atomic_write
from wideflat.progress import Progress

__all__ = ["Answer", "PieceExperiment", "Workers", "slurm_parameters", "work"]

#: Parameters of submitit that are not of one kind of cluster; all others are Slurm's own.
_SHARED = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "cluster")


@dataclasses.dataclass(frozen=True)
class Workers:
    """Processes that compute the pieces of experiments.

    Args:
        count: How many at a time; None for one a core (one a GPU where there are some; on Slurm one a piece).
        engine: ``"local"``: on this machine; ``"slurm"``: every piece is a job of the cluster.
        slurm: Parameters of submitit's executor.
        retries: How often a piece that fails is started again.
        say: Where messages go.
    """

    count: int | None = None
    engine: str = "local"
    slurm: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    retries: int = 2
    say: Callable[[str], object] = lambda text: print(text, file=sys.stderr)

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ValueError(f"workers must be >= 1, got {self.count}")
        if self.retries < 0:
            raise ValueError(f"retries must be >= 0, got {self.retries}")
        if self.slurm and self.engine != "slurm":
            raise ValueError(f"options of Slurm ({', '.join(self.slurm)}) are for --engine slurm")

    def number(self, device: str) -> int | None:
        """How many at a time; None for as many as there are pieces."""
        if self.count is not None or self.engine != "local":
            return self.count
        if device == "cpu":
            return cores()
        return max(torch.cuda.device_count(), 1) if device == "cuda" else 1

    def environments(self, device: str) -> list[dict[str, str]]:
        """A GPU for each worker."""
        gpus = torch.cuda.device_count() if device == "cuda" and self.engine == "local" else 0
        return [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(gpus)] if gpus > 1 else []


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of a piece.

    Args:
        state: ``done``; ``failed`` after all attempts; or what the piece itself says about it, such as ``in use``.
        reason: More about it.
    """

    state: str
    reason: str = ""


class PieceExperiment(Experiment):
    """An experiment that several processes can compute.

    Attributes:
        workers: The processes that compute it; None to compute it in this one.
        options_given: What its constructor was given besides folder and quick, so that others can make it again.
        device: Where to compute.
        pieces_are_locked: Whether a piece is held by who computes it, so that the same command may be started twice and
            share the work.
    """

    workers: Workers | None = None
    options_given: Mapping[str, Any]
    device = "cpu"
    pieces_are_locked = False

    def distribute(self, workers: Workers, options: Mapping[str, Any]) -> None:
        """Let other processes compute the pieces.

        Args:
            workers: Which.
            options: What the constructor of this experiment was given besides ``folder`` and ``quick``.
        """
        self.workers, self.options_given = workers, options
        self.lost: dict[str, str] = {}

    @abc.abstractmethod
    def do_piece(self, name: str) -> Answer:
        """Compute one piece in this process, or find out that it cannot be."""

    def ask_workers(self, names: Sequence[str], after_each: Callable[[], object]) -> dict[str, Answer]:
        """Have pieces computed by other processes.

        Args:
            names: The pieces.
            after_each: Called whenever one is done, to write the tables.

        Returns:
            The answer of each. Those that failed for good are also in ``lost``.
        """
        workers = self.workers
        assert workers is not None
        token = secrets.token_hex(4)  # answers of an earlier sweep that was killed are not ours
        for number in itertools.count(1):
            folder = (self.folder / ("sweep" if number == 1 else f"sweep-{number}")).absolute()
            tasks = [self._task(name, folder, token) for name in names]
            try:
                outcomes = sweep(
                    tasks,
                    folder,
                    workers=workers.number(self.device),
                    retries=workers.retries,
                    engine=workers.engine,
                    slurm=workers.slurm,
                    environments=workers.environments(self.device),
                    title=self.name,
                    say=workers.say,
                    on_end=lambda outcome: after_each(),
                )
                break
            except FolderInUse:  # the same command was started twice
                if not self.pieces_are_locked:
                    raise
                continue
            except BaseException:
                for task in tasks:
                    task.done.unlink(missing_ok=True)
                raise
        answers = {}
        for task, outcome in zip(tasks, outcomes, strict=True):
            if outcome.state == "done":
                answers[outcome.name] = Answer(**json.loads(task.done.read_text()))
                task.done.unlink()
            else:
                answers[outcome.name] = Answer("failed", outcome.reason)
                self.lost[outcome.name] = f"{outcome.reason} ({outcome.attempts} attempts; see {outcome.log})"
        return answers

    def report_lost(self) -> None:
        """Raise if pieces failed for good."""
        if self.workers is not None and self.lost:
            each = "\n".join(f"  {name}: {reason}" for name, reason in self.lost.items())
            raise RuntimeError(
                f"{len(self.lost)} of the pieces of {self.name} failed and are missing; the same command tries them "
                f"again:\n{each}"
            )

    def _task(self, name: str, folder: Path, token: str) -> Task:
        answer, status = folder / f"{name}.{token}.answer", folder / f"{name}.progress"
        options = {key: _plain(value) for key, value in self.options_given.items()}
        arguments = [self.name, str(self.folder.absolute()), self.quick, options, name, str(answer), str(status)]
        return Task.call(name, "wideflat.experiments.pieces:work", arguments, answer, status)


def _plain(value: Any) -> Any:
    """As JSON can carry it; paths from the root, since a node of a cluster may start elsewhere."""
    if isinstance(value, Path):
        return str(value.absolute())
    return list(value) if isinstance(value, tuple) else value


def work(item: str, folder: str, quick: bool, options: dict[str, Any], name: str, answer: str, status: str) -> None:
    """Compute one piece in this process, which was started for it.

    Args:
        item: Name of the experiment.
        folder: Of the experiment.
        quick: The reduced form.
        options: Its other options.
        name: Of the piece.
        answer: The file for the answer.
        status: The file for the progress.
    """
    from wideflat.experiments import item as find

    Progress.report_to = Path(status)
    experiment = find(item)(Path(folder), quick, **options)
    if not isinstance(experiment, PieceExperiment):
        raise ValueError(f"{item} is not computed in pieces")
    try:
        said = experiment.do_piece(name)
    except DataError as error:
        raise FileNotFoundError(str(error)) from error  # it would be the same the next time
    finally:
        Path(status).unlink(missing_ok=True)
    with atomic_write(Path(answer)) as file:
        json.dump(dataclasses.asdict(said), file)


def slurm_parameters(options: Sequence[str]) -> dict[str, Any]:
    """Parameters of submitit from ``KEY=VALUE`` texts; what only Slurm knows gets its prefix.

    Example:
        >>> slurm_parameters(["partition=gpu", "timeout_min=600"])
        {'slurm_partition': 'gpu', 'timeout_min': 600}
    """
    parameters: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key or not value:
            raise ValueError(
                f"an option of Slurm is KEY=VALUE, such as partition=gpu or timeout_min=600; got {option!r}"
            )
        name = key if key in _SHARED or key.startswith("slurm_") else f"slurm_{key}"
        parameters[name] = int(value) if value.isdigit() else value
    return parameters
