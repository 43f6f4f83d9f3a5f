"""Progress of long work, with an estimate of what is left."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from wideflat.checks import flag
from wideflat.notebook import NotebookBar

__all__ = ["Progress"]


#: Characters of the live line: the most of the description, the bar, the time left, and what lies between columns.
DESCRIPTION, BAR, TIME, GAPS = 26, 12, 8, 5


class Progress:
    """A progress line on standard error: what, how far, how long still, and a few figures.

    On a terminal with ``rich`` installed, and in a notebook, it is a live bar. Elsewhere (a pipe, a log file, no
    ``rich``) it is a plain line now and then. It writes nothing when ``enabled`` is false, and nothing for work shorter
    than a second.

    Work that others do at the same time has lines of its own below: see `part`.

    Args:
        description: What is being done.
        total: How many units of work there are, or None if that is not known.
        enabled: False for silence.
        before: How many of them were done before, by a run that this one continues: they count as done, but say
            nothing about how fast the work goes.

    Example:
        >>> with Progress("sweep", total=3, enabled=False) as progress:
        ...     for _ in range(3):
        ...         progress.advance(loss=0.5)
        >>> progress.completed
        3
    """

    #: Seconds between two plain lines.
    plain_interval = 15.0
    #: Silence for the whole process, as ``wideflat --quiet`` asks for.
    silent = False
    #: A file that this process leaves its progress in, for another process to show (see :meth:`read`).
    report_to: ClassVar[Path | None] = None

    def __init__(self, description: str, total: float | None = None, enabled: bool = True, before: float = 0) -> None:
        self.description = description
        self.total = total
        self.completed = self.before = before
        self.enabled = flag("progress", enabled) and not Progress.silent
        self._figures: dict[str, object] = {}
        self._start = self._last_line = time.monotonic()
        self._last_completed = before
        self._last_report = 0.0
        self._bar: Any = None
        self._task: Any = None
        self._parts: dict[str, tuple[float, float | None, str]] = {}
        self._part_tasks: dict[str, Any] = {}

    def __enter__(self) -> Progress:
        self._start = self._last_line = time.monotonic()
        if self.enabled:
            self._bar = NotebookBar.here() or (_rich_bar() if sys.stderr.isatty() else None)
            if self._bar is not None:
                self._bar.start()
                description = _shortened(self.description, DESCRIPTION)
                self._task = self._bar.add_task(description, total=self.total, completed=self.before, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self.enabled and self._last_line > self._start and self.completed != self._last_completed:
            self._plain_line()

    def advance(self, amount: float = 1, **figures: object) -> None:
        """Count ``amount`` units as done and show ``figures`` (name=value) beside the bar."""
        self.update(self.completed + amount, **figures)

    def update(self, completed: float, **figures: object) -> None:
        """Set how many units are done and show ``figures`` (name=value) beside the bar."""
        self.completed = completed
        self._figures.update(figures)
        self._report()
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=completed, total=self.total, figures=self._beside(self._text()))
        elif time.monotonic() - self._last_line > self.plain_interval:
            self._plain_line()

    # ---- parts that are done at the same time

    def part(self, name: str, completed: float, total: float | None = None, figures: str = "") -> None:
        """Show how far a part is, in a line of its own, until `end_part`.

        Args:
            name: Of the part.
            completed: How many units of it are done.
            total: Of how many.
            figures: What to show beside it.
        """
        self._parts[name] = completed, total, figures
        if self._bar is not None:
            if name not in self._part_tasks:
                description = _shortened(f"  {name}", DESCRIPTION)
                self._part_tasks[name] = self._bar.add_task(description, total=total, figures="")
            self._bar.update(self._part_tasks[name], completed=completed, total=total, figures=self._beside(figures))

    def end_part(self, name: str) -> None:
        """Take the line of a part away."""
        self._parts.pop(name, None)
        if self._bar is not None and name in self._part_tasks:
            self._bar.remove_task(self._part_tasks.pop(name))

    # ---- from process to process

    def _report(self) -> None:
        path = Progress.report_to
        if path is None or (time.monotonic() - self._last_report < 1.0 and self.completed != self.total):
            return
        self._last_report = time.monotonic()
        content = {name: getattr(self, name) for name in ("description", "completed", "before", "total")}
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps({**content, "figures": self._text()}))
        part.replace(path)

    @staticmethod
    def read(path: Path) -> dict[str, Any] | None:
        """What another process has left in ``report_to``: description, completed, before, total, figures; or None."""
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    # ---- how it looks

    def _text(self) -> str:
        return "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self._figures.items()
        )

    def _beside(self, figures: str) -> str:
        """As many of the figures as fit beside bar, count and time left, which are always shown."""
        if isinstance(self._bar, NotebookBar):
            return figures
        widths = [min(len(task.description), DESCRIPTION) for task in self._bar.tasks]
        counts = [2 * len(f"{task.total or 0:g}") + 1 for task in self._bar.tasks]
        return _shortened(figures, self._bar.console.width - max(widths) - max(counts) - BAR - TIME - GAPS)

    def _plain_line(self) -> None:
        self._last_line, self._last_completed = time.monotonic(), self.completed
        elapsed = self._last_line - self._start
        far = f"{round(self.completed, 2):g}"
        if self.total:
            far += f"/{self.total:g}"
            if self.before < self.completed < self.total:
                pace = elapsed / (self.completed - self.before)
                far += f", {_duration(pace * (self.total - self.completed))} left"
        print(f"{self.description}: {far}, {_duration(elapsed)} so far  {self._text()}".rstrip(), file=sys.stderr)
        for name, (completed, total, figures) in self._parts.items():
            far = f"{100 * completed / total:.0f} %" if total else f"{completed:g}"
            print(f"  {name}: {far}  {figures}".rstrip(), file=sys.stderr)


def _shortened(text: str, width: int) -> str:
    """A text in at most ``width`` characters, cut between words.

    >>> _shortened("loss 1.463  train 52.65%  test 53.55%", 24), _shortened("loss", 24), _shortened("loss", 0)
    ('loss 1.463  train ...', 'loss', '')
    """
    if len(text) <= width:
        return text
    cut = text[: max(width - 3, 0)]
    return f"{cut[: cut.rfind(' ') + 1]}..." if cut.rfind(" ") > 0 else f"{cut}..." if len(cut) > 3 else ""


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _rich_bar():  # type: ignore[no-untyped-def] # rich is optional, and so are its types
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        return None
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=BAR),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=Console(stderr=True),
    )
