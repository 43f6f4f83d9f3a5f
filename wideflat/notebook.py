"""How results look in a notebook: a table and a figure, rows for pandas, several of them in one figure, a bar."""

from __future__ import annotations

import base64
import html
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

from wideflat.checks import shown, warn_user
from wideflat.checks.options import text

__all__ = ["NotebookBar", "Result", "axes_or_new", "new_axes", "plot", "settings_shown"]

#: Rows of a table in a notebook; the rest is counted.
MOST_ROWS = 40


class Result:
    """What measures return: shown as text in a terminal, as a table with a figure in a notebook.

    A result has ``_columns()``, the names and values of its table, ``_remarks()``, sentences to read with it, and
    ``plot(ax, label=...)``.

    Example:
        >>> class Line(Result):
        ...     def _columns(self):
        ...         return {"x": [1.0], "y": [0.5]}
        >>> Line()._repr_html_()
        '<table><thead><tr><th>x</th><th>y</th></tr></thead><tbody><tr><td>1</td><td>0.5</td></tr></tbody></table>'
    """

    def _columns(self) -> Mapping[str, Sequence[Any]]:
        raise NotImplementedError

    def _remarks(self) -> list[str]:
        return []

    def __repr__(self) -> str:
        return str(self)

    def to_pandas(self) -> Any:
        """The table as a ``pandas.DataFrame``."""
        try:
            import pandas
        except ImportError:
            raise ModuleNotFoundError("to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame({name: list(values) for name, values in self._columns().items()})

    def _repr_html_(self) -> str:
        columns = self._columns()
        rows = list(zip(*columns.values(), strict=True))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_short(value))}</td>' for value in row)}</tr>" for row in rows[:MOST_ROWS]
        )
        rest = [f"{len(rows) - MOST_ROWS} more rows: to_pandas() has all"] if len(rows) > MOST_ROWS else []
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in [*rest, *self._remarks()] if note)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}{self._picture()}"

    def _picture(self) -> str:
        """The figure as an image within the page; empty where it cannot be drawn."""
        draw = getattr(self, "plot", None)
        if draw is None:
            return ""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return ""
        figure = Figure(figsize=(5.2, 3.3), layout="constrained")
        draw(figure.add_subplot())
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=110)
        data = base64.b64encode(content.getvalue()).decode("ascii")
        return f'<img alt="{type(self).__name__} drawn" src="data:image/png;base64,{data}">'


def settings_shown(optimizer: Any) -> str:
    """What an optimizer with a center says of itself: what it is around, where it is, its settings.

    Args:
        optimizer: An `wideflat.EntropySGD` or one of its kind.
    """
    hidden = {"params", "step", "position", "evaluating", "seed", "initial_lr"}
    lines = []
    for group in optimizer.param_groups:
        settings = {name: value for name, value in group.items() if name not in hidden and value is not None}
        weights = sum(p.numel() for p in group["params"])
        words = ", ".join(f"{n}={v:g}" if isinstance(v, float) else f"{n}={v}" for n, v in settings.items())
        lines.append(f"  {weights:,} weights: {words}")
    state = "at its center" if optimizer.at_center else "within a cycle"
    inner = type(optimizer.inner[0]).__name__ if optimizer.inner else "none"
    steps = optimizer.param_groups[0]["step"]
    return "\n".join([f"{type(optimizer).__name__} around {inner}, {state}, after {steps} steps", *lines])


def axes_or_new(ax: Any) -> Any:
    """Axes of matplotlib that were given, or new ones.

    >>> axes_or_new("x")
    Traceback (most recent call last):
    ...
    TypeError: ax must be axes of matplotlib, or None for new ones; got 'x'
    """
    if ax is not None and not callable(getattr(type(ax), "errorbar", None)):
        raise TypeError(f"ax must be axes of matplotlib, or None for new ones; got {shown(ax)}")
    return new_axes() if ax is None else ax


