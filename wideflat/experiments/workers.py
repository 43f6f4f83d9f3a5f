"""Experiments whose pieces are computed by several processes: over the cores of this machine, or over a cluster.

A piece is what can be computed on its own: a training with its measurement (table1, fig2 to fig5, fig7), a setting of
the committee machine on one training subset (fig1, fig6). Each piece is a task of :mod:`wideflat.experiments.sweep`: a
process that makes the experiment again from its options and computes the one piece. It goes on where it was stopped,
is started again when it dies, and leaves its answer in a file; the tables are written by the process that asked.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wideflat.data import DataError
from wideflat.experiments import item as find_item
from wideflat.experiments.engines import cores
from wideflat.experiments.sweep import FolderInUse, Outcome, Task, sweep
from wideflat.files import write_json
from wideflat.progress import Progress

if TYPE_CHECKING:
    from wideflat.experiments.experiment import Experiment

__all__ = ["Answer", "Workers", "report_lost", "slurm_parameters", "work"]

#: Parameters of submitit that are not of one kind of cluster; all others are Slurm's own.
_SHARED = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "cluster")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of a piece.

    Args:
        state: ``done``; ``failed`` after all attempts; or what the piece itself says about it, such as ``in use``.
        reason: More about it.
    """

    state: str
    reason: str = ""


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

    def compute(
        self,
        experiment: Experiment,
        names: Sequence[str],
        after_each: Callable[[], object],
        device: str = "cpu",
        shared: bool = False,
    ) -> dict[str, Answer]:
        """Have pieces of an experiment computed.

        Args:
            experiment: Which; the processes make it again from its item, folder and options.
            names: The pieces.
            after_each: Called whenever one is done, to write the tables.
            device: Where they are computed.
            shared: Whether a piece is held by who computes it, so that the same command may be started twice and share
                the work.

        Returns:
            The answer of each.
        """
        token = secrets.token_hex(4)  # answers of an earlier sweep that was killed are not ours
        for number in itertools.count(1):
            folder = (experiment.folder / ("sweep" if number == 1 else f"sweep-{number}")).absolute()
            tasks = [_task(experiment, name, folder, token) for name in names]
            try:
                outcomes = sweep(
                    tasks,
                    folder,
                    workers=self.number(device),
                    retries=self.retries,
                    engine=self.engine,
                    slurm=self.slurm,
                    environments=self.environments(device),
                    title=experiment.name,
                    say=self.say,
                    on_end=lambda outcome: after_each(),
                )
                break
            except FolderInUse:  # the same command was started twice
                if not shared:
                    raise
            except BaseException:
                for task in tasks:
                    task.done.unlink(missing_ok=True)
                raise
        return {task.name: _answer(task, outcome) for task, outcome in zip(tasks, outcomes, strict=True)}


def report_lost(item: str, answers: Mapping[str, Answer]) -> None:
    """Raise if pieces of an item failed for good."""
    lost = {name: answer.reason for name, answer in answers.items() if answer.state == "failed"}
    if lost:
        each = "\n".join(f"  {name}: {reason}" for name, reason in lost.items())
        raise RuntimeError(
            f"{len(lost)} of the pieces of {item} failed and are missing; the same command tries them again:\n{each}"
        )


def _answer(task: Task, outcome: Outcome) -> Answer:
    if outcome.state != "done":
        return Answer("failed", f"{outcome.reason} ({outcome.attempts} attempts; see {outcome.log})")
    answer = Answer(**json.loads(task.done.read_text()))
    task.done.unlink()
    return answer


def _task(experiment: Experiment, name: str, folder: Path, token: str) -> Task:
    answer, status = folder / f"{name}.{token}.answer", folder / f"{name}.progress"
    options = {key: _plain(value) for key, value in dataclasses.asdict(experiment.options).items()}
    where = str(experiment.folder.absolute())
    arguments = [experiment.name, where, experiment.quick, options, name, str(answer), str(status)]
    return Task.call(name, f"{__name__}:work", arguments, answer, status)


def _plain(value: Any) -> Any:
    """What JSON can carry; paths hold wherever the process is started."""
    if isinstance(value, Path):
        return str(value.absolute())
    return list(value) if isinstance(value, tuple) else value


def work(item: str, folder: str, quick: bool, options: dict[str, Any], name: str, answer: str, status: str) -> None:
    """Compute one piece in this process, which was started for it.

    Args:
        item: Name of the experiment.
        folder: Of the experiment.
        quick: The reduced form.
        options: Its options.
        name: Of the piece.
        answer: The file for the answer.
        status: The file for the progress.
    """
    Progress.report_to = Path(status)
    try:
        said = find_item(item).open(folder, quick, **options).compute_piece(name)
    except DataError as error:
        raise FileNotFoundError(str(error)) from error  # it would be the same the next time
    finally:
        Path(status).unlink(missing_ok=True)
    write_json(answer, dataclasses.asdict(said))


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
