"""The loop: epochs, evaluation, snapshots, TensorBoard, timing, events, divergence, stopping and saving.

It is the only place where an epoch is. Alone, on ranks or among jobs that come and go, it is the same
(:mod:`wideflat.training.company`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from wideflat.checks.doors import asks
from wideflat.data import ImageData
from wideflat.environment import now
from wideflat.interruption import Interrupted, stop_requests
from wideflat.presets import Preset
from wideflat.progress import Progress
from wideflat.training.clock import Clock
from wideflat.training.company import Alone, Company
from wideflat.training.options import Options
from wideflat.training.runs import Run
from wideflat.training.training import Diverged, Training

__all__ = ["configuration", "train", "train_in"]

#: Iterations between two looks at whether the training has diverged.
CHECK_EVERY = 50


@dataclasses.dataclass(frozen=True)
class Reporting:
    """What is kept and shown of a training while it goes on.

    Args:
        snapshots: Epochs at whose end the center is kept, for the flatness figures (0: before training).
        checkpoint_minutes: A state is saved after every epoch, and after so many minutes within one.
        tensorboard: Write TensorBoard event files.
        progress: Show progress.
        on_epoch: Called at the end of every epoch with the training and its row of metrics, in every process; what it
            adds to the row is saved with it.
        until: Ends the training early: after the first epoch whose row of metrics it is true for.
        say: Where messages go: resumed, fell back to an older state, a line for each epoch.
    """

    snapshots: Sequence[int] = ()
    checkpoint_minutes: float = 5.0
    tensorboard: bool = True
    progress: bool = True
    on_epoch: Callable[[Training, dict[str, Any]], None] | None = None
    until: Callable[[dict[str, Any]], bool] | None = None
    say: Callable[[str], object] = lambda text: None


@asks
def train(
    preset: Preset,
    out: str | os.PathLike[str],
    data: ImageData,
    options: Options | None = None,
    *,
    device: torch.device | str = "cpu",
    **reporting: Any,
) -> Run:
    """Train a preset in the run directory ``out``; go on where it stopped if it is there already.

    Killed at any moment and started again, it ends with the same weights and the same metrics, bit for bit, as if it
    had not been disturbed (on the same machine with as many threads).

    Args:
        preset: A preset, or what ``dataclasses.replace`` makes of one.
        out: The run directory.
        data: The images, see :func:`wideflat.data.load`.
        options: How to compute.
        device: Where.
        **reporting: What is kept and shown on the way, see :class:`Reporting`.

    Raises:
        Interrupted: After SIGINT or SIGTERM; the state is saved.
        Diverged: If the loss or a weight is not finite or the loss has blown up; the last good state is kept.
        wideflat.training.runs.RunInUse: If another process trains in ``out``.
    """
    run = train_in(Alone(), preset, out, data, options, device=device, **reporting)
    assert run is not None
    return run


@asks
def train_in(
    company: Company,
    preset: Preset,
    out: str | os.PathLike[str],
    data: ImageData,
    options: Options | None = None,
    *,
    device: torch.device | str = "cpu",
    **reporting: Any,
) -> Run | None:
    """`train` in company; every process of it calls this.

    Args:
        company: Who else there is. It is entered and left by whoever made it.
        preset: See `train`, as for all others.
        out: See there. In the company of jobs that come and go it is the folder of their run directories.
        data: See there.
        options: See there.
        device: See there.
        **reporting: See there; messages are said by those who write.

    Returns:
        The run, in processes that keep one on disk; None in others.
    """
    options, reporting_ = options or Options(), Reporting(**reporting)
    company.check(preset)
    with _record(company, preset, out, data, options, reporting_.say) as record:
        finished, saved = company.gather(record.found())[0]
        if finished:
            return record.run
        company.say = record.tell
        state = None if saved is None else company.unpacked(saved)
        training = Training(preset, data, options, company.device(device), company, state)
        if state is not None:
            record.tell(f"resumed {record.path} at epoch {training.tau:.2f} of {preset.epochs}{company.words}")
        elif 0 in reporting_.snapshots and training.step == 0:
            record.snapshot(training, {"epoch": 0})
        with record.reasons(training):
            _Loop(training, record, reporting_).run()
        record.finish(training)
        record.tell(f"finished {record.path}")
        return record.run


@asks
def configuration(preset: Preset, data: ImageData, options: Options) -> dict[str, Any]:
    """All that decides what a training comes to: the configuration of its run."""
    about: dict[str, Any] = {
        "name": data.name,
        "train": len(data.train),
        "test": len(data.test),
        "altered": bool(data.altered),
    }
    if data.digest:  # of data that nobody has published
        about["digest"] = data.digest
    return {"experiment": preset.to_dict(), "options": dataclasses.asdict(options), "data": about}


class _Loop:
    """One training from where it is to its end."""

    def __init__(self, training: Training, record: _Record, reporting: Reporting) -> None:
        self.training, self.record, self.reporting = training, record, reporting
        self.company = training.company
        self.clock = Clock(training, reporting.checkpoint_minutes)

    def run(self) -> None:
        """Iterate until the end, or until there is a reason to stop."""
        training, preset = self.training, self.training.preset
        title = f"{preset.name} {preset.algorithm}"
        shown = self.reporting.progress and self.record.run is not None
        with (
            stop_requests() as stop,
            _tensorboard(self.record.run, training.epoch, self.reporting.tensorboard) as self.write_scalars,
            Progress(title, training.total_steps, shown, before=training.step) as self.bar,
        ):
            ended = self._is_enough(self.record.last_row())
            while training.step < training.total_steps and not ended:
                loss = training.iterate()
                if training.at_epoch_end:
                    ended = self._end_epoch()
                elif training.step % CHECK_EVERY == 0:
                    training.check()
                if self.record.run is not None and self.clock.show_is_due():
                    self.bar.update(training.step, loss=float(loss))
                asked, save = self.company.agree(
                    training.step, training.at_epoch_end, stop[0].name if stop else None, self.clock.save_is_due()
                )
                if (asked or save) and not training.at_epoch_end:
                    training.check()
                    self._save()
                if asked and training.step < training.total_steps and not ended:
                    raise Interrupted(
                        f"stopped by {asked} at epoch {training.tau:.2f} of {preset.epochs}; {self.record.path} is "
                        "saved: start the same command again to go on"
                    )

    def _end_epoch(self) -> bool:
        """What happens when an epoch is over; whether the training is over, too."""
        training, reporting = self.training, self.reporting
        training.check()
        self.clock.trained()
        due = training.epoch % training.options.evaluate_every == 0 or training.step == training.total_steps
        row = {**training.close_epoch(evaluate=due), **self.company.about_epoch()}
        if reporting.on_epoch is not None:
            reporting.on_epoch(training, row)
        self.record.append("metrics", row)
        self.record.append("timing", self.clock.row())
        self.write_scalars(row)
        if training.epoch in reporting.snapshots:
            self.record.snapshot(training, row)
        self._save()
        self.bar.update(training.step, **_figures(row))
        self.record.say(f"epoch {row['epoch']}/{training.preset.epochs}  {_text(row)}")
        return self._is_enough(row)

    def _save(self) -> None:
        self.record.save(self.training)
        self.clock.saved()

    def _is_enough(self, row: dict[str, Any] | None) -> bool:
        """Whether ``until`` ends the training after the epoch of this row; asked where the rows are kept."""
        if self.reporting.until is None:
            return False
        return self.company.gather(row is not None and self.reporting.until(row))[0]


# ---------------------------------------------------------------------------------------------------- what is on disk


@contextlib.contextmanager
def _record(
    company: Company,
    preset: Preset,
    out: str | os.PathLike[str],
    data: ImageData,
    options: Options,
    say: Callable[[str], object],
) -> Iterator[_Record]:
    """The run directory of a training, made if need be and held, by those of its company who write."""
    path = company.folder(out)
    if not company.writes:
        yield _Record(None, path, company, lambda message: None)
        return
    run = Run.create(path, configuration(preset, data, options), build=preset.build_model)
    with run.locked():
        if run.result() is not None:
            say(f"{run.path} is finished already")
        else:
            run.record_environment(data_source=data.source, **company.about)
        yield _Record(run, path, company, say)


class _Record:
    """What is written of a training: by one process, after all have taken part in finding it.

    Args:
        run: Where; None in a process that does not write.
        path: Of the run directory.
        company: Who takes part.
        say: Where messages go.
    """

    def __init__(self, run: Run | None, path: Path, company: Company, say: Callable[[str], object]) -> None:
        self.run, self.path, self.company, self.say = run, path, company, say

    def found(self) -> tuple[bool, Any]:
        """Whether the run is finished, and the state it was left in if not."""
        if self.run is None or self.run.result() is not None:
            return self.run is not None, None
        return False, self.run.restore(self.tell)

    def last_row(self) -> dict[str, Any] | None:
        """The metrics of the last epoch."""
        rows = [] if self.run is None else self.run.metrics()
        return rows[-1] if rows else None

    def append(self, table: str, row: dict[str, Any]) -> None:
        """Add a row to a table."""
        if self.run is not None:
            self.run.append(table, row)

    def note(self, event: str) -> None:
        """Keep what has happened."""
        self.append("events", {"time": now(), "event": event})

    def tell(self, message: str) -> None:
        """Say something and keep it."""
        self.note(message)
        self.say(message)

    def save(self, training: Training) -> None:
        """Save the state of the training."""
        state = self.company.packed(training.state_dict())
        if self.run is not None:
            self.run.save_checkpoint(training.step, state)

    def snapshot(self, training: Training, row: dict[str, Any]) -> None:
        """Keep the center of this epoch."""
        center = training.center(len(training.data.train))
        if self.run is not None:
            self.run.save_model(center, row, epoch=training.epoch)

    def finish(self, training: Training) -> dict[str, Any]:
        """Save the final model: the center, batch norm refreshed on all training images, with its errors."""
        center = training.center(len(training.data.train))
        test, fit = training.scores_of(center, "test"), training.scores_of(center, "train")
        result = {
            "epoch": training.epoch,
            "test_error": test.errors[0],
            "test_loss": test.losses[0],
            "train_error": fit.errors[0],
            "train_loss": fit.losses[0],
            **training.replica_errors(),
        }
        if self.run is not None:
            self.run.save_model(center, result)
        return result

    @contextlib.contextmanager
    def reasons(self, training: Training) -> Iterator[None]:
        """Keep why a training ended before its end."""
        try:
            yield
        except Interrupted as interruption:
            self.note(str(interruption))
            raise
        except Diverged as reason:
            message = (
                f"stopped because {reason}. {self.path} keeps the last good state and all metrics up to it. Try a "
                "smaller --lr (or --gamma0) with another --out."
            )
            self.note(message)
            raise Diverged(message) from None


# ----------------------------------------------------------------------------------------------------- what is shown


@contextlib.contextmanager
def _tensorboard(run: Run | None, epoch: int, enabled: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes the numbers of a row as TensorBoard scalars over the epoch."""
    if not enabled or run is None:
        yield lambda row: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield lambda row: None
        return
    writer = SummaryWriter(run.path / "tensorboard", purge_step=epoch + 1 if epoch else None)

    def write(row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, list):
                for a, item in enumerate(value):
                    writer.add_scalar(f"{name}/{a}", item, row["epoch"])
            elif name != "epoch" and value is not None:
                writer.add_scalar(name, value, row["epoch"])
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


def _figures(row: dict[str, Any]) -> dict[str, object]:
    """What the progress line shows of a row."""
    shown: dict[str, object] = {"loss": row["train_loss"], "train": f"{100 * row['train_error']:.2f}%"}
    if "test_error" in row:
        shown["test"] = f"{100 * row['test_error']:.2f}%"
    for name in ("distance", "gamma", "lr"):
        if row.get(name) is not None:
            shown[name] = row[name]
    return shown


def _text(row: dict[str, Any]) -> str:
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in _figures(row).items())