def new_axes() -> Any:
    """Axes of a new figure of matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ModuleNotFoundError("drawing needs matplotlib: pip install matplotlib") from None
    return plt.subplots()[1]


def plot(*results: Any, labels: Sequence[str] | None = None, ax: Any = None, **named: Any) -> Any:
    """Draw several results of one kind into one figure, with a legend.

    Args:
        *results: Profiles of the local energy, curves of the local entropy, free entropies: anything with a
            ``plot(ax, label=...)`` of its own, all of one type.
        labels: A name for each of them; 1, 2, ... when left out.
        ax: Axes of matplotlib; by default those of a new figure.
        **named: Further results, with their names: ``plot(SGD=first, eSGD=second)``.

    Returns:
        The axes.

    Example:
        >>> import matplotlib.figure
        >>> from wideflat import LocalEnergy
        >>> a, b = (LocalEnergy([0.0, 0.5], [0.0, rise], [0.0, 0.01], baseline=0.02) for rise in (0.1, 0.2))
        >>> ax = plot(SGD=b, eSGD=a, ax=matplotlib.figure.Figure().add_subplot())
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['SGD', 'eSGD']
    """
    if labels is not None and (isinstance(labels, str) or not isinstance(labels, Sequence)):
        raise TypeError(f"labels must be a sequence of names, got {shown(labels)}")
    if labels is not None and len(labels) != len(results):
        raise ValueError(f"labels must name each of the {len(results)} results, got {shown(labels)}")
    names = [str(text("a label", each)) for each in labels or range(1, len(results) + 1)]
    drawn = dict(zip(names, results, strict=True)) | named
    if not drawn or len(drawn) != len(names) + len(named):
        raise ValueError("plot needs at least one result, and every one a label of its own")
    kinds = {type(result).__name__ for result in drawn.values()}
    if len(kinds) > 1 or not all(isinstance(result, Result) for result in drawn.values()):
        raise TypeError(
            f"plot draws results of one kind that have a plot() of their own, got {', '.join(sorted(kinds))}"
        )
    _warn_where_not_comparable(drawn)
    ax = axes_or_new(ax)
    for label, result in drawn.items():
        result.plot(ax, label=label)
    ax.legend()
    return ax


def _warn_where_not_comparable(drawn: Mapping[str, Any]) -> None:
    (first, reference), *others = drawn.items()
    for name, result in others:
        if hasattr(result, "compare"):
            try:
                result.compare(reference)
            except ValueError as error:
                warn_user(f"{name} and {first}: {error}")


class NotebookBar:
    """A progress bar in a notebook, with the few names of rich's that :class:`wideflat.progress.Progress` uses."""

    #: Seconds between two drawings.
    interval = 0.2

    def __init__(self, display: Any) -> None:
        self._display, self._handle = display, None
        self._tasks: dict[int, dict[str, Any]] = {}
        self._start = self._drawn = 0.0

    @classmethod
    def here(cls) -> NotebookBar | None:
        """One, if this is a notebook."""
        try:
            from IPython import get_ipython
            from IPython.display import HTML, display
        except ImportError:
            return None
        shell = get_ipython()
        if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
            return None

        def show(text: str, handle: Any) -> Any:
            if handle is None:
                return display(HTML(text), display_id=True)
            handle.update(HTML(text))
            return handle

        return cls(show)

    def start(self) -> None:
        """The work begins."""
        self._start = time.monotonic()

    def stop(self) -> None:
        """The work is over: the bar shows how far it came."""
        self._draw()

    def add_task(self, description: str, total: float | None = None, completed: float = 0, figures: str = "") -> int:
        """A line; returns its number."""
        number = max(self._tasks, default=0) + 1
        self._tasks[number] = {
            "description": description, "total": total, "completed": completed, "before": completed, "figures": figures,
        }  # fmt: skip
        return number

    def update(self, task: int, **changes: Any) -> None:
        """Change a line; it is drawn now and then."""
        self._tasks[task].update(changes)
        if time.monotonic() - self._drawn > self.interval:
            self._draw()

    def remove_task(self, task: int) -> None:
        """Take a line away."""
        self._tasks.pop(task, None)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        elapsed = self._drawn - self._start
        self._handle = self._display("<br>".join(_line(task, elapsed) for task in self._tasks.values()), self._handle)


def _line(task: Mapping[str, Any], elapsed: float) -> str:
    done, total, before = task["completed"], task["total"], task["before"]
    words = f"{html.escape(task['description'])} "
    if total:
        words += f'<progress value="{done:g}" max="{total:g}"></progress> {done:g}/{total:g}'
        if before < done < total:
            words += f", {_duration(elapsed / (done - before) * (total - done))} left"
    else:
        words += f"{done:g}"
    return f"{words}, {_duration(elapsed)} so far {html.escape(task['figures'])}".rstrip()


def _duration(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def _short(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
